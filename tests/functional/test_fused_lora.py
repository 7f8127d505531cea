import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.backbones.original_layers import stack_outputs, swap_halves, weight_change


def factors(rank: int, rows: int, columns: int = 3):
    return (
        torch.randn(rank, columns, dtype=torch.float64),
        torch.randn(rows, rank, dtype=torch.float64),
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4).filter(
        lambda parts: any(rank for rank, _ in parts)
    )
)
def test_the_change_of_stacked_layers_is_their_changes_below_each_other(shapes):
    parts = [factors(rank, rows) if rank else None for rank, rows in shapes]
    down, up = stack_outputs(parts, [rows for _, rows in shapes])
    assert down.shape[0] == up.shape[1] == sum(rank for rank, _ in shapes)
    expected = torch.cat([
        weight_change(*part, 1.5) if part else torch.zeros(rows, 3, dtype=torch.float64)
        for part, (_, rows) in zip(parts, shapes, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(weight_change(down, up, 1.5), expected, rtol=1e-14, atol=1e-14)


def test_parts_that_cannot_be_stacked_are_refused():
    with pytest.raises(ValueError, match="part 1"):
        stack_outputs([factors(1, 3), factors(1, 3)], [3, 4])
    with pytest.raises(ValueError, match="no layer has a LoRA"):
        stack_outputs([None], [3])


def test_swapped_halves_change_the_other_half():
    pair = factors(2, 6)
    swapped = weight_change(*swap_halves(pair), 1.0)
    first, second = weight_change(*pair, 1.0).chunk(2)
    assert torch.equal(swapped, torch.cat([second, first]))


def test_a_change_of_half_precision_factors_is_taken_in_fp32():
    down, up = (t.bfloat16() for t in factors(2, 4))
    assert weight_change(down, up, 2.0).dtype == torch.float32
    torch.testing.assert_close(weight_change(down, up, 2.0), 2 * (up.float() @ down.float()))
