import math

from any_plan import preset
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees.plan import count
from flowrl.trees.presets import G2RPO_STRIDES

SETS = st.sets(st.integers(0, 8), min_size=1, max_size=4).map(sorted)


@given(steps=st.integers(2, 12), width=st.integers(1, 5), trunks=st.integers(1, 4))
def test_tempflow_takes_the_forwards_of_trunks_and_tails(steps, width, trunks):
    plan = preset("tempflow", steps, trunks * width * (steps - 1), branch=width)
    total = count(plan)
    assert plan.roots == trunks and not plan.same_noise
    assert total.forwards == trunks * (steps - 1) + trunks * width * steps * (steps - 1) // 2
    assert total.leaves == trunks * width * (steps - 1)
    assert total.trained_edges == total.leaves and total.train_forwards == trunks * (steps - 1)


@given(at=SETS, width=st.integers(1, 4))
def test_g2rpo_takes_its_formula_less_what_strides_share(at, width):
    """The paper's M + G sum_k sum_lambda ceil((T - k - 1) / lambda), for fans at 0..M-1, counts
    a child's first velocity once a stride; here once, whatever the strides."""
    steps, strides = 10, G2RPO_STRIDES
    plan = preset("g2rpo", steps, width * len(at) * len(strides), at, branch=width)
    published = sum(math.ceil((steps - k - 1) / s) for k in at for s in strides)
    shared = (len(strides) - 1) * width * len(at)
    assert count(plan).forwards == max(at) + 1 + width * published - shared
    assert count(plan).trained_edges == width * len(at)


def test_egrpo_has_a_fan_for_every_length_that_fits():
    plan = preset("e_grpo", 6, 15, [0, 3, 4], branch=3)
    assert [(f.step, f.length) for f in plan.fans] == [(0, 1), (0, 2), (3, 1), (3, 2), (4, 1)]
    merged = [(m.step, m.to) for m in plan.moves if m.noise]
    assert merged == [(0, 1), (0, 2), (3, 4), (3, 5), (4, 5)]
