"""What the end of a run says, and images at several strengths of a LoRA."""

import math
from dataclasses import replace

import torch

from flowrl.export.gallery import write_gallery
from flowrl.export.summary import (
    gallery_rows,
    legend,
    sweep_summary,
)
from flowrl.functional.contrasts import Contrast
from flowrl.training.evaluate import Evaluation, EvaluationComparison, compare


def row(name: str) -> EvaluationComparison:
    change = Contrast(mean=0.0, low=0.0, high=0.0, p=1.0, images=1, prompts=1)
    return EvaluationComparison(name=name, before=0.0, after=0.0, change=change)


# --- one LoRA at several strengths ---


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
    )


def test_a_row_has_one_prompt_and_its_image_and_scores_at_each_strength():
    base = evaluation([0.0, math.nan], [1.0, 5.0])
    weak = evaluation([6.0, 0.5], [7.0, 0.25], names=("b", "a"), shade=10)
    strong = evaluation([2.0, 8.0], [3.0, 9.0], shade=20)
    one, two = gallery_rows(base, weak, strong)
    assert (one.prompt, one.number, two.prompt, two.number) == ("one", 0, "two", 1)
    assert [image.getpixel((0, 0)) for image in two.images] == [(n,) * 3 for n in (1, 11, 21)]
    assert one.scores == {"a": (0, 0.5, 2), "b": (None, 6, 8)}
    assert two.scores == {"a": (1, 0.25, 3), "b": (5, 7, 9)}


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
    assert "28_steps/R is R at 28 denoising steps." in legend(summary)
    # Without both there is nothing to show side by side.
    assert [row.note for row in gallery_rows(base, replace(aligned, at_steps=()))] == ["", ""]


def test_the_summary_has_each_rewards_mean_at_each_strength():
    base = evaluation([0.0, math.nan], [1.0, 5.0])
    others = {
        "RLG 2": evaluation([2.0, 8.0], [3.0, 9.0]),
        "RLG 1": evaluation([1.0, 0.0], [1.0, 6.0]),
    }
    rows = sweep_summary(base, others)
    found = [(row.name, row.before, row.after, row.change.mean) for row in rows]
    assert found == [
        ("a, RLG 2", 0.5, 2.5, 2.0),
        ("a, RLG 1", 0.5, 1.0, 0.5),
        ("b, RLG 2", 5.0, 9.0, 4.0),  # over the image that has both
        ("b, RLG 1", 5.0, 6.0, 1.0),
    ]
