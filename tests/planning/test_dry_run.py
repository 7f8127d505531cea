"""A rehearsal keeps what decides a recipe, and its loop runs on the tiny pipelines."""

import json
from pathlib import Path

import pytest

from flowrl.api import align
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.planning.dry_run import rehearse
from flowrl.planning.model_specs import pipeline_class

LARGE = {
    "pipeline": {"path": "black-forest-labs/FLUX.1-dev", "dtype": "bf16"}
    | {"height": 512, "width": 512},
    "memory": {"base_bits": 4},
    "lora": {"rank": 64, "alpha": 128},
    "prompts": {"train": "mine.txt"},
    "rollout": {
        "prompts_per_iteration": 48,
        "group_size": 24,
        "num_inference_steps": 6,
        "guidance_scale": 3.5,
        "batch_size": 16,
    },
    "optim": {"updates_per_rollout": 2, "micro_batch": 16},
    "rewards": [
        {"name": "ocr", "weight": 2.0, "applies_to": {"tag": ["ocr"]}},
        {"name": "pickscore", "held_out": True, "executor": {"kind": "inline", "micro_batch": 4}},
        {"name": "hpsv2", "executor": {"kind": "http", "urls": ["http://127.0.0.1:9"]}},
    ],
    "evaluation": {
        "prompts": "theirs.txt",
        "every": 100,
        "num_inference_steps": 28,
        "guidance_scale": 3.5,
    },
    "run": {"iterations": 3000, "trackers": ["wandb"], "push_to_hub": True},
}


def large(**changes) -> Config:
    data = {name: dict(v) if isinstance(v, dict) else v for name, v in LARGE.items()}
    for section, value in changes.items():
        data[section] = data.get(section, {}) | value if isinstance(value, dict) else value
    return parse_config(data)


def test_what_decides_a_recipe_stays_and_nothing_is_large_real_or_remote(tmp_path):
    real, small = large(), rehearse(large(), tmp_path).config
    assert small.objective == real.objective and small.rollout.tree == real.rollout.tree
    for name in ("num_inference_steps", "guidance_scale", "kernel", "noise_level"):
        assert getattr(small.rollout, name) == getattr(real.rollout, name)
    assert small.lora.alpha / small.lora.rank == real.lora.alpha / real.lora.rank
    assert small.optim.updates_per_rollout == 2 and small.optim.lr == real.optim.lr
    for ours, theirs in zip(small.rewards, real.rewards, strict=True):
        assert ours.label == theirs.name and ours.weight == theirs.weight
        assert ours.held_out == theirs.held_out and ours.applies_to == {}
    assert small.pipeline.path == "tiny-flux" and small.pipeline.device == "cpu"
    assert (small.pipeline.height, small.memory.base_bits) == (None, None)
    assert small.rollout.prompts_per_iteration * small.rollout.group_size <= 16
    assert small.run.iterations == 2 and small.run.trackers == [] and not small.run.push_to_hub
    assert {entry.executor.kind for entry in small.rewards} == {"inline"}
    assert Path(small.run.output_dir).is_relative_to(tmp_path)
    assert small.prompts.train == "tiny:geneval:train"  # in place of files that are not here


def test_prompts_of_ones_own_are_used_and_all_of_them_are_checked(tmp_path):
    lines = [{"prompt": f"a cat {i}", "tag": "cat"} for i in range(30)]
    lines.append({"prompt": 'the word "HELLO"', "tag": "ocr"})
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = rehearse(large(prompts={"train": str(mine)}), tmp_path).config
    rows = [json.loads(line) for line in Path(small.prompts.train).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [line["prompt"] for line in lines[:12]]
    weighed = {"train": str(mine), "balance": "tag", "weights": {"ocr": 3}}
    assert rehearse(large(prompts=weighed), tmp_path).config.prompts.weights is None  # few prompts
    with pytest.raises(UserError, match="names 'dog', but no prompt has this tag"):
        rehearse(large(prompts=weighed | {"weights": {"dog": 3}}), tmp_path)
    (tmp_path / "mine.txt").write_text("a cat without any quotes\n")
    config = large(prompts={"train": str(tmp_path / "mine.txt")}, rewards=[{"name": "ocr"}])
    with pytest.raises(UserError, match="reward 'ocr' applies to none of the prompts"):
        rehearse(config, tmp_path)


def test_a_reward_that_is_not_there_or_lacks_a_gradient_is_told(tmp_path):
    with pytest.raises(UserError, match="mood"):
        rehearse(large(rewards=[{"name": "geneval", "args": {"mood": "strict"}}]), tmp_path)
    config = large(objective={"kind": "refl"}, rollout={"tree": {"kind": "ode"}})
    with pytest.raises(UserError, match="reward 'ocr' does not say `differentiable"):
        align(rehearse(config, tmp_path).config)


def test_the_command_says_what_it_replaced_and_leaves_nothing(flowrl, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ("train", "sd3.5-medium-grpo-fast-24gb", "--dry-run", "evaluation.prompts=null")
    code, out, _ = flowrl(*words)
    assert code == 0 and "pipeline.path" in out and "tiny-sd3" in out
    assert "The loop works: 2 iterations with grpo on flow_grpo_fast trees." in out
    assert list(tmp_path.iterdir()) == []
    code, _, err = flowrl("train", "quickstart", "--dry-run", "--resume", "latest")
    assert code == 1 and "--resume" in err  # it is not resumed


def test_a_dry_run_builds_the_recipe_s_own_class(tmp_path):
    small = rehearse(large(pipeline={"path": "Qwen/Qwen-Image"}), tmp_path).config
    assert pipeline_class(small.pipeline.path) == "QwenImagePipeline"
    assert (small.pipeline.height, small.pipeline.width) == (64, 64)
