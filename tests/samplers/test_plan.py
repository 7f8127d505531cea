"""Which steps get noise, for every window, and that the last never does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.functional.sde import KERNELS
from flowrl.samplers.plan import (
    FixedWindow,
    ProgressiveWindow,
    RandomWindow,
    all_steps,
    make_plan,
    ode_plan,
)

KERNEL = KERNELS["flow_sde"]


def sigmas(steps: int) -> torch.Tensor:
    return torch.linspace(1, 0, steps + 1)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_all_steps_but_the_last_are_stochastic(kernel):
    plan = make_plan(sigmas(5), kernel, 0.5, all_steps(0, 5))
    assert plan.trained() == [0, 1, 2, 3] and plan.steps == 5
    assert plan.g[-1] == 0


def test_a_window_leaves_the_noise_of_its_steps_as_it_was():
    full = make_plan(sigmas(6), KERNEL, 0.7, all_steps(0, 6))
    plan = make_plan(sigmas(6), KERNEL, 0.7, FixedWindow(size=2, start=2)(0, 6))
    assert plan.trained() == [2, 3]
    assert torch.equal(plan.g[2:4], full.g[2:4])


def test_an_ode_plan_has_no_noise_anywhere():
    assert ode_plan(sigmas(4), KERNEL).trained() == []


def test_a_window_on_the_last_step_alone_is_refused():
    with pytest.raises(ValueError, match="never has noise"):
        make_plan(sigmas(4), KERNEL, 0.7, range(3, 4))


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


def test_the_random_window_visits_every_place_and_repeats_for_the_same_seed():
    window = RandomWindow(size=2, seed=1)
    places = [window(i, 6) for i in range(100)]
    assert {p.start for p in places} == {0, 1, 2, 3}
    assert places == [RandomWindow(size=2, seed=1)(i, 6) for i in range(100)]
    assert places != [RandomWindow(size=2, seed=2)(i, 6) for i in range(100)]


def test_the_progressive_window_moves_by_one_every_period_and_starts_over():
    window = ProgressiveWindow(size=2, period=3)
    assert [window(i, 5).start for i in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0]
