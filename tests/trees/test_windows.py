import collections

from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees.windows import (
    AllSteps,
    DepthPruning,
    FixedWindow,
    GeometricWindow,
    ProgressiveWindow,
    RandomWindow,
    random_share,
)


@given(steps=st.integers(3, 12), size=st.integers(1, 4), start=st.integers(0, 3), data=st.data())
def test_moving_windows_stay_between_start_and_stop(steps, size, start, data):
    if start + size > steps - 1:
        return
    stop = data.draw(st.none() | st.integers(start + size, steps - 1))
    for window in (
        RandomWindow(size=size, start=start, stop=stop),
        ProgressiveWindow(size=size, period=2, start=start, stop=stop),
    ):
        for iteration in range(30):
            found = window.steps(iteration, steps, 3)
            assert len(found) == size and found.start >= start
            assert found.stop <= (steps - 1 if stop is None else stop)


def test_all_steps_are_all_but_the_last_and_a_fixed_window_never_moves():
    assert list(AllSteps().steps(7, 4, 0)) == [0, 1, 2]
    assert {FixedWindow(size=2, start=1).steps(i, 9, 0) for i in range(20)} == {range(1, 3)}


def test_the_random_window_visits_every_place_and_repeats_for_the_same_seed():
    window = RandomWindow(size=2)
    places = [window.steps(i, 6, 1) for i in range(100)]
    assert {p.start for p in places} == {0, 1, 2, 3}
    assert places == [window.steps(i, 6, 1) for i in range(100)]
    assert places != [window.steps(i, 6, 2) for i in range(100)]


def test_the_progressive_window_moves_by_one_every_period_and_starts_over():
    window = ProgressiveWindow(size=2, period=3)
    assert [window.steps(i, 5, 0).start for i in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0]


def test_the_geometric_window_starts_with_the_published_frequencies():
    """Pr[i] = (1 - r) r^i / (1 - r^(T - w)); 4000 windows are within 5 standard errors."""
    for ratio in [0.3, 0.7, 1.0]:
        steps, size, number = 8, 3, 4000
        window = GeometricWindow(size=size, ratio=ratio)
        found = collections.Counter(window.steps(i, steps, 5).start for i in range(number))
        places = steps - size
        assert set(found) == set(range(places)) or ratio == 0.3
        for i in range(places):
            p = 1 / places if ratio == 1 else (1 - ratio) * ratio**i / (1 - ratio**places)
            assert abs(found[i] / number - p) < 5 * (p * (1 - p) / number) ** 0.5


def test_depth_pruning_moves_later_and_stays_at_its_stop():
    pruning = DepthPruning(start=9, size=4, period=30, stop=11)
    starts = [pruning.steps(i, 20).start for i in (0, 29, 30, 60, 89, 90, 5000)]
    assert starts == [9, 9, 10, 11, 11, 11, 11]
    assert pruning.steps(30, 20) == range(10, 14)
    unlimited = DepthPruning(start=9, size=4, period=1)
    assert unlimited.steps(500, 20) == range(15, 19)  # the last with noise


def test_subsets_differ_with_seed_and_iteration_and_reach_every_step():
    drawn = [random_share(11, 0.6, 0, i) for i in range(50)]
    assert set().union(*drawn) == set(range(10)) and len(set(drawn)) > 25
    assert drawn != [random_share(11, 0.6, 1, i) for i in range(50)]
