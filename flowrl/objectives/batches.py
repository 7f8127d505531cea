"""What objectives learn from: clean latents (`Endpoints`) and ODE chains (`Trajectories`)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl.config.objectives import KLOnOptions
from flowrl.functional.groups import lone, undecided
from flowrl.objectives.selective_kl import kl_weights
from flowrl.trajectory import Conditioning, Metrics, Rollout
from flowrl.utils.devices import send

Compared = Literal["image", "group", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """N clean latents with a learning signal, those of a group side by side.

    Numbers are on the CPU. `part` sends them, except `image`, to the latents' device.
    """

    x0: Tensor  # (N, *latent), in the dtype of the rollout
    prompt: Tensor  # (N,) long, index into `cond`
    group: Tensor  # (N,) long, the same numbers on every process
    image: Tensor  # (N,) long, number in the rollout
    reward: Tensor  # (N,) fp32, the weighted sum; NaN where a score is missing
    signal: Tensor  # (N,) fp32, a weight, an advantage or a label
    pull: Tensor  # (N,) fp32, weight of the KL penalty, see `selective_kl`
    sigmas: Tensor  # (T+1,), the rollout's schedule
    cond: Conditioning  # P rows, one a prompt
    forwards: int  # noised versions of each image, a forward each
    compared: Compared  # which images the loss must see together
    seed: int  # of the noise in training, a function of it and the row's numbers
    left_out: dict[str, float]  # reason -> share of the rollout's images that are not here

    rows: ClassVar[int] = 0  # a call has a whole micro-batch
    at_once: ClassVar[int] = 0

    @staticmethod
    def from_rollout(
        rollout: Rollout,
        signal: Tensor,
        keep: Tensor,
        *,
        forwards: int,
        compared: Compared,
        pull_on: KLOnOptions | None = None,
    ) -> "Endpoints":
        """Gather this process's images that are kept, groups side by side.

        Args:
            signal: (G,), of all images of all processes.
            keep: (G,) bool.
            pull_on: which of these images pay a KL penalty; None for all.

        Raises:
            ValueError: groups are compared, and one of them lies on several processes.
        """
        tree = rollout.tree
        leaves = len(tree.leaf)
        keep, group = keep.cpu(), rollout.group.cpu()
        image = (rollout.trees.cpu()[:, None] * leaves + torch.arange(leaves)).flatten()
        rows = keep[image].nonzero().squeeze(1)
        rows = rows[group[image[rows]].argsort(stable=True)]
        image = image[rows]
        if compared == "group" and int(torch.isin(group, group[image])[keep].sum()) != len(image):
            raise ValueError(
                "a group lies on several processes, and its images are compared: the objective "
                "must declare Needs(complete_groups=True)"
            )
        pull = torch.ones(len(keep)) if pull_on is None else kl_weights(rollout, pull_on, keep)
        return Endpoints(
            x0=tree.leaves()[send(rows, tree.x.device)],
            prompt=tree.prompt_of_leaves().cpu()[rows],
            group=group[image],
            image=image,
            reward=rollout.reward.cpu()[image].float(),
            signal=signal.cpu()[image].float(),
            pull=pull[image],
            sigmas=tree.sigmas,
            cond=rollout.cond,
            forwards=forwards,
            compared=compared,
            seed=rollout.seed,
            left_out=_left_out(rollout, keep),
        )

    def __len__(self) -> int:
        return len(self.x0)

    def take(self, rows: Tensor) -> "Endpoints":
        """Return the images of `rows` (n,) long."""
        names = ("prompt", "group", "image", "reward", "signal", "pull")
        numbers = {name: getattr(self, name)[rows] for name in names}
        return replace(self, x0=self.x0[send(rows, self.x0.device)], **numbers)

    def metrics(self) -> Metrics:
        shares = {f"endpoints/{why}": torch.tensor(share) for why, share in self.left_out.items()}
        return shares | {
            "endpoints/images": torch.tensor(float(len(self))),
            "tree/train_forwards": torch.tensor(float(len(self) * self.forwards)),
        }

    def updates(self, count: int) -> list["Endpoints"]:
        """Deal whole groups in turn to `count` parts, each with noise of its own."""
        return [
            replace(self.take((self.group % count == i).nonzero().squeeze(1)), seed=self.seed + i)
            for i in range(count)
        ]

    def units(self) -> list[int]:
        """Return the forwards of what the loss must see together: images, groups, or all."""
        if self.compared == "update":
            return [len(self) * self.forwards] if len(self) else []
        return [count * self.forwards for count in self._sizes()]

    def part(self, first: int, last: int) -> "Endpoints":
        """Return the units from `first` to before `last`, on the latents' device."""
        part = self
        if self.compared != "update":
            sizes = self._sizes()
            start = sum(sizes[:first])
            part = self.take(torch.arange(start, start + sum(sizes[first:last])))
        numbers = ("prompt", "group", "reward", "signal", "pull")
        return replace(part, **{n: send(getattr(part, n), self.x0.device) for n in numbers})

    def _sizes(self) -> list[int]:
        """Return the images of each unit."""
        if self.compared == "image":
            return [1] * len(self)
        return self.group.unique_consecutive(return_counts=True)[1].tolist()


def without_siblings(rollout: Rollout) -> Tensor:
    """Mark images with a reward whose prompt has no other image with one. (G,) bool"""
    return lone(rollout.valid.cpu(), rollout.group.cpu())


def tied(rollout: Rollout) -> Tensor:
    """Mark images with a reward of prompts whose rewards are all equal, or only one. (G,) bool"""
    valid = rollout.valid.cpu()
    equal = torch.zeros_like(valid)
    equal[valid] = undecided(rollout.reward.cpu()[valid].double(), rollout.group.cpu()[valid])
    return equal


def _left_out(rollout: Rollout, keep: Tensor) -> dict[str, float]:
    """Return the shares of images that are not kept, by reason."""
    valid = rollout.valid.cpu()
    alone, same = without_siblings(rollout), tied(rollout)
    reasons = {
        "invalid": ~valid,
        "alone": alone,
        "tied": same & ~alone,
        "unused": valid & ~alone & ~same,
    }
    return {why: (flags & ~keep).double().mean().item() for why, flags in reasons.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """N chains of T Euler steps with all their states, those of a group side by side."""

    x: Tensor  # (N, T+1, *latent), from noise to the clean latent, in the dtype of the rollout
    sigmas: Tensor  # (T+1,), falling
    prompt: Tensor  # (N,) long, index into `cond`
    group: Tensor  # (N,) long, the same numbers on every process
    image: Tensor  # (N,) long, number in the rollout
    forwards: Tensor  # (N,) long, forwards with a graph that the loss takes for each chain
    cond: Conditioning  # P rows, one a prompt
    seed: int  # of random numbers in training, functions of it and `image`
    left_out: dict[str, float]  # reason -> share of the rollout's images that are not here
    at_once: int = 1  # forwards of a chain in one call of the network

    rows: ClassVar[int] = 0  # of a call: those of a micro-batch's chains

    @staticmethod
    def from_rollout(rollout: Rollout) -> "Trajectories":
        """Gather this process's chains that have a reward, with one forward each.

        The plans of objectives on paths have no noise and no branch (`config.validate`): the
        gradient goes back along one chain, and each step must be the network's own.
        """
        tree = rollout.tree
        valid = rollout.valid.cpu()
        local = rollout.trees.cpu()
        rows = valid[local].nonzero().squeeze(1)
        rows = rows[rollout.group.cpu()[local[rows]].argsort(stable=True)]
        image, device = local[rows], tree.x.device
        return Trajectories(
            x=tree.x[rows.to(device)],
            sigmas=tree.sigmas,
            prompt=tree.prompt[rows.to(device)],
            group=rollout.group.cpu()[image].to(device),
            image=image.to(device),
            forwards=torch.ones(len(rows), dtype=torch.long, device=device),
            cond=rollout.cond,
            seed=rollout.seed,
            left_out={"invalid": (~valid).double().mean().item()},
        )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    @property
    def chains(self) -> Tensor:
        """Every chain once. (N,) long"""
        return torch.arange(len(self), device=self.x.device)

    @property
    def x0(self) -> Tensor:
        """The clean latents. (N, *latent)"""
        return at_least_fp32(self.x[:, -1])

    @property
    def dt(self) -> Tensor:
        """The steps' changes of sigma, negative. (T,)"""
        return at_least_fp32(self.sigmas.diff())

    def sigma(self, step: Tensor) -> Tensor:
        """Return the sigmas of steps (n,) long. (n,)"""
        return at_least_fp32(self.sigmas[step])

    def at(self, row: Tensor, step: Tensor) -> Tensor:
        """Return the states of chains `row` before steps `step`, both (n,) long. (n, *latent)"""
        return at_least_fp32(self.x[row, step])

    def velocity(self, row: Tensor, step: Tensor) -> Tensor:
        """Return each step's velocity from the states before and after it. (n, *latent)"""
        moved = self.at(row, step + 1) - self.at(row, step)
        return moved / self.dt[step].view(-1, *[1] * (moved.ndim - 1))

    def take(self, rows: Tensor) -> "Trajectories":
        """Return the chains of `rows` (n,) long."""
        names = ("x", "prompt", "group", "image", "forwards")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def with_forwards(self, forwards: Tensor | int, at_once: int = 1) -> "Trajectories":
        """Return the same chains for a loss that takes so many forwards of each, (N,) or one.

        at_once: how many of them in one call of the network.
        """
        forwards = torch.zeros_like(self.forwards) + forwards
        return replace(self, forwards=forwards, at_once=at_once)

    def metrics(self) -> Metrics:
        shares = {f"path/{why}": torch.tensor(share) for why, share in self.left_out.items()}
        return shares | {
            "path/chains": torch.tensor(float(len(self))),
            "tree/train_forwards": self.forwards.sum().float(),
        }

    def updates(self, count: int) -> list["Trajectories"]:
        """Deal whole groups in turn to `count` parts."""
        return [self.take((self.group % count == i).nonzero().squeeze(1)) for i in range(count)]

    def units(self) -> list[int]:
        """Return the forwards of each chain."""
        return self.forwards.tolist()

    def part(self, first: int, last: int) -> "Trajectories":
        """Return the chains from `first` to before `last`."""
        return self.take(self.chains[first:last])


def at_least_fp32(values: Tensor) -> Tensor:
    """Widen 16-bit values, which are for storage, not for arithmetic."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
