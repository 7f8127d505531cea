"""What a pipeline's `encode_prompt` returns, as rows of tensors, and back.

A record is the tuple of what the encoder's calls returned during one call of the pipeline; nested
tuples of tensors. Each tensor in it is one entry of a `Conditioning`, named
LENGTH/INDEX[/LENGTH/INDEX...]@KIND: length and index at each level of tuples. KIND is the number
of the batch axis, with `i` where it runs inside of another one, as for negatives before positives;
`s` for a tensor shared by all rows, such as text ids; `l` for a list with one
tensor a prompt; `c` for running lengths (B + 1). An entry whose shape depends on the text is padded
with zeros, and NAME# holds its shapes. The entries alone rebuild the record, so that the text
encoders may be gone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.trajectory import Conditioning

SHAPE = "#"
LeafPath = tuple[tuple[int, int], ...]  # a length and an index at each level


def kinds_of(one: Any, two: Any) -> dict[str, str]:
    """Return the kind of each entry, by comparing results for a prompt and for it twice.

    Raises:
        UserError: A tensor changes in a way that names no batch axis.
    """
    kinds = {}
    for path, tensor in _leaves(one):
        other: Any = two
        for index in path.split("/")[1::2]:
            other = other[int(index)]
        if isinstance(tensor, list):
            kinds[path] = "l"
            continue
        grown = [
            k for k, (a, b) in enumerate(zip(tensor.shape, other.shape, strict=True)) if a != b
        ]
        if not grown:
            kinds[path] = "s"
        elif tensor.ndim == 1 and len(other) == len(tensor) + 1 and len(tensor) == 2:
            kinds[path] = "c"
        elif len(grown) == 1 and other.shape[grown[0]] == 2 * tensor.shape[grown[0]]:
            axis, size = grown[0], tensor.shape[grown[0]]
            outer = other.narrow(axis, 0, size)
            inner = other.unflatten(axis, (size, 2)).select(axis + 1, 0)
            distances = [(t.float() - tensor.float()).abs().sum() for t in (outer, inner)]
            kinds[path] = str(axis) if distances[0] <= distances[1] else f"{axis}i"
        else:
            raise UserError(
                f"encode_prompt returns a tensor of shape {tuple(tensor.shape)} for a prompt and "
                f"{tuple(other.shape)} for it twice, so that it has no batch axis"
            )
    return kinds


def entries_of(result: Any) -> set[str]:
    """Return the paths of a result's entries."""
    return {path for path, _ in _leaves(result)}


def rows_of(result: Any, kinds: Mapping[str, str], count: int) -> dict[str, Tensor]:
    """Return the entries (count, ...) of a result for `count` prompts of equal shapes."""
    rows = {}
    for path, tensor in _leaves(result):
        kind = kinds[path]
        if kind == "l":
            row = torch.stack(tensor)
        elif kind == "s":
            row = tensor.unsqueeze(0).expand(count, *tensor.shape)
        elif kind == "c":
            row = tensor.diff()
        else:
            axis, inner = int(kind.rstrip("i")), kind.endswith("i")
            split = tensor.unflatten(axis, (-1, count) if inner else (count, -1))
            row = split.movedim(axis + inner, 0)
        rows[f"{path}@{kind}"] = row.contiguous()
    return rows


def ragged(parts: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    """Join parts along rows; entries among `names` are padded, and get their shapes.

    Args:
        parts: One row each.
        names: Entries whose shape depends on the text.
    """
    joined = dict(Conditioning.cat([Conditioning(tensors=part) for part in parts]).tensors)
    for name in names:
        shapes = [list(part[name].shape[1:]) for part in parts]
        joined[name + SHAPE] = torch.tensor(shapes, device=joined[name].device)
    return joined


def has_shapes(cond: Conditioning) -> bool:
    """Return whether shapes depend on the text: for all texts of a pipeline, or for none."""
    return any(name.endswith(SHAPE) for name in cond.tensors)


def same_shapes(cond: Conditioning) -> list[list[int]]:
    """Return groups of rows whose texts have equal shapes, all rows where none depend on a text."""
    shapes = [t for name, t in cond.tensors.items() if name.endswith(SHAPE)]
    if not shapes:
        return [list(range(len(cond)))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(torch.cat([t.flatten(1) for t in shapes], 1).tolist()):
        groups.setdefault(tuple(key), []).append(row)
    return list(groups.values())


def record_of(cond: Conditioning) -> Any:
    """Return the record for rows of equal shapes."""
    leaves = {}
    for name, tensor in cond.tensors.items():
        if name.endswith(SHAPE):
            continue
        shape = cond.tensors.get(name + SHAPE)
        if shape is not None:
            tensor = tensor[(slice(None), *(slice(n) for n in shape[0].tolist()))]
        path, kind = name.split("@")
        numbers = list(map(int, path.split("/")))
        leaves[tuple(zip(numbers[::2], numbers[1::2], strict=True))] = _restored(tensor, kind)
    return _nested(leaves)


def _nested(leaves: Mapping[LeafPath, Any]) -> Any:
    """Return nested tuples of leaves by path; None where no path leads."""
    if () in leaves:
        return leaves[()]
    length, parts = next(iter(leaves))[0][0], {}
    for ((_, index), *path), leaf in leaves.items():
        parts.setdefault(index, {})[tuple(path)] = leaf
    return tuple(_nested(parts[i]) if i in parts else None for i in range(length))


def _restored(rows: Tensor, kind: str) -> Any:
    if kind == "l":
        return list(rows.unbind())
    if kind == "s":
        return rows[0]
    if kind == "c":
        return torch.nn.functional.pad(rows.flatten().cumsum(0), (1, 0)).to(rows.dtype)
    axis = int(kind.rstrip("i"))
    return rows.movedim(0, axis + kind.endswith("i")).flatten(axis, axis + 1)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths of tensors and of lists of tensors; None has no path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list) and value and all(isinstance(v, Tensor) for v in value):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}/{len(value)}/{index}".removeprefix("/"))
    elif value is not None:
        raise UserError(f"encode_prompt returns a {type(value).__name__}, expected tensors")
