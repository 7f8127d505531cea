"""examples/grpo_from_scratch.py computes what `flowrl train` computes."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import flowrl
from flowrl.backbones.lora_formats import open_lora
from flowrl.training.tracking import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_from_scratch.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("grpo_from_scratch", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_its_losses_and_lora_are_those_of_flowrl_train(example, tmp_path):
    settings = example.Settings(iterations=2, prompts_per_iteration=2, group_size=4)
    losses = example.main(settings, tmp_path / "scratch")
    config = flowrl.load_config(
        "quickstart-grpo",
        [
            "rollout.prompts_per_iteration=2", "rollout.group_size=4", "rollout.merge_lora=false",
            "optim.micro_batch=8", "ema.decay=null", "evaluation.prompts=null",
            "run.iterations=2", "run.trackers=[]", "run.sample_every=0",
            "pipeline.device=cpu", f"run.output_dir={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    flowrl.align(config)
    assert losses == [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    ours, its = map(open_lora, (tmp_path / "scratch", tmp_path / "run"))
    assert ours.state.keys() == its.state.keys() and ours.scales == its.scales
    assert all(torch.equal(ours.state[name], tensor) for name, tensor in its.state.items())
    assert any(up.any() for _, up in its.layers.values())  # something was learned
