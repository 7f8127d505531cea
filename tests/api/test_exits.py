"""What comes out of a run of any pipeline class: card, samples, evaluation and gallery take it."""

import re
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from flowrl import api
from flowrl.backbones.lora_formats import FILE
from flowrl.backbones.small import small_folder

pytestmark = pytest.mark.slow  # the tests of each exit take runs of the built-in pipelines
CLASSES = (
    "Flux2KleinPipeline", "QwenImagePipeline", "ZImagePipeline", "Krea2Pipeline",
    "LongCatImagePipeline",
)  # fmt: skip


def image(pipeline: Any, call: dict[str, Any]) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    pipeline.set_progress_bar_config(disable=True)
    result = pipeline(prompt="a red circle", generator=generator, **call)
    return np.asarray(result.images[0]).astype(int)


@pytest.mark.parametrize("name", CLASSES)
def test_the_card_and_the_commands_that_draw_take_the_run(name, tiny_config, tmp_path, flowrl):
    base, folder = small_folder(getattr(diffusers, name), tmp_path / "base"), tmp_path / "run"
    config = tiny_config(
        pipeline={"path": str(base), "max_sequence_length": 64, "height": 64, "width": 64},
        objective={"kind": "nft"},
        rollout={"num_inference_steps": 4, "tree": {"kind": "ode"}},
        evaluation={"prompts": "tiny:geneval:test", "num_images": 2, "num_inference_steps": 4},
        optim={"lr": 0.1},
        run={"iterations": 2, "output_dir": str(folder)},
    )
    api.align(config)
    assert (folder / FILE).is_file() and (folder / "gallery" / "index.html").is_file()
    # The card's own code.
    text = (folder / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["image"].size == (64, 64)
    # `sample` draws the image of the card's pipeline.
    arguments = re.search(r"pipe\(prompt=.*, (num_inference_steps=.*)\)\.images\[0\]", code)
    assert arguments is not None
    call = eval(f"dict({arguments[1]})")
    expected = image(names["pipe"], call)
    plain = diffusers.DiffusionPipeline.from_pretrained(base)
    assert not np.array_equal(image(plain, call), expected)
    words = ("sample", base, "a red circle", "--lora", folder, "-o", tmp_path / "images")
    assert flowrl(*words)[0] == 0
    (path,) = (tmp_path / "images").glob("*.png")
    assert abs(np.asarray(Image.open(path)).astype(int) - expected).max() <= 1
    # Evaluation by the pipeline's own call, and the gallery.
    deployed = config.evaluation.model_copy(update={"as_deployed": True})
    (row,) = api.evaluate(config.model_copy(update={"evaluation": deployed}), lora=str(folder))
    assert row["base"] != row["aligned"]
    assert flowrl("gallery", folder, "--count", 1, "-o", tmp_path / "pages")[0] == 0
