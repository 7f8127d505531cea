from any_plan import preset

from flowrl.trees.show import draw


def test_a_tree_is_drawn_as_it_branches():
    drawing = draw(preset("branch_grpo", 6, 4, splits=[1, 3]))
    assert drawing.splitlines()[1:5] == [
        "┅┅┳━━━┳━━━──",
        "  ┃   ┗━━━──",
        "  ┗━━━┳━━━──",
        "      ┗━━━──",
    ]


def test_a_comb_is_drawn_with_its_trunk_above_its_fans():
    assert draw(preset("tempflow", 4, 6, branch=2)).splitlines()[1:7] == [
        "┰─┰─┳━──",
        "┃ ┃ ┗━──",
        "┃ ┣━────",
        "┃ ┗━────",
        "┣━──────",
        "┗━──────",
    ]
