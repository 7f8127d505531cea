"""What is tried on every family of pipelines, and what a run of one must show."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.training.loop import Learner

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAMES = re.findall(r"^\| `(.+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
DOCUMENTED = re.compile("|".join(re.sub(r"<\w+>", r"[^/]+", name) for name in NAMES))
FAMILIES = ("sd3", "flux", "sana")
# Where SD3 is tried elsewhere in the same way.
OTHERS = [pytest.param("sd3", marks=pytest.mark.slow), "flux", "sana"]


def in_turn(names: Iterable[str]) -> list[Any]:
    """Cases (names, family): each name on one family, in turn, and with --slow on the others."""
    names = list(names)
    quick = {family: names[turn :: len(FAMILIES)] for turn, family in enumerate(FAMILIES)}
    others = {family: [name for name in names if name not in quick[family]] for family in FAMILIES}
    slow = [
        pytest.param(rest, f, marks=pytest.mark.slow, id=f"{f}, others")
        for f, rest in others.items()
    ]
    return [pytest.param(some, family, id=family) for family, some in quick.items() if some] + slow


def assert_learns(learner: Learner, iterations: int = 2) -> None:
    """The policy moves, and nothing that is logged is unknown or no number."""
    before = [p.clone() for p in learner.policy.parameters()]
    logged = [learner.iterate(i)[1] for i in range(iterations)]
    after = learner.policy.parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for metrics in logged:
        assert metrics["grad/norm"] > 0
        assert [name for name in metrics if not DOCUMENTED.fullmatch(name)] == []
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
