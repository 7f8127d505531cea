"""Every objective, sampler, tree and reward runs on the tiny pipelines and logs what is documented.

By default each case runs on one family, in turn; with --slow on all of them.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import FOLLOWED

from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.quantization.linear import SamePrecisionLinear
from flowrl.trees.presets import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAMES = re.findall(r"^\| `(.+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
DOCUMENTED = re.compile("|".join(re.sub(r"<\w+>", r"[^/]+", name) for name in NAMES))
FAMILIES = ("sd3", "flux", "sana")
FIRST = {"kind": "fixed", "size": 1}
ODE = {"tree": {"kind": "ode"}}
TREE = {"tree": {"kind": "tree_grpo", "branch": 4, "window": FIRST}}
CHAINS = {"tree": {"kind": "flow_grpo"}}
FANS = {"tree": {"kind": "tempflow", "branch": 2, "splits": [0, 1]}}
COLORS = {"specs": [{"name": "tiny_colors"}], "prompts": {"train": "tiny:color_attr:train"}}

# The changes of a recipe, by name; a few images of an untrained size.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"objective": {"kind": "grpo", "kl_coef": 0.1}, "rollout": CHAINS},
    "guard": {
        "objective": {"kind": "grpo", "ratio": "normalised", "step_weight": "equal"},
        "rollout": CHAINS,
    },
    "tempflow": {
        "objective": {
            "kind": "grpo", "step_weight": "noise", "advantage": {"edges": "fan", "scope": "leaf"},
        },
        "rollout": FANS,
    },
    "spo": {"objective": {"kind": "spo", "tau": 1e-6}, "rollout": TREE},
    "gdro on a tree": {"objective": {"kind": "gdro"}, "rollout": TREE},
    "online dpo": {"objective": {"kind": "dpo", "anchor_every": 2}, "rollout": ODE},
    "gdro, top-1": {"objective": {"kind": "gdro", "form": "top1"}, "rollout": ODE},
    "nft": {"objective": {"kind": "nft", "noising": {"count": 2}}, "rollout": ODE},
    "awm": {
        "objective": {"kind": "awm", "noising": {"count": 2}}, "rollout": ODE,
    },
    "guided": {
        "objective": {"kind": "nft", "noising": {"count": 2}},
        "rollout": ODE | {"guidance_scale": 3.0, "training_guidance_scale": 1.0},
    },
}  # fmt: skip
OBJECTIVES |= {
    kind: {"objective": {"kind": kind}, "rollout": ODE}
    for kind in ("dpo", "gdro", "sft", "rwr", "kto", "dgpo", "lair")
}
OBJECTIVES |= {
    kind: {"objective": {"kind": kind} | changes, "rollout": ODE | {"group_size": 2}} | COLORS
    for kind, changes in FOLLOWED.items()
}
TREES = {  # options where a preset needs some to be small
    "flow_grpo": {}, "flow_grpo_fast": {"window": FIRST}, "dance_grpo": {},
    "mix_grpo": {"window": FIRST}, "branch_grpo": {"splits": [0, 1]},
    "branch_grpo_mix": {"splits": [0, 1], "window": FIRST},
    "tree_grpo": {"branch": 2, "window": FIRST}, "b2_diffurl": {"branch": 2},
    "tempflow": {"branch": 2, "splits": [0, 1]}, "g2rpo": {"branch": 2, "splits": [0]},
    "e_grpo": {"branch": 2, "splits": [0]},
}  # fmt: skip
SAMPLED = {
    f"tree {kind}": {
        # Three strides of two children.
        "rollout": {"tree": {"kind": kind} | tree, "group_size": 6 if kind == "g2rpo" else 4}
    }
    for kind, tree in TREES.items()
} | {
    f"kernel {name}": {"rollout": CHAINS | {"kernel": name, "noise_level": 0.7}} for name in KERNELS
}


def each_on_one(cases: Iterable[str]) -> list[Any]:
    """Return (name, family): each name on one family, in turn, and on the others with --slow."""
    return [
        pytest.param(name, family, marks=() if turn % 3 == place else pytest.mark.slow)
        for turn, name in enumerate(cases)
        for place, family in enumerate(FAMILIES)
    ]


@pytest.fixture
def learner(make_learner):
    def make(family, **changes):
        small = {"prompts_per_iteration": 2, "group_size": 4, "num_inference_steps": 3}
        changes["rollout"] = small | changes.get("rollout", {})
        changes["pipeline"] = {"family": family} | changes.get("pipeline", {})
        return make_learner(**changes)

    return make


def assert_learns(learner, iterations: int = 1) -> None:
    """The policy moves, and every logged metric is documented and finite."""
    before = [p.clone() for p in learner.policy.parameters()]
    logged = [learner.iterate(i)[1] for i in range(iterations)]
    pairs = zip(before, learner.policy.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)
    for metrics in logged:
        assert metrics["grad/norm"] > 0 and metrics.get("policy/ratio_error_max", 0) < 0.1  # nats
        assert [name for name in metrics if not DOCUMENTED.fullmatch(name)] == []
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


@pytest.mark.parametrize(("name", "family"), each_on_one(OBJECTIVES))
def test_an_objective_learns(learner, name, family):
    assert_learns(learner(family, **OBJECTIVES[name]), 2 if name == "online dpo" else 1)


@pytest.mark.parametrize(("name", "family"), each_on_one(SAMPLED))
def test_a_tree_or_sampler_draws_images_that_are_learned_from(learner, name, family):
    assert TREES.keys() == PRESETS.keys() - {"custom", "ode"}
    rollout = {"prompts_per_iteration": 1} | SAMPLED[name]["rollout"]
    assert_learns(learner(family, rollout=rollout))


def test_a_negative_prompt_is_refused_where_the_pipeline_takes_none(learner):
    negative = CHAINS | {"guidance_scale": 3.0, "negative_prompt": "a ring"}
    with pytest.raises(UserError, match="a ring"):
        learner("flux", rollout=negative).iterate(0)


LOW = {"precision": "nvfp4-emulated", "min_dim": 0}  # the tiny layers too


def slow_but(family: str) -> list[Any]:
    """Return the families, of which one is tested by default."""
    return [pytest.param(f, marks=() if f == family else pytest.mark.slow) for f in FAMILIES]


@pytest.mark.parametrize("family", slow_but("sd3"))
def test_candidates_may_be_in_few_bits(learner, tmp_path, family):
    explore = {"precision": LOW["precision"], "candidates": 8, "num_inference_steps": 2}
    run = {"output_dir": str(tmp_path / "run")}
    rollout = ODE | {"explore": explore, "num_inference_steps": 4}
    few = {"min_dim": LOW["min_dim"]}
    assert_learns(
        learner(family, pipeline=few, rollout=rollout, objective={"kind": "nft"}, run=run)
    )


@pytest.mark.parametrize("family", slow_but("sana"))
def test_learning_may_be_in_few_bits_except_for_convolutions(learner, tmp_path, family):
    made = learner(family, pipeline=LOW, rollout=CHAINS, run={"output_dir": str(tmp_path / "run")})
    layers = made.policy.network.named_modules()
    packed = [name for name, layer in layers if isinstance(layer, SamePrecisionLinear)]
    assert packed and not any("conv" in name for name in packed)  # as in SANA's feed-forward
    assert_learns(made)


def test_a_loss_that_is_not_finite_stops_before_the_update(learner, monkeypatch):
    made = learner("sd3", objective={"kind": "sft"}, rollout=ODE)
    before = [p.clone() for p in made.policy.parameters()]
    loss = made.objective.loss

    def broken(self, models, batch):
        value, metrics = loss(models, batch)
        return value * math.nan, metrics

    monkeypatch.setattr(type(made.objective), "loss", broken)
    with pytest.raises(UserError, match="NaN or infinite"):
        made.iterate(0)
    assert all(torch.equal(a, b) for a, b in zip(before, made.policy.parameters(), strict=True))
