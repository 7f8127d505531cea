"""Run folders to look at, made without training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrl.training.evaluate import Evaluation
from flowrl.training.ledger import Ledger

RECIPE = {
    "pipeline": {"path": "tiny-sd3"},
    "objective": {"kind": "grpo"},
    "optim": {"lr": 1e-3},
    "run": {"iterations": 8},
}


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """A run folder below `runs`, of 4 iterations with two evaluations, and a checkpoint at 4.

    stop: the content of its last event, None for a run without one.
    """

    def make(
        name: str = "run", *, stop: dict | None = None,
        prompts: tuple[str, ...] = ("a red circle",), recipe: dict | None = None,
    ) -> Path:  # fmt: skip
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        ledger = Ledger(folder)
        ledger.begin(
            version="0", recipe=recipe or RECIPE, facts={}, step=None, changed={}, run_id=None
        )
        lines = [{"step": 0, "eval/brightness": 0.25}]
        lines += [{"step": i, "reward/mean": i / 10, "loss": 0.5} for i in range(1, 5)]
        lines += [{"step": 4, "eval/brightness": 0.75}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "config.yaml").write_text("run:\n  iterations: 8\n")
        for step in (0, 4):
            images = torch.full((len(prompts), 3, 4, 4), 50 * (step + 1), dtype=torch.uint8)
            evaluation = Evaluation(
                scores=torch.full((len(prompts), 1), step / 8), names=("brightness",),
                images=images, prompts=prompts, draws=(0,) * len(prompts), key="",
            )  # fmt: skip
            evaluation.save(folder / "evaluations" / f"step-{step:06d}.safetensors")
        (folder / "samples").mkdir()
        Image.new("RGB", (8, 4), "red").save(folder / "samples" / "step-000004.png")
        (folder / "checkpoints" / "step-000004").mkdir(parents=True)
        (folder / "checkpoints" / "step-000004" / "state.safetensors").touch()
        if stop is not None:
            ledger.append("stop", step=4, seconds=2.0, **stop)
        return folder

    return make
