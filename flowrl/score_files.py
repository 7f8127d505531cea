"""What `flowrl score` does: scores of picture files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.errors import UserError
from flowrl.pictures import to_tensor
from flowrl.prompts import load_prompts
from flowrl.reward import RewardSpec, load_reward
from flowrl.scoring import score

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def score_images(
    pictures: Sequence[Path], rewards: Sequence[str], prompts: str | None
) -> list[dict[str, Any]]:
    """Scores of files, or of the pictures in folders, one row a picture.

    prompts: one prompt for all, or a file or built-in split with one for each picture in the
    order of their names. Raises UserError when their numbers differ.
    """
    paths = _picture_files(pictures)
    records = _prompts_for(prompts or "", len(paths))
    specs = [RewardSpec(name=name, reward=load_reward(name)) for name in rewards]
    rows = []
    for path, (text, metadata) in zip(paths, records, strict=True):
        with Image.open(path) as image:
            result = score(specs, to_tensor([image.convert("RGB")]), [text], [metadata])
        if result.errors:
            raise UserError(f"cannot score {path}: {next(iter(result.errors.values()))}")
        scores = dict(zip(rewards, result.scores[0].tolist(), strict=True))
        rows.append({"picture": str(path), "prompt": text} | scores)
    return rows


def _picture_files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(p for p in source.iterdir() if p.suffix.lower() in PICTURES)
        elif source.is_file():
            found.append(source)
        else:
            raise UserError(f"no picture at {source}")
    if not found:
        raise UserError(f"no pictures in {', '.join(map(str, sources))}: looked for {PICTURES}")
    return found


def _prompts_for(source: str, count: int) -> list[tuple[str, dict]]:
    if not source.startswith("tiny:") and not Path(source).suffix and not Path(source).is_file():
        return [(source, {})] * count
    records = load_prompts(source, limit=count if source.startswith("tiny:") else None)
    if len(records) != count:
        raise UserError(f"{source} has {len(records)} prompts for {count} pictures")
    return [(record.text, record.metadata) for record in records]
