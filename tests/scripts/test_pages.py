"""Pages of the gallery are what the data beside them say; what their figures compute."""

import shutil
from pathlib import Path

import pytest
import torch

from scripts.arena import best_of, frontier, loopholes, one_student, radar, transfer, wording
from scripts.arena.gamed import render_gamed
from scripts.arena.runs import RUNS
from scripts.compare.data import read_rows
from scripts.votes.report import render as render_votes

GALLERY = Path(__file__).parents[2] / "gallery"


PAGES = {
    "best-of": best_of.write_page,
    "frontier": frontier.write_page,
    "gamed": render_gamed,
    "one-student": one_student.write_page,
    "radar": radar.write_page,
    "transfer": transfer.write_page,
    "votes": render_votes,
    "wording": wording.write_page,
}


@pytest.mark.parametrize("folder", PAGES)
def test_a_page_is_what_its_data_say(folder, tmp_path):
    for path in (GALLERY / folder).glob("*.csv"):
        shutil.copy(path, tmp_path)
    page = PAGES[folder](tmp_path)
    assert page.read_text() == (GALLERY / folder / "README.md").read_text()


# --- radar, best-of-N, transfer ------------------------------------------------------------------


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


def test_a_shuffled_lora_keeps_the_norm_of_each_layer():
    layer = torch.nn.Module()
    layer.lora_B = torch.nn.ModuleDict({"policy": torch.nn.Linear(4, 8, bias=False)})
    before = layer.lora_B["policy"].weight.detach().clone()
    transfer.shuffle([layer])
    after = layer.lora_B["policy"].weight
    torch.testing.assert_close(after.abs().flatten().sort()[0], before.abs().flatten().sort()[0])
    assert not torch.equal(after, before)


# --- frontier, one student ----------------------------------------------------------------------


def test_the_difference_of_images_is_the_mean_over_pairs():
    cells = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert frontier._difference(cells) == f"{(0.5 + 0.5 + 1.0) / 3:.4f}"
    assert frontier._difference(cells[:1]) == ""
