"""How far each format is from the numbers it stands for, on fixed seeds, and in which order.

Relative errors |x_hat - x| / |x| over a million numbers. The tolerances are what other seeds
differ by: 0.0003, but for the heavy tails of Student's t.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from flowrl.quantization.formats import fp8, mx, nvfp4

SHAPE = (2048, 512)
Fake = Callable[[Tensor], Tensor]

four_over_six = partial(nvfp4.fake_quantise, four_over_six=True)
tiles = partial(nvfp4.fake_quantise, two_dimensional=True)
single = partial(nvfp4.fake_quantise, two_level=False)
mxfp4 = partial(mx.fake_quantise, element="e2m1")
mxfp8 = partial(mx.fake_quantise, element="e4m3")


@pytest.fixture(autouse=True)
def _keep_the_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def drawn(kind: str, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(SHAPE)
    if kind == "laplace":
        return torch.distributions.Laplace(0.0, 1.0).sample(SHAPE)
    return torch.distributions.StudentT(4.0).sample(SHAPE)


def relative(approximate: Tensor, exact: Tensor) -> float:
    return ((approximate.double() - exact).norm() / exact.double().norm()).item()


@pytest.mark.parametrize(
    ("kind", "plain", "adaptive"),
    [("gaussian", 0.0951, 0.0869), ("laplace", 0.0927, 0.0872), ("student", 0.0918, 0.0869)],
)
def test_nvfp4_is_off_by_a_tenth_and_less_with_four_over_six(kind, plain, adaptive):
    x = drawn(kind)
    assert relative(nvfp4.fake_quantise(x), x) == pytest.approx(plain, abs=3e-4)
    assert relative(four_over_six(x), x) == pytest.approx(adaptive, abs=3e-4)


@pytest.mark.parametrize("variant", ["te", "div", "bfl", "comfy"])
def test_the_order_of_operations_does_not_matter_to_the_error(variant):
    x = drawn("gaussian")
    other = relative(nvfp4.fake_quantise(x, variant=variant), x)
    assert other == pytest.approx(relative(nvfp4.fake_quantise(x), x), abs=1e-5)


def test_sharing_a_scale_among_tiles_costs_accuracy():
    x = drawn("gaussian")
    assert relative(tiles(x), x) == pytest.approx(0.1114, abs=3e-4)


def test_without_a_global_scale_small_weights_meet_the_smallest_block_scale():
    x = drawn("gaussian") * 0.02
    assert relative(single(x), x) == pytest.approx(0.1305, abs=3e-4)
    assert relative(nvfp4.fake_quantise(x), x) == pytest.approx(0.0951, abs=3e-4)


@pytest.mark.parametrize(
    ("rule", "least", "mean", "most"),
    [("floor", 0.1133, 0.1156, 0.1180), ("ceil", 0.1152, 0.1169, 0.1187)],
)
def test_mxfp4_depends_on_where_between_two_powers_the_numbers_are(rule, least, mean, most):
    x = drawn("gaussian")[:, :256]
    octave = [x * 2 ** (i / 8) for i in range(8)]
    errors = [relative(mxfp4(y, rule=rule), y) for y in octave]
    assert min(errors) == pytest.approx(least, abs=5e-4)
    assert sum(errors) / 8 == pytest.approx(mean, abs=5e-4)
    assert max(errors) == pytest.approx(most, abs=5e-4)
    assert relative(mxfp4(2 * x, rule=rule), 2 * x) == errors[0]


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student"])
def test_eight_bits_are_four_times_as_near_and_rows_need_no_blocks(kind):
    x = drawn(kind)
    assert relative(fp8.fake_rowwise(x), x) == pytest.approx(0.0258, abs=8e-4)
    assert relative(fp8.fake_tensorwise(x), x) == pytest.approx(0.0265, abs=3e-4)
    assert relative(mxfp8(x, rule="ceil"), x) == pytest.approx(0.0265, abs=3e-4)
    assert relative(mxfp8(x, rule="floor"), x) == pytest.approx(0.0310, abs=2e-3)


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_formats_are_in_the_known_order(kind, seed):
    x = drawn(kind, seed)[:512]
    order: list[Fake] = [fp8.fake_rowwise, four_over_six, nvfp4.fake_quantise, mxfp4]
    errors = [relative(fake(x), x) for fake in order]
    assert errors == sorted(errors) and len(set(errors)) == 4
    assert errors[2] < relative(tiles(x), x)


def test_the_product_of_a_linear_layer_adds_the_errors_of_both_sides_as_squares():
    x, w = drawn("gaussian")[:, :512], drawn("gaussian", seed=1)[:512] * 0.02
    y = x.double() @ w.double().t()
    fx, fw = nvfp4.fake_quantise(x).double(), nvfp4.fake_quantise(w).double()
    weight = relative(x.double() @ fw.t(), y)
    activation = relative(fx @ w.double().t(), y)
    assert weight == pytest.approx(0.0951, abs=1e-3)
    assert activation == pytest.approx(0.0951, abs=1e-3)
    assert relative(fx @ fw.t(), y) == pytest.approx(0.134, abs=2e-3)
    assert relative(fx @ fw.t(), y) == pytest.approx((weight**2 + activation**2) ** 0.5, rel=0.01)
