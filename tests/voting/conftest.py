import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture(scope="session")
def write_images() -> Callable[..., Path]:
    """Write a folder of images in GenEval's layout: some of each prompt."""

    def write(folder: Path, texts: Sequence[str], images: int = 3) -> Path:
        for index, text in enumerate(texts):
            place = folder / f"{index:05d}"
            (place / "samples").mkdir(parents=True)
            (place / "metadata.jsonl").write_text(json.dumps({"prompt": text}))
            for k in range(images):
                color = (60 * k % 256, 40 * index % 256, 90)
                Image.new("RGB", (20, 16), color).save(place / "samples" / f"{k:04d}.png")
        return folder

    return write
