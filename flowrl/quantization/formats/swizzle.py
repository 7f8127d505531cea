"""The order in which cuBLAS reads block scales: tiles of 128 rows x 4 columns.

Byte of (r, c), with C columns: ((r div 128) ceil(C/4) + c div 4) 512 + (r mod 32) 16
+ ((r mod 128) div 32) 4 + c mod 4 (cuBLAS, "1D Block Scaling Factors Layout"; in torch
SWIZZLE_32_4_4). Rows are padded to a multiple of 128 and columns to one of 4, with zeros.
"""

import torch
from torch import Tensor


def swizzle(scale: Tensor) -> Tensor:
    """(R, C) of one-byte numbers -> flat (128 ceil(R/128) * 4 ceil(C/4),) of the same type."""
    rows, columns = scale.shape
    down, across = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros(down * 128, across * 4, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle`, padding cut off. -> (rows, columns) of the same type

    Raises ValueError if flat is not as long as that shape needs.
    """
    down, across = -(-rows // 128), -(-columns // 4)
    if flat.numel() != down * across * 512:
        raise ValueError(
            f"scales of {rows} x {columns} are {down * across * 512} bytes when swizzled, "
            f"got {flat.numel()}: give the rows and columns they were made from"
        )
    tiles = flat.view(torch.uint8).view(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :columns].contiguous().view(flat.dtype)
