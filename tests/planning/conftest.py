"""Plans without the counting of activations, which takes seconds and has tests of its own."""

import pytest

from flowrl.planning.activations import Activations


@pytest.fixture
def even_activations(monkeypatch):
    """Activations in proportion to images and pixels, eight times as many where one learns."""

    def sampled(rows: int, height: int, width: int, *, learn: bool = False) -> Activations:
        size = 1000 * rows * height * width
        return Activations(peak=size * (8 if learn else 1), held=0, operations=1000.0 * size)

    def transformer(forward, *, gradients: bool, checkpointing: bool = False) -> Activations:
        return sampled(forward.rows, forward.height, forward.width, learn=gradients)

    def decoder(spec, rows, height, width, dtype, *, tiling: bool = False) -> Activations:
        return sampled(rows, height, width)

    for module in ("activations", "memory"):
        monkeypatch.setattr(f"flowrl.planning.{module}.count_forward", transformer)
        monkeypatch.setattr(f"flowrl.planning.{module}.count_decode", decoder)
