"""What the reference's errors were: with a fixed store and fixed draws they never change."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state, save_state


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceErrors:
    """A table of errors of a store's images at a pool of draws, seen from one rollout.

    table: (images of the store, pool) fp32 on the CPU, NaN where not known yet; it is shared by
    all views and written in place. image, group: (G,) long, of each image of the rollout its
    number, and that of its group, in the store: names for draws that outlast the rollout. key: of
    everything that decides the errors.
    """

    table: Tensor
    image: Tensor
    group: Tensor
    key: str

    @staticmethod
    def empty(images: int, pool: int, key: str) -> "ReferenceErrors":
        nobody = torch.empty(0, dtype=torch.long)
        table = torch.full((images, pool), math.nan)
        return ReferenceErrors(table=table, image=nobody, group=nobody, key=key)

    @property
    def pool(self) -> int:
        """How many draws an image has."""
        return self.table.shape[1]

    def view(self, image: Tensor, group: Tensor) -> "ReferenceErrors":
        """The same table for the images (G,) of a rollout."""
        return replace(self, image=image, group=group)

    def get(self, image: Tensor, draws: Tensor) -> Tensor:
        """Errors (N, D) fp32 of images (N,) of the rollout at draws (N, D) of the pool."""
        rows = self.image[image.cpu()]
        return self.table[rows[:, None], draws.cpu()].to(image.device)

    def put(self, image: Tensor, draws: Tensor, errors: Tensor) -> None:
        """Remember errors (N, D); places as in `get`."""
        rows = self.image[image.cpu()]
        self.table[rows[:, None], draws.cpu()] = errors.detach().float().cpu()

    def save(self, path: Path, runtime: Runtime) -> None:
        """Write what all processes know; all of them call this, and all know it afterwards."""
        if runtime.world_size > 1:
            parts = runtime.gather(self.table).view(runtime.world_size, *self.table.shape)
            for part in parts:
                self.table.copy_(torch.where(self.table.isnan(), part, self.table))
        if runtime.is_main:
            save_state(path, {"key": self.key, "table": self.table})

    def load(self, path: Path) -> bool:
        """Take over what was saved of the same store, pipeline and draws -> whether it was."""
        if not path.is_file():
            return False
        state = load_state(path)
        if state["key"] != self.key or state["table"].shape != self.table.shape:
            return False
        self.table.copy_(state["table"])
        return True
