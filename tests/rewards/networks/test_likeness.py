import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards.fixtures import blank, noise, square, word
from rewards.networks.likeness import likeness

PICTURES = torch.stack([square("red", 32), square("blue", 32), noise(32), blank(32), word("A", 32)])


def mean_color(images: torch.Tensor) -> torch.Tensor:
    """An embedding of one's own: (B, 3, H, W) -> (B, 3)."""
    return images.mean((2, 3))


@pytest.fixture(params=["pixels", "ssim", "clip", "own"])
def measure(request, monkeypatch):
    if request.param == "clip":
        return likeness(f"clip:{request.getfixturevalue('tiny_clip')}", device="cpu")
    if request.param == "own":
        monkeypatch.setattr("rewards.images.mean_color", mean_color, raising=False)
        return likeness("rewards.images:mean_color")
    return likeness(request.param)


def test_a_picture_is_like_itself_and_likeness_is_mutual(measure):
    assert torch.allclose(measure.pairs(PICTURES, PICTURES), torch.ones(5), atol=1e-5)
    there, back = (measure.pairs(a, b) for a, b in ((PICTURES, PICTURES.flip(0)),) * 2)
    assert torch.equal(there, back)
    assert torch.allclose(there, there.flip(0), atol=1e-6)


def test_the_matrix_holds_every_pair(measure):
    alike = measure.matrix(PICTURES)
    for i in range(5):
        pairs = measure.pairs(PICTURES[i].expand(5, -1, -1, -1), PICTURES)
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


def test_ssim_may_look_at_smaller_pictures():
    images = torch.stack([square("red", 256), square("blue", 256)])
    small, whole = likeness("ssim", longest=64), likeness("ssim")
    assert small.features(images).shape == (2, 64, 64, 3)
    assert small.features(PICTURES).shape == (5, 32, 32, 3)
    assert small.matrix(images)[0, 1] == pytest.approx(whole.matrix(images)[0, 1].item(), abs=0.1)


def test_versions_tell_measures_apart():
    made = [likeness("pixels"), likeness("ssim"), likeness("ssim", longest=9), likeness("clip")]
    assert len({measure.version for measure in made}) == 4


def test_pictures_smaller_than_the_window_are_refused():
    with pytest.raises(ValueError, match="7 x 7 pixels or more, got 5 x 5"):
        likeness("ssim").pairs(torch.rand(1, 3, 5, 5), torch.rand(1, 3, 5, 5))


@pytest.mark.parametrize("name", ["lpips", "", "no.such:thing", "rewards.images:nothing"])
def test_an_unknown_measure_is_refused(name):
    with pytest.raises(ValueError, match="measure"):
        likeness(name)
