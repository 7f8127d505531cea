"""What methods achieved: paired over images and seeds, and measured by another's curve."""

from pathlib import Path

import pytest
import torch

from flowrl.training.evaluate import Evaluation
from scripts.compare.outcomes import differences, outcome, table
from scripts.compare.runs import Run, mean_curve


def folder(path: Path, scores: dict[int, list[list[float]]]) -> Path:
    """A run's evaluations: by step, of each image its score and its quality."""
    for step, rows in scores.items():
        Evaluation(
            scores=torch.tensor(rows), names=("r", "q"), images=torch.zeros(0, 3, 1, 1),
            prompts=(), draws=(), key="k",
        ).save(path / "evaluations" / f"step-{step:06d}.safetensors")  # fmt: skip
    return path


def run(method: str, seed: int, last: float, **spent) -> Run:
    """Two iterations of 8 images and 3 seconds each, evaluated at both ends."""
    step = {"tree/forwards": 8, "tree/leaves": 8, "time/rollout": 3.0}
    metrics = [{"step": 0, "eval/r": 0.2}, {"step": 1} | step, {"step": 2, "eval/r": last} | step]
    return Run(method=method, seed=seed, metrics=metrics, **spent)


@pytest.fixture
def two_seeds(tmp_path):
    start = [[0.0, 3.0], [0.4, 4.0]]
    folders = [
        folder(tmp_path / "0", {0: start, 2: [[0.2, 3.0], [0.6, 5.0]]}),
        folder(tmp_path / "1", {0: start, 2: [[0.4, 5.0], [0.4, 5.0]]}),
    ]
    return outcome([run("a", 0, 0.4), run("a", 1, 0.4)], folders, "r", "q")


def test_outcomes_are_paired_and_costs_are_counted(two_seeds, tmp_path):
    # A change is paired by image after the mean over seeds.
    # The images' means over seeds go from 0.0 to 0.3 and from 0.4 to 0.5.
    assert two_seeds.change.mean == pytest.approx(0.2)
    assert (two_seeds.change.low, two_seeds.change.high) == pytest.approx((0.1, 0.3))
    assert two_seeds.before["r"] == pytest.approx(0.2) and two_seeds.after["q"] == 4.5
    # 0.0 * 0 and 0.4 * 1, and 0.2 beside; then 0.2 * 0, 0.6 * 2, 0.4 * 2 and 0.4 * 2.
    assert two_seeds.before["corrected/r"] == pytest.approx(0.4)
    assert two_seeds.after["corrected/r"] == pytest.approx(0.2 + 2.8 / 4)
    # Costs are those until another methods last score.
    goal = [run("b", 0, 0.3)]
    (row,) = table([two_seeds], "r", "q", two_seeds.curve)
    assert row["images to 0.400"] == "16 (100%)" and row["seconds to 0.400"] == "6 (100%)"
    (row,) = table([two_seeds], "r", "q", mean_curve(goal))
    assert row["images to 0.300"] == "8 (50%)"
    (row,) = table([two_seeds], "r", "q", mean_curve([run("c", 0, 0.9)]))
    assert row["seconds to 0.900"] == "never"
    assert (row["score"], row["quality"]) == ("0.200 → 0.400", "3.50 → 4.50")
    # What a store took is counted.
    stored = run("s", 0, 0.4, seconds=5.0, images=30.0)
    found = outcome([stored], [tmp_path / "0"], "r", "q")
    (row,) = table([found], "r", "q")
    assert row["seconds"] == "11" and row["images"] == "46"  # these iterations drew as well
    # Candidates have a column of their own where there are any.
    assert "candidates" not in table([two_seeds], "r", "q")[0]
    explored = run("e", 0, 0.4)
    for line in explored.metrics[1:]:
        line["explore/candidates"] = 32
    found = outcome([explored], [tmp_path / "0"], "r", "q")
    plain, row = table([two_seeds, found], "r", "q")
    assert (plain["candidates"], row["candidates"]) == ("0", "64")
    assert row["images"] == plain["images"]


def test_a_difference_is_paired_by_image_within_a_seed_and_then_of_the_means(tmp_path):
    def ends(name: str, scores: list[float]) -> Path:
        return folder(tmp_path / name, {2: [[score, 3.0] for score in scores]})

    some = [ends("a0", [0.5, 0.9]), ends("a1", [0.4, 0.6])]
    others = [ends("b0", [0.4, 0.4]), ends("b1", [0.4, 0.4])]
    first, second, means = differences(some, others, 2, "r")
    assert first.mean == pytest.approx(0.3)  # 0.1 and 0.5, image by image
    assert (first.low, first.high) == pytest.approx((0.1, 0.5))
    assert second.mean == pytest.approx(0.1)  # 0 and 0.2
    assert means.mean == pytest.approx(0.2)  # 0.05 and 0.35
    assert (means.low, means.high) == pytest.approx((0.05, 0.35))
    with pytest.raises(ValueError, match="zip"):
        differences(some[:1], others, 2, "r")
