import pytest
import torch
from flowrl_rewards.fixtures import blank, noise, square, word
from flowrl_rewards.networks.likeness import likeness
from hypothesis import given
from hypothesis import strategies as st

IMAGES = torch.stack([square("red", 32), square("blue", 32), noise(32), blank(32), word("A", 32)])


def mean_color(images: torch.Tensor) -> torch.Tensor:
    """An embedding of one's own: (B, 3, H, W) -> (B, 3)."""
    return images.mean((2, 3))


@pytest.fixture
def measures(tiny_clip, monkeypatch):
    monkeypatch.setattr("flowrl_rewards.images.mean_color", mean_color, raising=False)
    clip = likeness(f"clip:{tiny_clip}", device="cpu")
    return likeness("pixels"), likeness("ssim"), likeness("flowrl_rewards.images:mean_color"), clip


def test_an_image_is_like_itself_likeness_is_mutual_and_the_matrix_holds_every_pair(measures):
    for measure in measures:
        assert torch.allclose(measure.pairs(IMAGES, IMAGES), torch.ones(5), atol=1e-5)
        there = measure.pairs(IMAGES, IMAGES.flip(0))
        assert torch.allclose(there, there.flip(0), atol=1e-6)
        alike = measure.matrix(IMAGES)
        for i in range(5):
            pairs = measure.pairs(IMAGES[i].expand(5, -1, -1, -1), IMAGES)
            assert torch.allclose(alike[i], pairs.double(), atol=1e-5)
        assert alike.abs().max() <= 1 and alike[0, 1] < 0.999


def test_ssim_is_scikit_images():
    """Of constants only the luminance is left: (2 a b + c) / (a^2 + b^2 + c), c = 2.55^2."""
    a, b = 51, 204
    flat = [torch.full((1, 3, 16, 16), level / 255) for level in (a, b)]
    c = 2.55**2
    expected = (2 * a * b + c) / (a * a + b * b + c)
    assert likeness("ssim").pairs(*flat).item() == pytest.approx(expected, rel=1e-6)


@given(st.floats(0, 1), st.floats(0, 1))
def test_pixels_are_1_minus_the_mean_difference(a, b):
    flat = [torch.full((1, 3, 40, 24), level, dtype=torch.float64) for level in (a, b)]
    assert likeness("pixels").pairs(*flat).item() == pytest.approx(1 - abs(a - b), abs=1e-6)


def test_ssim_may_look_at_smaller_images():
    images = torch.stack([square("red", 256), square("blue", 256)])
    small, whole = likeness("ssim", longest=64), likeness("ssim")
    assert small.features(images).shape == (2, 64, 64, 3)
    assert small.features(IMAGES).shape == (5, 32, 32, 3)
    assert small.matrix(images)[0, 1] == pytest.approx(whole.matrix(images)[0, 1].item(), abs=0.1)


def test_versions_tell_measures_apart():
    made = [likeness("pixels"), likeness("ssim"), likeness("ssim", longest=9), likeness("clip")]
    assert len({measure.version for measure in made}) == 4


def test_images_smaller_than_the_window_and_unknown_measures_are_refused():
    with pytest.raises(ValueError, match="7 x 7 .* 5 x 5"):
        likeness("ssim").pairs(torch.rand(1, 3, 5, 5), torch.rand(1, 3, 5, 5))
    for name in ("lpips", "", "no.such:thing", "flowrl_rewards.images:nothing"):
        with pytest.raises(ValueError, match="measure"):
            likeness(name)
