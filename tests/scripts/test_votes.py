"""What scripted voters get, from the data beside the page."""

from pathlib import Path

import pytest
import torch

from scripts.compare.data import read_rows
from scripts.votes.report import BUILT_IN, RUNS, prompt_share
from scripts.votes.rules import RULES, answers, objects

PAGE = Path(__file__).parents[2] / "gallery" / "votes"


def test_every_rule_was_voted_by_with_five_seeds():
    rows = read_rows(PAGE / RUNS)
    seeds = {str(seed) for seed in range(1, 6)}
    assert {(row["rule"], row["seed"]) for row in rows} == {(r, s) for r in RULES for s in seeds}


def test_a_lora_wins_by_the_rule_and_keeps_the_prompts():
    rows = read_rows(PAGE / RUNS)
    for rule in RULES:
        mine = [row for row in rows if row["rule"] == rule]
        wins = [float(row["wins"]) for row in mine]
        assert sum(wins) / len(wins) >= 0.7
        assert sum(prompt_share(mine)) / len(mine) >= 0.9
        predicted = {n: sum(float(row[n]) for row in mine) for n in ("taste", *BUILT_IN)}
        assert max(predicted.values()) == predicted["taste"]


def test_rules_measure_where_objects_are_and_how_large():
    image = torch.ones(1, 3, 32, 32)
    image[..., 4:12, 20:28] = 0.0  # high, to the right
    image[:, 0] = 0.9  # paper is not white
    image[:, 0, 4:12, 20:28] = 0.0
    assert objects(image).sum() == 64
    moved = image.roll((12, -16), dims=(2, 3))
    for rule, first in (("right", image), ("high", image), ("left", moved)):
        second = moved if first is image else image
        measured = RULES[rule](first), RULES[rule](second)
        assert answers(rule, *measured).item() == 1 and answers(rule, *measured[::-1]).item() == 0
    both = torch.minimum(image, moved)
    assert RULES["large"](both).item() == pytest.approx(2 * RULES["large"](image).item())
    assert answers("large", RULES["large"](image), RULES["large"](moved)).item() == 0.5
    assert answers("small", RULES["small"](image), RULES["small"](both)).item() == 1
