"""Plans of every kind for hypothesis, small enough to walk node by node."""

import re

from hypothesis import strategies as st

from flowrl.trees.plan import Fan, NoiseCoupling, Step, TreePlan
from flowrl.trees.presets import PRESETS


def preset(kind: str, steps: int, leaves: int, at=None, **options) -> TreePlan:
    """The plan of a published method; at: its window, or what else an iteration decides."""
    return PRESETS[kind](**options).make(steps, leaves, at)


@st.composite
def steps_of(draw, total: int):
    branching = draw(st.sets(st.integers(0, total - 2), max_size=2))
    made = []
    for i in range(total - 1):
        noise = i in branching or draw(st.booleans())
        branch = draw(st.integers(2, 3)) if i in branching else 1
        train = noise and draw(st.booleans())
        made.append(Step(branch=branch, noise=noise, train=train))
    return (*made, Step())


@st.composite
def fans_of(draw, total: int):
    made = []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, total - 2))
        made.append(
            Fan(
                step=step,
                width=draw(st.integers(1, 3)),
                length=draw(st.integers(1, total - 1 - step)),
                strides=tuple(draw(st.sets(st.integers(1, 3), min_size=1))),
                coupling=NoiseCoupling(kind="simplex"),
                train=draw(st.booleans()),
            )
        )
    return tuple(made)


@st.composite
def plans(draw):
    total = draw(st.integers(2, 7))
    steps, fans = draw(steps_of(total)), draw(fans_of(total))
    end = max((fan.step for fan in fans), default=total)  # of the trunk
    return TreePlan(
        roots=draw(st.integers(1, 3)),
        steps=steps[:end] + (Step(),) * (total - end),
        fans=fans,
        same_noise=draw(st.booleans()),
    )


def nearest(error: object) -> list[int]:
    found = re.search(r"nearest[a-z ]* (?:is|are) ([\d to,and]+)", str(error))
    assert found, f"{error} names no nearest number"
    return [int(n) for n in re.findall(r"\d+", found[1])]
