"""Windows: where they may stand, how they move, and that seed and iteration decide alone."""

import collections

import pytest
from any_plan import nearest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees.plan import PlanError
from flowrl.trees.windows import (
    DepthPruning,
    FixedWindow,
    GeometricWindow,
    ProgressiveWindow,
    RandomWindow,
    all_steps,
    draw_steps,
    step_subset,
)


@given(steps=st.integers(3, 12), size=st.integers(1, 4), start=st.integers(0, 3), data=st.data())
def test_moving_windows_stay_between_start_and_stop(steps, size, start, data):
    if start + size > steps - 1:
        return
    stop = data.draw(st.none() | st.integers(start + size, steps - 1))
    for window in (
        RandomWindow(size=size, seed=3, start=start, stop=stop),
        ProgressiveWindow(size=size, period=2, start=start, stop=stop),
    ):
        for iteration in range(30):
            found = window(iteration, steps)
            assert len(found) == size and found.start >= start
            assert found.stop <= (steps - 1 if stop is None else stop)


def test_all_steps_are_all_but_the_last_and_a_fixed_window_never_moves():
    assert list(all_steps(7, 4)) == [0, 1, 2]
    assert {FixedWindow(size=2, start=1)(i, 9) for i in range(20)} == {range(1, 3)}


def test_the_random_window_visits_every_place_and_repeats_for_the_same_seed():
    window = RandomWindow(size=2, seed=1)
    places = [window(i, 6) for i in range(100)]
    assert {p.start for p in places} == {0, 1, 2, 3}
    assert places == [RandomWindow(size=2, seed=1)(i, 6) for i in range(100)]
    assert places != [RandomWindow(size=2, seed=2)(i, 6) for i in range(100)]


def test_the_progressive_window_moves_by_one_every_period_and_starts_over():
    window = ProgressiveWindow(size=2, period=3)
    assert [window(i, 5).start for i in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0]


def test_the_geometric_window_starts_with_the_published_frequencies():
    """Pr[i] = (1 - r) r^i / (1 - r^(T - w)); 4000 draws are within 5 standard errors."""
    for ratio in [0.3, 0.7, 1.0]:
        steps, size, draws = 8, 3, 4000
        window = GeometricWindow(size=size, ratio=ratio, seed=5)
        found = collections.Counter(window(i, steps).start for i in range(draws))
        places = steps - size
        assert set(found) == set(range(places)) or ratio == 0.3
        for i in range(places):
            p = 1 / places if ratio == 1 else (1 - ratio) * ratio**i / (1 - ratio**places)
            assert abs(found[i] / draws - p) < 5 * (p * (1 - p) / draws) ** 0.5


@given(steps=st.integers(2, 12), size=st.integers(1, 11), seed=st.integers(0, 99))
def test_the_geometric_window_ends_before_the_last_step(steps, size, seed):
    if size > steps - 1:
        return
    window = GeometricWindow(size=size, ratio=0.9, seed=seed)
    places = [window(i, steps) for i in range(20)]
    assert all(len(p) == size and p.start >= 0 and p.stop <= steps - 1 for p in places)
    assert places == [GeometricWindow(size=size, ratio=0.9, seed=seed)(i, steps) for i in range(20)]


def test_depth_pruning_slides_later_and_stays_at_its_stop():
    pruning = DepthPruning(start=9, size=4, period=30, stop=11)
    assert [pruning(i).start for i in (0, 29, 30, 60, 89, 90, 5000)] == [9, 9, 10, 11, 11, 11, 11]
    assert pruning(30) == range(10, 14)


def test_depth_pruning_slides_earlier_and_never_below_the_first_step():
    assert [DepthPruning(start=15, size=4, direction=-1, period=2, stop=9)(i).start
            for i in (0, 2, 12, 100)] == [15, 14, 9, 9]  # fmt: skip
    assert DepthPruning(start=1, size=2, direction=-1, period=1)(50) == range(2)


def test_depth_pruning_ends_where_it_is_told_to():
    pruning = DepthPruning(start=3, size=2, period=10, until=25)
    assert [list(pruning(i)) for i in (24, 25, 99)] == [[5, 6], [], []]


def test_depth_pruning_cannot_stop_behind_its_start():
    for direction, stop in [(1, 3), (-1, 12)]:
        with pytest.raises(PlanError, match="stop") as caught:
            DepthPruning(start=9, size=4, direction=direction, stop=stop)
        assert DepthPruning(start=9, size=4, direction=direction, stop=nearest(caught.value)[0])(99)


def test_depth_pruning_knows_two_directions():
    with pytest.raises(PlanError, match="direction"):
        DepthPruning(start=9, size=4, direction=2)


@given(steps=st.integers(2, 40), seed=st.integers(0, 9), iteration=st.integers(0, 99))
def test_a_subset_has_its_share_of_the_stochastic_steps(steps, seed, iteration):
    found = step_subset(steps, 0.6, seed, iteration)
    assert len(found) == max(1, 6 * (steps - 1) // 10)
    assert found <= set(range(steps - 1))
    assert found == step_subset(steps, 0.6, seed, iteration)


def test_subsets_differ_with_seed_and_iteration_and_reach_every_step():
    drawn = [step_subset(11, 0.6, 0, i) for i in range(50)]
    assert set().union(*drawn) == set(range(10)) and len(set(drawn)) > 25
    assert drawn != [step_subset(11, 0.6, 1, i) for i in range(50)]


def test_drawn_steps_are_ascending_and_all_are_drawn_in_turn():
    drawn = [draw_steps([1, 4, 6, 9], 2, 3, i) for i in range(60)]
    assert len(set(drawn)) == 6 and all(a < b for a, b in drawn)
    assert drawn == [draw_steps([1, 4, 6, 9], 2, 3, i) for i in range(60)]
    assert draw_steps([1, 4], None, 3, 0) == (1, 4)
    with pytest.raises(PlanError) as caught:
        draw_steps([1, 4], 3, 0, 0)
    assert len(draw_steps([1, 4], nearest(caught.value)[0], 0, 0)) == 2
