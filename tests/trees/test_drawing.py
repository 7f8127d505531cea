from flowrl.trees import presets
from flowrl.trees.show import draw


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
