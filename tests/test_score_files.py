"""Scores of picture files, as `flowrl score` gives them."""

import pytest
from PIL import Image

from flowrl.errors import UserError
from flowrl.score_files import score_images


def test_scores_of_a_folder_are_those_of_its_pictures(tmp_path):
    for name, value in [("a.png", 0), ("b.png", 255)]:
        Image.new("RGB", (8, 8), (value,) * 3).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a picture")
    rows = score_images([tmp_path], ["brightness"], None)
    assert [row["brightness"] for row in rows] == [0.0, 1.0]


def test_scoring_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="no picture at"):
        score_images([tmp_path / "none.png"], ["brightness"], None)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    with pytest.raises(UserError, match="1 prompts for 2|2 prompts for 1"):
        score_images([tmp_path], ["brightness"], str(tmp_path / "p.txt"))
