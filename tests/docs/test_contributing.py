"""The examples of CONTRIBUTING.md run as they stand."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from flowrl.config import load_config
from flowrl.config.arguments import sort_arguments
from flowrl.config.trees import CustomTreeOptions
from flowrl.scoring.check import check_named
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.trees.plan import count

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def example(name: str) -> str:
    found = re.search(rf"```python {name}\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"CONTRIBUTING.md has no example {name!r}"
    return found[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; the `flowrl` command, unlike `python -m`, starts without it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return tmp_path


def test_the_reward_of_the_guide_is_found_by_its_path_and_prefers_edges(here):
    (here / "my_rewards.py").write_text(example("reward"))
    spec = RewardSpec(name="mine", reward=load_reward("my_rewards:sharpness"))
    images = torch.zeros(2, 3, 8, 8)
    images[1, :, ::2] = 1
    result = score([spec], images, ["", ""], [{}, {}])
    assert result.scores[:, 0].tolist() == pytest.approx([0, 1])
    (finding,) = check_named("my_rewards:sharpness").results
    assert finding.state == "ok" and finding.detail.startswith("1 fixture right, repeatable")
    commands = re.findall(r"^flowrl train quickstart .*reward.*$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        request = sort_arguments(shlex.split(command)[2:])
        (reward,) = load_config("quickstart", request.overrides).rewards
        assert reward.name == "my_rewards:sharpness"
    assert reward.executor.kind == "pool" and reward.executor.workers == 2


def test_the_plan_of_the_guide_is_found_by_its_path(here):
    (here / "my_plans.py").write_text(example("plan"))
    section = CustomTreeOptions(kind="custom", function="my_plans:widening")
    for iteration, trained in [(0, 1), (120, 3), (10_000, 7)]:
        plan = section.plan(iteration=iteration, steps=8, leaves=4, seed=0)
        assert [step.train for step in plan.steps] == [True] * trained + [False] * (8 - trained)
        assert count(plan).leaves == 4


def test_the_objective_of_the_guide_is_found_by_its_path_and_learns(here, make_learner):
    (here / "my_objectives.py").write_text(example("objective"))
    target = {"target": "my_objectives:AdvantageMatching", "args": {"kl_coef": 0.5}}
    learner = make_learner(
        objective={"kind": "custom"} | target,
        rollout={
            "prompts_per_iteration": 2,
            "group_size": 4,
            "num_inference_steps": 4,
            "tree": {"kind": "ode"},
        },
    )
    assert learner.objective.kl_coef == 0.5
    before = [p.clone() for p in learner.policy.parameters()]
    first, second = (learner.iterate(i)[1] for i in range(2))
    assert first["policy/kl"] == 0 and second["policy/kl"] > 0
    assert first["endpoints/images"] == 8 and first["grad/norm"] > 0
    assert not all(map(torch.equal, before, learner.policy.parameters()))
