"""The pages of the frontier, of one student and of other words, from their data; their figures."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.arena import frontier, one_student, wording

GALLERY = Path(__file__).parents[2] / "gallery"


@pytest.mark.parametrize(
    ("module", "folder"),
    [(frontier, "frontier"), (wording, "wording"), (one_student, "one-student")],
)
def test_a_page_is_what_its_data_say(module, folder, tmp_path):
    for path in (GALLERY / folder).glob("*.csv"):
        shutil.copy(path, tmp_path)
    assert module.write_page(tmp_path).read_text() == (GALLERY / folder / "README.md").read_text()


def test_the_difference_of_images_is_the_mean_over_pairs():
    cells = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert frontier._difference(cells) == f"{(0.5 + 0.5 + 1.0) / 3:.4f}"
    assert frontier._difference(cells[:1]) == ""


def table(value: float) -> tuple[np.ndarray, np.ndarray]:
    return np.full((1, 3), value), np.ones((1, 3))


def test_an_arm_is_compared_with_the_controls_line_at_its_own_diversity():
    arms = (frontier.NONE, "image by image 1", "sgrpo 1")

    def tables(*values: float) -> frontier.Tables:
        return {arm: {2: table(value)} for arm, value in zip(arms, values, strict=True)}

    gold = tables(0.6, 0.4, 0.7)
    found = frontier.above(gold, tables(1.0, 3.0, 2.0), "sgrpo 1")
    assert found.mean == pytest.approx(0.7 - 0.5) == found.low
    beyond = frontier.above(gold, tables(1.0, 3.0, 4.0), "sgrpo 1")
    assert beyond.mean == pytest.approx(0.7 - 0.4)


def test_arms_are_compared_on_the_worlds_that_have_both():
    gold = {"a": {2: table(0.5), 3: table(0.9)}, "b": {2: table(0.3)}}
    assert frontier.less(gold, "a", "b").mean == pytest.approx(0.2)


def test_a_students_share_is_its_gain_over_that_of_its_teachers():
    found = one_student.share([[table(0.1)], [table(0.2)]], [[table(0.2)], [table(0.2)]])
    assert found.mean == pytest.approx(0.75) == found.low
