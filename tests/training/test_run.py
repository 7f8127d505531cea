"""Killed, interrupted or out of time: a run that goes on ends as if nothing had happened."""

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from crashes import SMALLEST

from flowrl.api import align
from flowrl.backbones.lora_formats import open_lora
from flowrl.config.rollout import OptimOptions
from flowrl.training.checkpoint import STATE
from flowrl.training.evaluate import Evaluation, Evaluator
from flowrl.training.loop import learning_rate, train
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import load_state
from flowrl.web.runs import RunFiles

# Schedules of the iteration: a window that is drawn, and pruning that ends.
MOVING = {
    "tree": {"kind": "tree_grpo", "branch": 2, "window": {"kind": "random", "size": 2}},
    "depth_pruning": {"start": 2, "size": 1, "stop": 2},
}
EVALUATION = {"prompts": "tiny:colors:test", "num_images": 2, "num_inference_steps": 2}
SMALL = {
    "rollout": {"batch_size": 4, **MOVING},
    "optim": {"micro_batch": 4},
    "ema": {"decay": 0.5},
    "evaluation": EVALUATION | {"every": 2},
}
ITERATIONS = 5


@pytest.fixture(scope="module")
def config_for(tiny_config):
    def make(folder: Path, **run):
        settings = {"iterations": ITERATIONS, "checkpoint_every": 2, "keep_checkpoints": 1}
        run = settings | {"output_dir": str(folder)} | run
        return tiny_config(**SMALL, run=run)

    return make


def test_the_last_files_hold_the_average_and_the_best(config_for, tmp_path):
    whole = tmp_path / "run"
    align(config_for(whole))
    # What is trained moved in that run. Or the tests below would say nothing of schedules.
    lines = [line for line in read_metrics(whole) if "tree/forwards" in line]
    assert len({line["tree/forwards"] for line in lines}) > 1
    # What lies at the root is the average of the last iteration.
    state = load_state(newest(whole))
    assert state["iteration"] == ITERATIONS
    ema = state["policy"]["adapters"]["ema"]
    tensors = open_lora(whole).state.values()
    assert sorted(t.double().sum().item() for t in tensors) == sorted(
        t.double().sum().item() for t in ema
    )
    assert not all(
        torch.equal(a, b) for a, b in zip(ema, state["policy"]["adapters"]["default"], strict=True)
    )
    # The best evaluation is known to the last checkpoint. Also when the best is the evaluation
    # after the last iteration.
    scores = {
        step: Evaluation.load(whole / "evaluations" / f"step-{step:06d}.safetensors").mean(
            "brightness"
        )
        for step in (2, 4, 5)
    }
    best = max(scores, key=lambda step: scores[step])
    state = load_state(newest(whole))
    assert state["best"][1] == best
    assert state["best"][0] == pytest.approx(scores[best])
    kept = {int(p.parent.name.removeprefix("step-")) for p in whole.glob(f"checkpoints/*/{STATE}")}
    assert kept == {best, ITERATIONS}


def newest(folder: Path) -> Path:
    return max(folder.glob(f"checkpoints/step-*/{STATE}"))


def test_a_time_limit_stops_after_an_iteration_and_is_no_end(config_for, tmp_path):
    folder = tmp_path / "run"
    trained = align(config_for(folder, max_minutes=1e-6))
    assert [line["step"] for line in read_metrics(folder)] == [0, 1]
    # Whoever looks at the run reads that it is not finished.
    said = f"run.max_minutes after 1 of {ITERATIONS} iterations"
    state = RunFiles(name="run", path=folder).state()
    texts = [(folder / name).read_text() for name in ("README.md", "gallery/index.html")]
    assert all(said in text.replace("\\_", "_") for text in (trained.stopped, state.detail, *texts))
    assert state.name == "stopped" and f"--resume {folder} run.max_minutes=null" in trained.stopped
    assert load_state(newest(folder))["iteration"] == 1


def test_metrics_are_on_the_disk_before_what_a_resumed_run_takes_for_written(
    config_for, tmp_path, monkeypatch
):
    """A power cut keeps what was synced: of metrics no less than of checkpoints and evaluations."""
    metrics, on_disk, late = tmp_path / "run" / "metrics.jsonl", {}, []
    fsync, replace = os.fsync, os.replace

    def record(handle: int) -> None:
        fsync(handle)
        on_disk[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def check(source, target) -> None:
        if Path(target).name == STATE or "evaluations" in str(target):
            whole = metrics.stat()
            if whole.st_size and on_disk.get(whole.st_ino) != whole.st_size:
                late.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", check)
    align(config_for(tmp_path / "run", iterations=2, checkpoint_every=1))
    assert late == [] and on_disk


def test_the_base_is_evaluated_without_the_adapter(make_run):
    evaluation = SMALL["evaluation"] | {"guidance_scale": 3.0}  # of its own, beside the rollout's
    _, learner, run = make_run(evaluation=evaluation)
    for p in learner.policy.parameters():
        p.data.normal_(0, 0.05)
    with run.session():
        run.begin(learner.policy, learner.optimizer)
    evaluator, velocity = run.evaluator, run.evaluator.backbone.velocity
    with learner.policy.disabled():
        expected = evaluator(velocity, run.runtime).scores
    assert torch.equal(Evaluation.load(run.evaluation_path(0)).scores, expected)
    assert not torch.equal(evaluator(velocity, run.runtime).scores, expected)


def test_a_run_takes_over_the_base_s_scores_of_one_beside_it(
    tiny_config, tiny_pipeline_path, tmp_path, monkeypatch
):
    """Of the same files, prompts and versioned rewards: anything else is evaluated anew."""
    model, evaluations = tmp_path / "model", []
    shutil.copytree(tiny_pipeline_path, model)
    generate = Evaluator._generate

    def counted(self, *args, **kwargs):
        evaluations.append(self.key)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Evaluator, "_generate", counted)

    def trained(name: str, own=None, **changes):
        config = tiny_config(
            pipeline={"path": str(model)}, run={"output_dir": str(tmp_path / "runs" / name)},
            rollout={"num_inference_steps": 2}, optim={"lr": (1 + len(evaluations)) / 1e4},
            **{"evaluation": SMALL["evaluation"]} | changes,
        )  # fmt: skip
        before = len(evaluations)
        align(config, rewards=own)
        folder = tmp_path / "runs" / name
        row = next(row for row in read_metrics(folder) if row["step"] == 0)
        scores = {key: value for key, value in row.items() if key.startswith("eval/")}
        return len(evaluations) - before, scores

    (drawn, first), (taken, second) = trained("first"), trained("second")
    assert (drawn, taken) == (2, 1) and first == second and first
    assert trained("wider", evaluation=SMALL["evaluation"] | {"num_images": 3})[0] == 2
    assert trained("own reward", own={"mean": lambda images, *_: images.mean((1, 2, 3))})[0] == 2
    weights = next((model / "transformer").glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    assert trained("other weights")[0] == 2


def test_run_seed_seeds_the_global_generators_that_a_reward_may_use(tiny_config, tmp_path):
    def luck(images, prompts, metadata):
        return [random.random() + np.random.rand() + torch.rand(()).item() for _ in images]

    luck.deterministic = False

    def rewards_of(name: str, seed: int, *sessions: int) -> list[float]:
        for iterations in sessions:
            run = {"iterations": iterations, "seed": seed, "output_dir": str(tmp_path / name)}
            align(tiny_config(run=run), rewards={"luck": luck})
        return [line["reward/mean"] for line in read_metrics(tmp_path / name)]

    first = rewards_of("first", 3, 2)
    assert rewards_of("in two sessions", 3, 1, 2) == first != rewards_of("other", 4, 2)


@pytest.fixture
def small(make_run):
    settings = {"rollout": SMALLEST | {"num_inference_steps": 3}, "evaluation": EVALUATION}
    return lambda resume=None, **changes: make_run(resume, **settings | changes)[1:]


def trained(learner, run, iterations: int) -> dict:
    """The state that the run leaves."""
    with run.session():
        train(learner, run, iterations=iterations)
    return run.checkpoints.newest()[1]


def test_it_steps_as_its_recipe_now_says(small):
    state = trained(*small(), iterations=2)
    learner, run = small(state, optim={"lr": 1e-7, "weight_decay": 0.0})
    with run.session():
        run.begin(learner.policy, learner.optimizer)
    (group,) = learner.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-7, 0.0)
    assert learner.optimizer.state_dict()["state"]  # the moments are the checkpoint's


def test_the_base_is_drawn_anew_when_it_is_evaluated_otherwise(small):
    state = trained(*small(), iterations=1)
    learner, run = small(state)
    first = run.evaluation_path(0).stat().st_mtime_ns
    trained(learner, run, iterations=1)
    assert run.evaluation_path(0).stat().st_mtime_ns == first
    learner, run = small(state, evaluation=EVALUATION | {"num_images": 3})
    trained(learner, run, iterations=1)
    base = Evaluation.load(run.evaluation_path(0))
    assert len(base.scores) == 3 and base.key == run.evaluator.key


def test_a_warmed_up_learning_rate_rises_evenly_and_then_falls():
    risen = OptimOptions(lr=1.0, warmup=3)
    assert [learning_rate(risen, i, 4) for i in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    falling = OptimOptions(lr=1.0, schedule="linear", warmup=1)
    assert [learning_rate(falling, i, 4) for i in (0, 1, 3, 4)] == [0.5, 0.75, 0.25, 0.0]
