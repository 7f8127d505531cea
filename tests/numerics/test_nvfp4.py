"""What holds for NVFP4 in every variant: bounds, fixed points, exactness, what is not finite."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.quantization.formats import e2m1, nvfp4
from flowrl.quantization.formats.nvfp4_variants import given as given_scale
from flowrl.quantization.formats.nvfp4_variants import steps

VARIANTS = ("torchao", "te", "div", "bfl", "comfy")
OPTIONS = [
    {"variant": v, "two_level": two, "four_over_six": four, "two_dimensional": tiles}
    for v, two, four, tiles in itertools.product(VARIANTS, *3 * [(True, False)])
]
NAMES = ["-".join([o["variant"], *(k for k, v in o.items() if v is True)]) for o in OPTIONS]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(seed: int = 0) -> torch.Tensor:
    """Rows of many sizes with zero, constant, tiny and outlying blocks. (64, 96)"""
    x = normal(64, 96, seed=seed) * torch.logspace(-6, 1, 64)[:, None]
    x[3, :16], x[4, 16:32], x[5, 40], x[6, :16] = 0, -0.75, 300.0, -1e-9
    return x


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def blocks(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 16))


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fake_numbers_are_the_dequantised_codes_bit_for_bit(options, dtype):
    x = uneven().to(dtype)
    before = x.clone()
    q = nvfp4.quantise(x, **options)
    fake = nvfp4.fake_quantise(x, **options)
    product, g = nvfp4.fake_unscaled(x, **options)
    assert fake.dtype == torch.float32 and fake.isfinite().all()
    assert torch.equal(bits(fake), bits(nvfp4.dequantise(q)))
    assert torch.equal(bits(product), bits(nvfp4.unscaled(q))) and g == q.global_scale
    assert torch.equal(bits(x), bits(before))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4], OPTIONS[5]], ids=str)
def test_a_large_matrix_worked_on_in_pieces_is_the_same(options):
    x = normal(2000, 208)
    assert x.numel() > nvfp4.PIECE
    fake = nvfp4.fake_quantise(x, **options)
    assert torch.equal(bits(fake), bits(nvfp4.dequantise(nvfp4.quantise(x, **options))))


def test_shapes_types_and_leading_axes():
    x = normal(3, 5, 32)
    q = nvfp4.quantise(x)
    assert (q.codes.shape, q.codes.dtype) == ((3, 5, 32), torch.uint8)
    assert (q.scale.shape, q.scale.dtype) == ((3, 5, 2), torch.float8_e4m3fn)
    assert (q.global_scale.shape, q.global_scale.dtype) == ((), torch.float32)
    assert nvfp4.unscaled(q).dtype == nvfp4.fake_unscaled(x)[0].dtype == torch.bfloat16
    flat = nvfp4.fake_quantise(x.view(15, 32))
    assert torch.equal(nvfp4.fake_quantise(x), flat.view(3, 5, 32))
    assert torch.equal(nvfp4.fake_quantise(x.transpose(0, 1)), flat.view(3, 5, 32).transpose(0, 1))


def test_no_gradient_is_carried():
    x = normal(4, 16).requires_grad_()
    assert not nvfp4.fake_quantise(x).requires_grad
    assert not nvfp4.quantise(x).global_scale.requires_grad


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_the_error_is_at_most_half_the_local_step_times_the_scales_outside_clipping(options):
    x = uneven(1)
    q = nvfp4.quantise(x, **options)
    total = (q.scale.double() * q.global_scale.double()).unsqueeze(-1)
    inside = (total > 0) & (blocks(x).double().abs() <= 6 * total)
    y = (blocks(x).double() / total).abs()
    step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0))
    error = (blocks(nvfp4.dequantise(q).double() - x)).abs()
    bound = total * (step / 2 + y * 2**-21)  # float32 rounds s g, x / (s g) and q (s g)
    assert inside.float().mean() > 0.4
    assert (error <= bound)[inside].all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_product_of_a_code_and_a_scale_is_exact_in_bfloat16(variant):
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16)
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    q = nvfp4.Quantised(codes=codes, scale=scale, global_scale=torch.tensor(1.0))
    exact = e2m1.decode(codes, torch.float64) * scale.double()
    assert torch.equal(nvfp4.unscaled(q).double(), exact)
    product, g = nvfp4.fake_unscaled(uneven(), variant=variant)
    q = nvfp4.quantise(uneven(), variant=variant)
    exact = blocks(e2m1.decode(q.codes, torch.float64)) * q.scale.double().unsqueeze(-1)
    assert torch.equal(product.double(), exact.flatten(-2)) and g == q.global_scale


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_the_same_scales_numbers_of_the_format_stay_as_they_are(variant):
    q = nvfp4.quantise(uneven(2), variant=variant)
    once, scale = nvfp4.dequantise(q), q.scale.float()
    values = e2m1.round_e2m1(steps(blocks(once), scale, given_scale(q.global_scale), variant))
    again = values * (scale * q.global_scale).unsqueeze(-1)
    assert torch.equal(again.flatten(-2), once)


@pytest.mark.parametrize("two_dimensional", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_time_even_finds_the_same_scales_above_the_smallest_ones(variant, two_dimensional):
    options = {"variant": variant, "two_dimensional": two_dimensional}
    x = normal(64, 96)
    q = nvfp4.quantise(x, **options)
    assert q.scale.float().min() > 2**-6
    again = nvfp4.quantise(nvfp4.dequantise(q), global_scale=q.global_scale, **options)
    assert torch.equal(again.codes & 7, q.codes & 7)
    assert torch.equal(again.scale.float(), q.scale.float())


@settings(max_examples=50)
@given(st.floats(2.0**-80, 2.0**80, width=32), st.sampled_from([-1, 0, 1]))
def test_a_constant_tensor_is_kept_to_float32(size, sign):
    x = torch.full((2, 32), sign * size)
    for variant in VARIANTS:
        fake = nvfp4.fake_quantise(x, variant=variant)
        torch.testing.assert_close(fake, x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_tensors_of_any_size_stay_finite(variant, size):
    x = normal(16, 32).clamp(-1, 1) * size
    q = nvfp4.quantise(x, variant=variant)
    assert q.scale.float().isfinite().all() and q.global_scale.isfinite()
    assert nvfp4.dequantise(q).isfinite().all()
    rounding = 1 / 16 if size < 2e-27 else 0  # of a block scale, where g is the smallest there is
    assert nvfp4.dequantise(q).abs().max() <= x.abs().max() * (1 + rounding + 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_with_a_global_scale_of_the_data_one_bad_number_makes_all_nan(variant, four_over_six, bad):
    x = normal(16, 32)
    x[3, 20] = bad
    options = {"variant": variant, "four_over_six": four_over_six}
    assert nvfp4.fake_quantise(x, **options).isnan().all()
    assert nvfp4.dequantise(nvfp4.quantise(x, **options)).isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", [{"two_level": False}, {"global_scale": torch.tensor(0.5)}])
def test_with_a_known_global_scale_nan_is_its_block_s_and_infinities_saturate(variant, options):
    x, g = normal(16, 32), options.get("global_scale", 1.0)
    clean = nvfp4.fake_quantise(x, variant=variant, **options)
    x[3, 20], x[5, 2] = torch.nan, -torch.inf
    q = nvfp4.quantise(x, variant=variant, **options)
    for numbers in (nvfp4.fake_quantise(x, variant=variant, **options), nvfp4.dequantise(q)):
        assert numbers[3, 16:].isnan().all() and numbers.isnan().sum() == 16
        assert numbers[5, 2] == -6 * 448 * g
        rest = torch.ones(16, 32, dtype=torch.bool)
        rest[3, 16:] = rest[5, :16] = False
        assert torch.equal(numbers[rest], clean[rest])


def test_elements_beyond_a_known_global_scale_saturate():
    x = torch.tensor([[5000.0, -9000.0] + [100.0] * 14])
    assert nvfp4.fake_quantise(x, two_level=False)[0, :3].tolist() == [2688.0, -2688.0, 0.0]


def test_rows_that_are_not_whole_blocks_are_refused_and_so_are_tiles():
    for quantise in (nvfp4.quantise, nvfp4.fake_quantise, nvfp4.fake_unscaled):
        with pytest.raises(ValueError, match="rows of 40: a multiple of 16"):
            quantise(torch.zeros(2, 40))
        with pytest.raises(ValueError, match=r"shape \(40, 32\)"):
            quantise(torch.zeros(40, 32), two_dimensional=True)
        with pytest.raises(ValueError, match=r"shape \(2, 16, 32\)"):
            quantise(torch.zeros(2, 16, 32), two_dimensional=True)


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_weight_in_tiles_and_its_transpose_have_the_same_codes(variant, four_over_six):
    w = normal(48, 80)
    options = {"variant": variant, "two_dimensional": True, "four_over_six": four_over_six}
    q, t = nvfp4.quantise(w, **options), nvfp4.quantise(w.t().contiguous(), **options)
    assert torch.equal(q.codes.t(), t.codes)
    tiles = q.scale.float().unflatten(0, (-1, 16))
    assert torch.equal(tiles, tiles[:, :1].expand_as(tiles))
    assert torch.equal(tiles[:, 0].t(), t.scale.float().unflatten(0, (-1, 16))[:, 0])


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.booleans())
def test_four_over_six_is_the_better_of_both_scales_in_every_block(seed, two_dimensional):
    x, g = normal(16, 64, seed=seed), torch.tensor(0.002)

    def error(fake):
        squares = blocks((fake.double() - x).square()).sum(-1)
        return squares.unflatten(0, (-1, 16)).sum(1) if two_dimensional else squares

    options = {"two_dimensional": two_dimensional, "global_scale": g}
    six = error(nvfp4.fake_quantise(x, **options))
    amax = blocks(x.abs()).amax(-1)
    if two_dimensional:
        amax = amax.amax(0, keepdim=True).expand_as(amax)
    wide = (amax / 6 / g * 1.5).to(torch.float8_e4m3fn).float() * g
    four = error((e2m1.round_e2m1(blocks(x) / wide.unsqueeze(-1)) * wide.unsqueeze(-1)).flatten(-2))
    best = error(nvfp4.fake_quantise(x, four_over_six=True, **options))
    torch.testing.assert_close(best, torch.minimum(six, four), rtol=1e-6, atol=0)


def test_four_over_six_takes_six_when_equal_and_four_when_better():
    equal = torch.full((1, 16), 12.0)  # 6 * 2 and 4 * 3, both exact
    q = nvfp4.quantise(equal, four_over_six=True, two_level=False)
    assert q.scale.float().tolist() == [[2.0]] and q.codes.unique().tolist() == [7]
    better = torch.tensor([[12.0] + 15 * [9.0]])  # 9 is 4.5 of 2 but 3 of 3
    q = nvfp4.quantise(better, four_over_six=True, two_level=False)
    assert q.scale.float().tolist() == [[3.0]] and q.codes.unique().tolist() == [5, 6]
    assert torch.equal(nvfp4.dequantise(q), better)


def test_four_over_six_leaves_room_for_the_wider_scale():
    x = normal(64, 64)
    q = nvfp4.quantise(x, four_over_six=True)
    assert q.global_scale == x.abs().max() / (256 * 6)
    assert q.scale.float().max() <= 384
    assert nvfp4.quantise(x).global_scale == x.abs().max() / (448 * 6)
    assert nvfp4.quantise(x).scale.float().max() == 448


@pytest.mark.gpu
def test_a_gpu_finds_the_same_bits():
    x = uneven(3)
    for options in OPTIONS:
        here, there = nvfp4.quantise(x, **options), nvfp4.quantise(x.cuda(), **options)
        assert there.codes.is_cuda and there.global_scale.is_cuda
        assert torch.equal(here.codes, there.codes.cpu())
        assert torch.equal(bits(here.scale), bits(there.scale.cpu()))
        assert torch.equal(here.global_scale, there.global_scale.cpu())
        fake = nvfp4.fake_quantise(x.cuda(), **options)
        assert torch.equal(bits(fake.cpu()), bits(nvfp4.fake_quantise(x, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=[NAMES[0], NAMES[3]])
def test_a_compiler_leaves_the_bits_as_they_are(options):
    x = uneven(4)
    compiled = torch.compile(nvfp4.fake_quantise, dynamic=False, fullgraph=True)
    fake = nvfp4.fake_quantise(x, **options)
    assert torch.equal(bits(compiled(x, **options)), bits(fake))
