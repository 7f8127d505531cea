import pytest
from any_plan import plans
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees import presets
from flowrl.trees.plan import count
from flowrl.trees.show import draw, table


@given(plans(), st.integers(1, 3))
@pytest.mark.slow
def test_the_rows_of_a_table_add_up_to_the_counts(plan, prompts):
    rows, total = table(plan, prompts), count(plan).times(prompts)
    assert sum(row["forwards"] for row in rows) == total.forwards
    assert sum(row["trained"] for row in rows) == total.trained_edges


def test_a_table_says_what_happens_at_each_step():
    rows = table(presets.branch_grpo(4, 4, 2, [1]), prompts=3)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["nodes"] for row in rows] == [6, 6, 12, 12]
    assert [row["branch"] for row in rows] == [1, 2, 1, 1]
    assert [row["noise"] for row in rows] == ["sde", "sde", "sde", "ode"]
    assert [row["coupling"] for row in rows] == ["", "shared(4)", "", ""]
    assert [row["trained"] for row in rows] == [6, 12, 12, 0]
    assert [row["forwards"] for row in rows] == [6, 6, 12, 12]


def test_a_table_has_a_row_for_every_fan():
    rows = [row for row in table(presets.e_grpo(6, 12, 3, [1, 2])) if "fan" in row]
    assert [(row["fan"], row["step"], row["length"]) for row in rows] == [
        (0, 1, 1), (1, 1, 2), (2, 2, 1), (3, 2, 2)
    ]  # fmt: skip
    assert [row["forwards"] for row in rows] == [12, 9, 1 + 9, 6]  # the third has its trunk's
    assert table(presets.g2rpo(6, 6, 2, [1]))[-1]["strides"] == "1, 2, 3"


def test_a_tree_is_drawn_as_it_branches():
    drawing = draw(presets.branch_grpo(6, 4, 2, [1, 3]))
    assert drawing.splitlines()[1:5] == [
        "┅┅┳━━━┳━━━──",
        "  ┃   ┗━━━──",
        "  ┗━━━┳━━━──",
        "      ┗━━━──",
    ]


def test_a_comb_is_drawn_with_its_trunk_above_its_fans():
    assert draw(presets.tempflow(4, 6, 2)).splitlines()[1:7] == [
        "┰─┰─┳━──",
        "┃ ┃ ┗━──",
        "┃ ┣━────",
        "┃ ┗━────",
        "┣━──────",
        "┗━──────",
    ]
