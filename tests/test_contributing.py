"""The examples of CONTRIBUTING.md run as they stand."""

import re
import sys
from pathlib import Path

import pytest
import torch

from flowrl.functional.sde import KERNELS
from flowrl.reward import RewardSpec, load_reward, score
from flowrl.samplers.plan import make_plan

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()


def example(name: str) -> str:
    found = re.search(rf"```python {name}\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"CONTRIBUTING.md has no example {name!r}"
    return found[1]


def test_the_reward_of_the_guide_is_found_by_its_path_and_prefers_edges(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(example("reward"))
    monkeypatch.chdir(tmp_path)
    # The `flowrl` command, unlike `python -m`, starts without the working directory.
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    spec = RewardSpec(name="mine", reward=load_reward("my_rewards:sharpness"))
    images = torch.zeros(2, 3, 8, 8)
    images[1, :, ::2] = 1
    result = score([spec], images, ["", ""], [{}, {}])
    assert result.scores[0, 0] == 0
    assert result.scores[1, 0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "iteration, trained", [(0, [0]), (120, [0, 1, 2]), (10_000, list(range(7)))]
)
def test_the_window_of_the_guide_makes_a_plan(iteration, trained):
    scope: dict = {}
    exec(example("window"), scope)
    sigmas = torch.linspace(1, 0, 9)
    plan = make_plan(sigmas, KERNELS["dance_sde"], 0.3, scope["widening"](iteration, 8))
    assert plan.trained() == trained
