"""Before a run uses a kernel, its products are compared with the same numbers done plainly."""

from collections.abc import Iterable

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.quantization.backends import Backend

ROWS = 200  # neither a multiple of a tile's 128 rows nor fewer
# Rounding the result to bf16 leaves 0.004 at most. Tensor cores that sum FP8 in about 14 bits
# (2412.19437) may leave 0.02 in rows of 15000. A wrong nibble, scale or layout leaves 0.5 and more.
LIMIT = 0.05


def check_kernels(
    backend: Backend, shapes: Iterable[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> dict[tuple[int, int], float]:
    """One product per distinct (out, in), against `backend.reference` in fp32 on the device.

    Returns the worst relative error of any row or column, by shape; nothing for a backend without
    a reference, whose products are plain ones. dtype: of the activations.
    Raises UserError when a kernel does not run or disagrees, with the shape and the error.
    """
    if backend.reference is None:
        return {}
    errors = {}
    for shape in sorted(set(shapes)):
        errors[shape] = _error(backend, backend.reference, shape, device, dtype)
        if not errors[shape] <= LIMIT:  # NaN too
            raise UserError(
                f"{_title(backend, shape)} differs from its emulation by {errors[shape]:.3g}, "
                f"more than {LIMIT}: this device or torch computes something else; ask for "
                "another precision, or keep layers of that shape exact"
            )
    return errors


@torch.no_grad()
def _error(
    backend: Backend,
    reference: Backend,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    generator = torch.Generator(device).manual_seed(0)
    weight = _uneven(*shape, generator)
    x = _uneven(ROWS, shape[1], generator).to(dtype)
    expected = reference.matmul(x.float(), reference.pack(weight))
    try:
        got = backend.matmul(x, backend.pack(weight)).float()
        difference, whole = (got - expected).square(), expected.square()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"{_title(backend, shape)} does not run here ({error}): ask for another precision, "
            "or keep layers of that shape exact"
        ) from error
    worst = [(difference.sum(dim) / whole.sum(dim)).sqrt().max() for dim in (0, 1)]
    return torch.stack(worst).max().item()


def _uneven(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Gaussian numbers whose rows and blocks of 16 differ in size: scales cannot be confused."""
    device = generator.device
    values = torch.randn(rows, columns, generator=generator, device=device)
    shape = (rows, -(-columns // 16) + 1)
    power = torch.randint(-2, 3, shape, generator=generator, device=device).float()
    of_row, of_block = power[:, :1], power[:, 1:].repeat_interleave(16, 1)[:, :columns]
    return values * torch.exp2(of_row + of_block)


def _title(backend: Backend, shape: tuple[int, int]) -> str:
    return f"the {type(backend).__name__} product of a layer with {shape[0]} x {shape[1]} weights"
