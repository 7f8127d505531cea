"""Cached errors of the reference: with fixed images and fixed noise they never change."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state, save_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceErrors:
    """A table of errors of a data set's images at a pool of noisings, seen from one rollout."""

    table: Tensor  # (images of the data set, pool) fp32, CPU, NaN: unknown; shared and written
    image: Tensor  # (G,) long, number in the data set of each image of the rollout
    group: Tensor  # (G,) long, number in the data set of its group
    key: str  # hash of everything that decides the errors

    @staticmethod
    def empty(images: int, pool: int, key: str) -> "ReferenceErrors":
        nobody = torch.empty(0, dtype=torch.long)
        table = torch.full((images, pool), math.nan)
        return ReferenceErrors(table=table, image=nobody, group=nobody, key=key)

    @property
    def pool(self) -> int:
        """Noisings of each image."""
        return self.table.shape[1]

    def view(self, image: Tensor, group: Tensor) -> "ReferenceErrors":
        """Return the same table for the images (G,) of a rollout."""
        return replace(self, image=image, group=group)

    def get(self, image: Tensor, place: Tensor) -> Tensor:
        """Return errors (N, D) fp32 of the rollout's images (N,) at noisings (N, D) of the pool."""
        rows = self.image[image.cpu()]
        return self.table[rows[:, None], place.cpu()].to(image.device)

    def put(self, image: Tensor, place: Tensor, errors: Tensor) -> None:
        """Store errors (N, D); arguments as in `get`."""
        rows = self.image[image.cpu()]
        self.table[rows[:, None], place.cpu()] = errors.detach().float().cpu()

    def save(self, path: Path, runtime: Runtime) -> None:
        """Write what all processes know. All call it, and all know it afterwards."""
        if runtime.world_size > 1:
            parts = runtime.gather(self.table).view(runtime.world_size, *self.table.shape)
            for part in parts:
                self.table.copy_(torch.where(self.table.isnan(), part, self.table))
        if runtime.is_main:
            save_state(path, {"key": self.key, "table": self.table})

    def load(self, path: Path) -> bool:
        """Load a saved table with the same key. Return whether there was one."""
        if not path.is_file():
            return False
        state = load_state(path)
        if state["key"] != self.key or state["table"].shape != self.table.shape:
            return False
        self.table.copy_(state["table"])
        return True
