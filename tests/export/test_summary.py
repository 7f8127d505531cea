"""What the end of a run says."""

import math
from dataclasses import replace

import torch

from flowrl.export.gallery import write_gallery
from flowrl.export.summary import gallery_rows, reward_curves
from flowrl.training.evaluate import Evaluation, compare


def evaluation(*scores: list[float], names=("a", "b"), shade: int = 0) -> Evaluation:
    images = torch.full((2, 3, 4, 4), shade, dtype=torch.uint8)
    images[1] += 1
    return Evaluation(
        scores=torch.tensor(scores),
        names=names,
        images=images,
        prompts=("one", "two"),
        draws=(0, 1),
        key="",
        prompt=torch.arange(len(scores)),
        statistics=torch.empty(0),
        thumbnails=torch.empty(0),
    )


def test_a_row_has_one_prompt_and_both_images_with_their_scores():
    base = evaluation([0.0, math.nan], [1.0, 5.0])
    aligned = evaluation([6.0, 0.5], [7.0, 0.25], names=("b", "a"), shade=10)
    one, two = gallery_rows(base, aligned)
    assert (one.prompt, one.number, two.prompt, two.number) == ("one", 0, "two", 1)
    assert [image.getpixel((0, 0)) for image in two.images] == [(n,) * 3 for n in (1, 11)]
    assert one.scores == {"a": (0, 0.5), "b": (None, 6)}
    assert two.scores == {"a": (1, 0.25), "b": (5, 7)}


def test_every_number_of_steps_has_a_row_of_its_own_beside_that_of_the_same_noise(tmp_path):
    base, aligned = (
        replace(
            evaluation([0.0 + a, 1.0], [2.0, 3.0]),
            steps=5,
            at_steps=(replace(evaluation([4.0 + a, 5.0], [6.0, 7.0]), steps=28),),
        )
        for a in (0, 1)
    )
    rows = gallery_rows(base, aligned)
    shown = [(row.prompt, row.note, row.scores["a"]) for row in rows]
    assert shown == [
        ("one", "5 steps", (0, 1)),
        ("one", "28 steps", (4, 5)),
        ("two", "5 steps", (2, 2)),
        ("two", "28 steps", (6, 6)),
    ]
    summary = compare(base, aligned)
    page, _ = write_gallery(tmp_path, rows, title="t", summary=summary)
    html = page.read_text()
    assert html.count(">28 steps<") == 2 and "28_steps/a" in html
    # Without both there is nothing to show side by side.
    assert [row.note for row in gallery_rows(base, replace(aligned, at_steps=()))] == ["", ""]


def test_curves_begin_with_the_held_out_score():
    metrics = [
        {"step": 0, "eval/judge": 0.4},
        {"step": 1, "reward/ocr": 0.1, "reward/mean": 0.3, "reward/invalid": 0.0},
        {"step": 2, "reward/ocr": 0.2, "reward/mean": 0.5, "eval/judge": 0.6, "eval/ocr": 0.1},
    ]
    curves = reward_curves(metrics, ["judge", "not measured"])
    assert list(curves) == ["eval/judge", "reward/mean", "reward/ocr"]
    assert curves["eval/judge"] == [(0, 0.4), (2, 0.6)]
