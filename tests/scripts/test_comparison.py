"""Methods side by side: what a curve, a crossing and a row of the table are."""

import pytest

from scripts.compare.runs import Run, cost_to_reach, mean_curve, points, rows, time_to_stay

SCORE = "eval/r"


def run(method: str, seed: int, seconds: float, scores: list[float]) -> Run:
    """An evaluation every two iterations; each iteration takes `seconds` and 30 forwards."""
    line = {"time/rollout": seconds / 2, "time/train": seconds / 2, "time/reward": None}
    metrics: list[dict] = [{"step": 0, SCORE: scores[0]}]
    for step in range(1, 2 * len(scores) - 1):
        metrics.append({"step": step, "tree/forwards": 20, "tree/train_forwards": 10} | line)
        if step % 2 == 0:
            metrics[-1] |= {SCORE: scores[step // 2]}
    return Run(method=method, seed=seed, metrics=metrics)


SLOW = [run("chains", 0, 4.0, [0.1, 0.2, 0.3]), run("chains", 1, 4.0, [0.1, 0.4, 0.5])]
FAST = [run("tree", 0, 1.0, [0.1, 0.5, 0.5]), run("tree", 1, 1.0, [0.1, 0.5, 0.7])]


def test_a_point_adds_up_what_came_before_it_and_leaves_evaluations_out():
    found = points(SLOW[0])
    assert [p.step for p in found] == [0, 2, 4]
    assert [p.seconds for p in found] == [0, 8, 16]
    assert [p.forwards for p in found] == [0, 60, 120]
    assert [p.scores[SCORE] for p in found] == [0.1, 0.2, 0.3]
    # The curve of a method is the mean over its seeds.
    assert [p.scores[SCORE] for p in mean_curve(SLOW)] == pytest.approx([0.1, 0.3, 0.4])


def test_images_and_candidates_are_counted_where_they_are_generated():
    # Not where they are read from a store: those were paid for before.
    drawn, read = ({"tree/forwards": f, "tree/leaves": 8, "step": 1, SCORE: 0.1} for f in (40, 0))
    assert points(Run(method="a", seed=0, metrics=[drawn, drawn]))[-1].images == 16
    stored = Run(method="b", seed=0, metrics=[read, read], images=30, seconds=5.0)
    assert points(stored)[-1].images == 30 and points(stored)[-1].seconds == 5.0
    # An image that is only chosen by is drawn, and paid for, but nothing is learned from it.
    kept = {"time/rollout": 2.0, "tree/forwards": 16, "tree/leaves": 2, "tree/train_forwards": 4}
    first = {"time/audit": 7.0, "time/explore": 4.0, "time/explore_reward": 1.0}
    first |= {"explore/forwards": 48, "explore/candidates": 8}
    lines = [{"step": 0, SCORE: 0.1}, {"step": 1, SCORE: 0.2} | kept | first]
    (_, last) = mean_curve([Run(method="two", seed=0, metrics=lines)])
    assert (last.seconds, last.forwards) == (14.0, 68)
    assert (last.images, last.candidates) == (2, 8)


def test_a_level_is_reached_between_evaluations_and_kept_from_the_one_after_which_none_falls():
    for level, seconds in [(0.1, 0.0), (0.2, 4.0), (0.3, 8.0), (0.35, 12.0), (0.5, None)]:
        reached = cost_to_reach(mean_curve(SLOW), SCORE, level)
        assert reached == (seconds if seconds is None else pytest.approx(seconds))
    curve = points(run("x", 0, 1.0, [0.5, 0.1, 0.4, 0.6]))
    assert time_to_stay(curve, SCORE, 0.4) == 4.0
    assert time_to_stay(curve, SCORE, 0.05) == 0.0
    assert time_to_stay(curve, SCORE, 0.7) is None


def test_others_are_measured_by_the_first_methods_final_score_and_its_time():
    first, second = rows([*SLOW, *FAST], SCORE)
    assert first["final"] == "0.400 ± 0.141" and first["seconds"] == "16"
    # 0.4 lies three quarters of the way from 0.1 at 0 s to 0.5 at 2 s: 1.5 s of 16 s.
    assert (second["reaches"], second["stays above"]) == ("9%", "12%")
    # Seed 0 against 0.3: half of the way. Seed 1 against 0.5: all of it.
    assert second["reaches, by seed"] == "6%, 12%"
    assert second["s / iteration"] == "1.00" and second["forwards / iteration"] == "30"
    (never,) = rows([*FAST[:1], run("lost", 0, 1.0, [0.1, 0.2, 0.1])], SCORE)[1:]
    assert never["reaches"] == never["stays above"] == never["reaches, by seed"] == "never"
