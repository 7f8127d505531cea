"""What the statistics of an image are, against formulas written out."""

import pytest
import torch

from flowrl.functional.image_statistics import (
    STATISTICS,
    grid_share,
    image_statistics,
    light_layout,
    thumbnails,
)

GENERATOR = torch.Generator().manual_seed(0)
NOISE = torch.rand(3, 3, 32, 48, generator=GENERATOR, dtype=torch.float64)
ROWS, COLUMNS = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")


def of(images, period=8) -> dict[str, torch.Tensor]:
    return dict(zip(STATISTICS, image_statistics(images, period).unbind(1), strict=True))


def test_a_constant_image_has_its_light_and_colour_alone():
    colour = torch.tensor([0.8, 0.4, 0.2], dtype=torch.float64)
    values = of(colour[None, :, None, None].expand(1, 3, 32, 48))
    assert values["brightness"].item() == pytest.approx(0.299 * 0.8 + 0.587 * 0.4 + 0.114 * 0.2)
    assert values["saturation"].item() == pytest.approx(0.6)
    assert values["warmth"].item() == pytest.approx(0.6)
    assert values["tint"].item() == pytest.approx(-0.1)
    opponents = 0.4**2 + 0.4**2  # R - G, and (R + G) / 2 - B
    assert values["colourfulness"].item() == pytest.approx(0.3 * opponents**0.5)
    for name in ("contrast", "clipped", "sharpness", "grid"):
        assert values[name].item() == pytest.approx(0, abs=1e-12), name
    assert values["flat"].item() == 1


def test_colourfulness_is_that_of_hasler_and_suesstrunk():
    red, green, blue = (channel.flatten() for channel in NOISE[0].numpy())
    rg, yb = red - green, 0.5 * (red + green) - blue
    expected = (rg.var() + yb.var()) ** 0.5 + 0.3 * (rg.mean() ** 2 + yb.mean() ** 2) ** 0.5
    assert of(NOISE)["colourfulness"][0].item() == pytest.approx(float(expected), rel=1e-12)


def test_edges_and_clipped_values_are_counted():
    image = torch.full((1, 3, 32, 48), 0.5, dtype=torch.float64)
    image[:, :, 16:] = 1.0  # one edge of 0.5 in 32 rows
    values = of(image)
    assert values["sharpness"].item() == pytest.approx(0.5 / 32)
    assert values["flat"].item() == pytest.approx(31 / 32)
    assert values["clipped"].item() == 0.5
    assert values["contrast"].item() == pytest.approx(0.25)


def test_statistics_are_of_each_image_alone_at_any_place_and_in_grey_without_colour():
    together, alone = image_statistics(NOISE), image_statistics(NOISE[1:2])
    torch.testing.assert_close(together[1:2], alone, rtol=0, atol=1e-14)
    mirrored = of(NOISE.flip(3))
    for name in ("brightness", "contrast", "saturation", "clipped", "colourfulness"):
        torch.testing.assert_close(mirrored[name], of(NOISE)[name], rtol=0, atol=1e-12)
    grey = of(NOISE.mean(1, keepdim=True).expand(3, 3, 32, 48))
    assert grey["saturation"].abs().max() == 0 and grey["colourfulness"].abs().max() < 1e-12
    assert torch.equal(image_statistics(NOISE.half()), image_statistics(NOISE.half().float()))


@pytest.mark.parametrize("period", [2, 4, 8])
def test_the_grid_is_the_power_at_multiples_of_the_cells_frequency(period):
    """Parseval, of the Laplacian; a level's power is added below."""
    luma = torch.rand(1, 32, 48, generator=GENERATOR, dtype=torch.float64)
    padded = torch.nn.functional.pad(luma[:, None], (1, 1, 1, 1), mode="replicate")
    kernel = torch.tensor([[0, -1, 0], [-1, 4, -1], [0, -1, 0]], dtype=torch.float64)
    laplacian = torch.nn.functional.conv2d(padded, kernel[None, None])[0, 0]
    power = torch.fft.fft2(laplacian).abs().square() / (32 * 48) ** 2
    # Multiples of 32 / period and 48 / period.
    shares = power[:: 32 // period, :: 48 // period].sum() / (power.sum() + 255**-2)
    assert grid_share(luma, period).item() == pytest.approx(shares.item(), rel=1e-9)


def test_a_grid_shows_in_noise_and_a_ramp_or_what_nobody_sees_does_not():
    def share(pattern, period=8) -> float:
        return grid_share((0.5 + pattern)[None].double(), period).item()

    lines = ((ROWS % 8 == 0) | (COLUMNS % 8 == 0)).double()
    checkers = (ROWS + COLUMNS) % 2 - 0.5
    noise = 0.05 * torch.randn(32, 48, generator=GENERATOR, dtype=torch.float64)
    assert share(noise) < 0.1
    assert share(0.1 * lines) > 0.9 and share(0.1 * checkers) > 0.9
    assert share(noise + 0.2 * lines) > 3 * share(noise)
    assert share(0.1 * lines, period=12) < 0.5 * share(0.1 * lines)
    assert share(ROWS / 100) < 0.1  # of its two ends
    assert share(1e-4 * checkers) < 0.05


def test_small_images_and_none_at_all_have_statistics():
    assert image_statistics(torch.rand(2, 3, 4, 4)).isfinite().all()
    assert thumbnails(torch.rand(0, 3, 32, 48)).shape == (0, 3, 8, 8)
    means = NOISE.unflatten(3, (8, 6)).unflatten(2, (8, 4)).mean((3, 5))
    torch.testing.assert_close(thumbnails(NOISE), means, rtol=0, atol=1e-12)


def test_light_lies_where_it_was_put():
    """Only what moved counts: right, upper half, middle; a ring has the middle alone."""
    image = torch.zeros(3, 3, 8, 8)
    image[0, ..., 4:] = 1
    image[1, ..., :4, :] = 1
    image[2, ..., 2:-2, 2:-2] = 1
    expected = torch.eye(3)
    assert torch.allclose(light_layout(image), expected, atol=1e-6)
