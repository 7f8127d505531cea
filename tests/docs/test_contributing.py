"""The examples of CONTRIBUTING.md run as they stand."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from flowrl.backbones.base import backbone_members
from flowrl.build.backbone import backbone_class
from flowrl.config import load_config
from flowrl.config.load import sort_arguments
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


def test_the_backbone_of_the_guide_is_the_examples_and_found_by_its_path(monkeypatch):
    whole = (ROOT / "examples" / "z_image.py").read_text()
    parts = [part.strip("\n") for part in example("backbone").split("    ...\n")]
    assert len(parts) == 3 and not parts[-1]
    head, *lines = parts[0].splitlines()
    for part in (head, "\n".join(lines), parts[1]):
        assert f"{part}\n" in whole
    found = re.findall(r"^flowrl train (?:.*\\\n)+.*", TEXT, re.M)
    (command,) = (words for words in found if "pipeline.backbone" in words)
    request = sort_arguments(shlex.split(command.replace("\\\n", " "))[2:])
    config = load_config(request.recipe, request.overrides)
    assert config.rollout.guidance_scale == config.evaluation.guidance_scale == 5
    assert config.pipeline.height == config.pipeline.width == 1024
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    made = backbone_class(config.pipeline.backbone)
    assert made.__name__ == "ZImage"
    assert layers_lacking(config.lora.targets or made.lora_targets) == []
    quickstart = load_config("quickstart").lora.targets
    assert layers_lacking(quickstart) == quickstart  # SD3's names


def layers_lacking(targets) -> list[str]:
    """Endings that no layer of a tiny Z-Image has."""
    place = ROOT / "tests" / "examples" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_z_image", place)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(tiny := importlib.util.module_from_spec(spec))
    with torch.random.fork_rng():
        names = [name for name, _ in tiny.transformer().named_modules()]
    return [target for target in targets if not any(name.endswith(target) for name in names)]


def test_the_guide_says_what_every_member_of_a_backbone_is():
    section = TEXT.split("## A backbone")[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*backbone_members(), "layer_rules"}
