"""The pages of the radar, of best-of-N and of a transfer, from their data; what they compute."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.arena import best_of, loopholes, radar, transfer
from scripts.arena.runs import RUNS
from scripts.compare.data import read_rows, write_rows

GALLERY = Path(__file__).parents[2] / "gallery"


@pytest.mark.parametrize(
    ("module", "folder"), [(radar, "radar"), (best_of, "best-of"), (transfer, "transfer")]
)
def test_a_page_is_what_its_data_say(module, folder, tmp_path):
    for path in (GALLERY / folder).glob("*.csv"):
        shutil.copy(path, tmp_path)
    assert module.write_page(tmp_path).read_text() == (GALLERY / folder / "README.md").read_text()


def test_the_radar_is_judged_by_ten_loopholes_and_27_honest_runs_on_three_worlds():
    watched = radar.series(read_rows(GALLERY / "radar" / RUNS), "")
    hacked = {f"hacked {name}" for name in loopholes.JUDGED}
    honest = {f"honest {name}" for name in radar.HONEST}
    worlds = {str(world) for world in radar.WORLDS}
    assert set(watched) == {(arm, world) for arm in hacked | honest for world in worlds}
    assert len(hacked) == 10 and len(honest) * len(worlds) == 27
    assert not set(loopholes.JUDGED) & set(loopholes.TUNING)


@pytest.mark.parametrize("name", [*loopholes.TUNING, *loopholes.JUDGED])
def test_a_loophole_scores_each_image_alone_and_reads_no_prompt(name):
    images = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    reward = getattr(loopholes, name)
    scores = reward(images, [""] * 4, [{}] * 4)
    assert scores.shape == (4,) and scores.dtype == torch.float32 and scores.unique().numel() == 4
    torch.testing.assert_close(reward(images[2:3], ["a"], [{"b": 1}]), scores[2:3])


def test_the_area_counts_pairs_and_ties_by_half():
    assert radar.area([1.0, 2.0], [0.0, 1.0]) == (1 + 1 + 1 + 0.5) / 4
    assert radar.area([2.0], [1.0]) == 1 and radar.area([1.0], [2.0]) == 0


def test_gold_is_lost_at_the_first_evaluation_a_tenth_below_the_best_before():
    def run(*gold: float) -> list[dict[str, str]]:
        return [{"gold": str(g), "score": str(i / 10)} for i, g in enumerate(gold)]

    assert radar.lost_at(run(0.5, 0.46, 0.44, 0.6)) == 2
    assert radar.lost_at(run(0.5, 0.6, 0.55)) is None
    assert radar.lost_at(run(0.5, 0.7, 0.6)) == 2
    assert radar.worst(run(0.5, 0.4, 0.3), 1) == 0.1 and radar.worst(run(0.5, 0.4, 0.3)) == 0.2


def test_the_best_of_n_is_that_of_each_block(tmp_path, monkeypatch):
    monkeypatch.setattr(best_of, "IMAGES", 4)
    rows = [
        {"request": request, best_of.GOLD: gold, "tiny_proxy": score}
        for request, golds, scores in ((0, "1000", "2154"), (1, "0101", "1111"))
        for gold, score in zip(golds, scores, strict=True)
    ]
    write_rows(tmp_path / "world-2.csv", rows)
    gold = best_of.gold_of_best(tmp_path / "world-2.csv", "tiny_proxy", 2)
    np.testing.assert_array_equal(gold, [[1, 0], [0, 0]])  # of equal scores the first
    np.testing.assert_array_equal(
        best_of.gold_of_best(tmp_path / "world-2.csv", "tiny_proxy", 4), [[0, 0]]
    )


def test_a_shuffled_lora_keeps_the_norm_of_each_layer():
    layer = torch.nn.Module()
    layer.lora_B = torch.nn.ModuleDict({"policy": torch.nn.Linear(4, 8, bias=False)})
    before = layer.lora_B["policy"].weight.detach().clone()
    transfer.shuffle([layer])
    after = layer.lora_B["policy"].weight
    torch.testing.assert_close(after.abs().flatten().sort()[0], before.abs().flatten().sort()[0])
    assert not torch.equal(after, before)
