"""Rounding of mantissas in general, and the largest magnitude."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.quantization.formats.rounding import amax, ratio, round_mantissa_

numbers = st.lists(st.floats(width=32), min_size=1, max_size=16)


@given(st.floats(-(2.0**20), 2.0**20, width=32), st.integers(0, 7), st.integers(-8, 2))
def test_the_rounded_number_is_the_nearest_with_so_many_mantissa_bits(x, bits, lowest):
    rounded = round_mantissa_(torch.tensor([x]), bits, 2.0**lowest).item()
    exponent = max(math.frexp(x)[1] - 1, lowest) if x else lowest
    step = 2.0 ** (exponent - bits)
    assert rounded == round(x / step) * step  # Python rounds ties to even as well
    assert math.copysign(1, rounded) == math.copysign(1, x)


@given(numbers)
def test_the_largest_magnitude_is_that_of_the_maximum_of_the_absolute_with_nan_on_top(values):
    x = torch.tensor([values])
    torch.testing.assert_close(amax(x), x.abs().amax(-1), rtol=0, atol=0, equal_nan=True)


@given(st.floats(2.0**-60, 2.0**60, width=32), st.sampled_from([6.0, 448.0, 2688.0, 1536.0]))
def test_a_ratio_with_a_number_is_rounded_once_whichever_side_it_is_on(size, number):
    x, here = torch.tensor([size]), np.float32(size)
    assert ratio(x, number).item() == here / np.float32(number)
    assert ratio(number, x).item() == np.float32(number) / here
