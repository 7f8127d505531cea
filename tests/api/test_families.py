"""Runs, samples, galleries and evaluations of every family, and RLG on its LoRA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.api import align, evaluate, gallery, sample
from flowrl.backbones.call import call_arguments
from flowrl.backbones.guidance import RLG
from flowrl.config import load_config
from flowrl.evaluation.drawing import DrawingOptions


@pytest.fixture(
    scope="module", params=[pytest.param("sd3", marks=pytest.mark.slow), "flux", "sana"]
)
def run(request, tiny_config, tmp_path_factory):
    """A finished run of one iteration, its family and its pipeline's path."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    config = tiny_config(
        pipeline={"family": request.param},
        rollout={"prompts_per_iteration": 1, "num_inference_steps": 2},
        optim={"lr": 0.1},
        run={"output_dir": str(folder), "iterations": 1},
        evaluation={
            "prompts": "tiny:geneval:test",
            "num_images": 2,
            "num_inference_steps": 2,
            "batch_size": 2,
        },
    )
    assert [row.name for row in align(config).comparisons] == ["brightness"]
    return request.param, config.pipeline.path, folder


def one_sample(path, folder, lora=None, **changes):
    options: dict[str, Any] = {"lora": lora, "device": "cpu"}
    if lora is None:
        options |= {"steps": 2, "max_sequence_length": 12}
    drawing = DrawingOptions(model=path, **(options | changes))
    (file,) = sample(drawing, ["a red circle"], seed=0, count=1, output_dir=folder)
    return Image.open(file)


def test_samples_galleries_and_evaluations_follow_the_lora(run, tmp_path, load_tiny):
    # Samples have the pipeline's size and follow the LoRA.
    family, path, folder = run
    base = one_sample(path, tmp_path / "base", guidance=1.0)
    aligned = one_sample(path, tmp_path / "aligned", lora=str(folder))
    assert base.size == aligned.size == (64, 64)
    assert base.tobytes() != aligned.tobytes()
    for strength, same in ((0.0, base), (1.0, aligned)):
        drawn = one_sample(path, tmp_path / f"{strength}", lora=str(folder), rlg=strength)
        assert drawn.tobytes() == same.tobytes()
    assert one_sample(path, tmp_path / "3", lora=str(folder), rlg=3.0).tobytes() not in (
        base.tobytes(),
        aligned.tobytes(),
    )
    # A gallery of a base and a LoRA.
    page = gallery(
        None,
        base=path,
        lora=str(folder / "pytorch_lora_weights.safetensors"),
        prompts="tiny:ocr:test",
        count=2,
        seed=5,
        output_dir=tmp_path,
    )
    assert page.is_file() and "data:image" in page.read_text()
    # An evaluation compares base and LoRA.
    rows = evaluate(load_config(folder / "config.yaml"), lora=str(folder))
    assert [row["reward"] for row in rows] == ["brightness"]
    assert rows[0]["change"] != 0
    # The card draws as the run was evaluated. Executed from its text, with the tiny pipeline in
    # place of the one it names.
    text = (folder / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("image = pipe("))
    pipe = load_tiny(family=family)
    names: dict = {}
    exec(line, {"pipe": pipe}, names)
    assert names["image"].size == (64, 64)
    assert ("use_resolution_binning=False" in line) == (family == "sana")


@torch.no_grad()
def test_rlg_combines_the_velocities_of_base_and_lora(run, load_tiny):
    """One step of the pipeline is affine in the velocity."""
    family, _, folder = run
    pipe = load_tiny(family=family)

    def latents():
        return pipe(
            "a red circle",
            num_inference_steps=1,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            **call_arguments(pipe, guidance=1.0, max_sequence_length=12),
        ).images

    base = latents()
    pipe.load_lora_weights(Path(folder))
    aligned = latents()
    with RLG(pipe, 2.0):
        torch.testing.assert_close(latents(), 2 * aligned - base, rtol=1e-3, atol=1e-3)
    assert torch.equal(latents(), aligned) and (aligned - base).abs().max() > 1e-2
