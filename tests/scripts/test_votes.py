"""The study of votes: its rules, and the page's table, which is that of its data."""

import csv
import inspect
from pathlib import Path

import numpy as np

from flowrl.cli.vote import vote
from scripts import votes

ROOT = Path(__file__).parents[2]


def image(color, left=0, width=8):
    x = np.full((64, 64, 3), 240.0)
    x[20:28, left : left + width] = color
    return x


def test_rules_prefer_what_they_say_and_a_tie_counts_half():
    black, blue = (20, 20, 20), (30, 60, 220)
    assert votes.left(image(black, 0)) > votes.left(image(black, 40))
    assert votes.fewer(image(black, 0, 4)) > votes.fewer(image(black, 0, 8))
    assert votes.blue(image(blue)) == 1 and votes.blue(image(black)) == 0
    pairs = [(image(blue), image(black)), (image(blue), image(blue)), (image(black), image(blue))]
    after, before = (np.stack(part) for part in zip(*pairs, strict=True))
    assert votes.win_rate(votes.blue, after, before) == 0.5
    assert votes.win_rate(votes.blue, after[:2], before[:2]) == 0.75


def test_voters_never_see_a_prompt_of_the_test():
    seen, test = votes.prompts()
    assert len(test) >= 200
    assert not {record.text for record in seen} & {record.text for record in test}


def test_the_page_has_the_table_of_the_data():
    data = (ROOT / "gallery" / "votes" / "votes.csv").read_text()
    rows = list(csv.DictReader(data.splitlines()))
    page = (ROOT / "docs" / "vote.md").read_text()
    whole = "\n\n".join((votes.table(rows), votes.kept_right(rows), votes.saved_clicks(rows)))
    assert whole in page
    few = [{"rule": "left", "seed": str(s), "pairs": "informative", "clicks": "37",
            "win_rate": rate} for s, rate in enumerate(("0.8", "0.7"))]  # fmt: skip
    many = [row | {"pairs": "random", "clicks": "50", "win_rate": "0.6"} for row in few]
    assert "37 informative clicks win +0.150 +- 0.050 (n = 2)" in votes.saved_clicks(few + many)
    assert "not been measured" in votes.saved_clicks(few)
    shares = [{"right_before": "0.4", "right_after": after} for after in ("0.3", "0.2")]
    found = votes.kept_right([a | b for a, b in zip(few, shares, strict=True)])
    assert "40% show their prompt, of the LoRAs' 25% (`left`: 25%)" in found
    row = "| left | 0.60 (0.60 to 0.60, n = 2) | 0.75 (0.70 to 0.80, n = 2) | not measured |"
    assert row in votes.table(few + many)


def test_any_pair_is_asked_by_default_as_no_saving_by_informative_ones_was_shown():
    assert inspect.signature(vote).parameters["pairs"].default == "random"
    assert "no saving by informative pairs is claimed" in (ROOT / "docs" / "vote.md").read_text()
