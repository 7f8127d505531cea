"""Clean latents to learn from: the unit of objectives on the forward process."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.functional.groups import lone, undecided
from flowrl.reference_cache import ReferenceErrors
from flowrl.trajectory import Conditioning, Metrics, Rollout, Tree

Compared = Literal["image", "group", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """N images with what they are worth, those of a group side by side.

    x0: (N, *latent) in the dtype they were drawn in; prompt: (N,) long, index into `cond` (P rows);
    group: (N,) long, the same numbers on every process; image: (N,) long, number in the rollout.
    reward: (N,) fp32, the weighted sum, NaN where the objective made do with a part of the scores.
    signal: (N,) fp32, what the objective made of it (a weight, an advantage or a label).
    sigmas: (T+1,), the rollout's own.
    draws: points on the way to noise at which each image is looked at, a forward each.
    compared: what the loss sees together: single images, whole groups, or all of an update.
    seed: of these draws, which are functions of it and of the row's numbers: how rows are cut
    into batches does not change them.
    left_out: shares of all images of the rollout that nobody learns from, by reason.
    known: as in `Rollout`; then draws come from its fixed pool.
    """

    x0: Tensor
    prompt: Tensor
    group: Tensor
    image: Tensor
    reward: Tensor
    signal: Tensor
    sigmas: Tensor
    cond: Conditioning
    draws: int
    compared: Compared
    seed: int
    left_out: dict[str, float]
    known: ReferenceErrors | None = None

    def __len__(self) -> int:
        return len(self.x0)

    def take(self, rows: Tensor) -> "Endpoints":
        """The images of `rows` (n,) long."""
        names = ("x0", "prompt", "group", "image", "reward", "signal")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def metrics(self) -> Metrics:
        shares = {f"endpoints/{why}": torch.tensor(share) for why, share in self.left_out.items()}
        return shares | {"endpoints/images": torch.tensor(float(len(self)))}

    def updates(self, count: int) -> list["Endpoints"]:
        """`count` parts with whole groups each, dealt in turn, with draws of their own."""
        return [
            replace(self.take((self.group % count == i).nonzero().squeeze(1)), seed=self.seed + i)
            for i in range(count)
        ]

    def chunks(self, size: int) -> Iterator["Endpoints"]:
        """Consecutive parts of at most `size` forwards; what is compared is never cut, even if
        it is larger."""
        rows = torch.arange(len(self), device=self.x0.device)
        for part in rows.split(self._lengths(size)) if len(self) else ():
            yield self.take(part)

    def _lengths(self, size: int) -> list[int]:
        """How many images each part has."""
        most = max(1, size // self.draws)
        if self.compared == "update":
            return [len(self)]
        if self.compared == "image":
            return [min(most, len(self) - start) for start in range(0, len(self), most)]
        lengths: list[int] = []
        for count in self.group.unique_consecutive(return_counts=True)[1].tolist():
            if lengths and lengths[-1] + count <= most:
                lengths[-1] += count
            else:
                lengths.append(count)
        return lengths


def endpoints(
    rollout: Rollout, signal: Tensor, keep: Tensor, *, draws: int, compared: Compared
) -> Endpoints:
    """This process's images of a rollout that are kept, groups side by side.

    signal: (G,) of all images of all processes; keep: (G,) bool. Raises ValueError when groups
    are compared and one of them is not on one process, which `Needs.complete_groups` prevents.
    """
    tree = rollout.tree
    leaves = len(tree.leaf)
    keep, group = keep.cpu(), rollout.group.cpu()
    image = (rollout.trees.cpu()[:, None] * leaves + torch.arange(leaves)).flatten()
    rows = keep[image].nonzero().squeeze(1)
    rows = rows[group[image[rows]].argsort(stable=True)]
    image, device = image[rows], tree.x.device
    if compared == "group" and int(torch.isin(group, group[image])[keep].sum()) != len(image):
        raise ValueError(
            "a group lies on several processes, and its images are compared: the objective must "
            "declare Needs(complete_groups=True)"
        )
    return Endpoints(
        x0=tree.leaves()[rows.to(device)],
        prompt=tree.prompt_of_leaves()[rows.to(device)],
        group=group[image].to(device),
        image=image.to(device),
        reward=rollout.reward.cpu()[image].float().to(device),
        signal=signal.cpu()[image].float().to(device),
        sigmas=tree.sigmas,
        cond=rollout.cond,
        draws=draws,
        compared=compared,
        seed=rollout.seed,
        left_out=_left_out(rollout, keep),
        known=rollout.known,
    )


def _left_out(rollout: Rollout, keep: Tensor) -> dict[str, float]:
    """Shares of all images: without a reward, the only one of its prompt with one, of a prompt
    whose rewards are all equal, or not needed by the objective."""
    valid = rollout.valid.cpu()
    lone, same = alone(rollout), tied(rollout)
    reasons = {
        "invalid": ~valid,
        "alone": lone,
        "tied": same & ~lone,
        "unused": valid & ~lone & ~same,
    }
    return {why: (flags & ~keep).double().mean().item() for why, flags in reasons.items()}


def alone(rollout: Rollout) -> Tensor:
    """(G,) bool: images with a reward whose prompt has no other one."""
    return lone(rollout.valid.cpu(), rollout.group.cpu())


def tied(rollout: Rollout) -> Tensor:
    """(G,) bool: images with a reward of prompts whose known rewards are all equal, or one."""
    valid = rollout.valid.cpu()
    found = torch.zeros_like(valid)
    found[valid] = undecided(rollout.reward.cpu()[valid].double(), rollout.group.cpu()[valid])
    return found


# --- Chains without noise to learn from --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """N chains of T Euler steps with all their states, those of a group side by side.

    x: (N, T+1, *latent) in the dtype they were drawn in, from noise to the clean latent; sigmas:
    (T+1,), falling. prompt: (N,) long, index into `cond` (P rows); group: (N,) long, the same
    numbers on every process; image: (N,) long, number in the rollout.
    forwards: (N,) long, velocities with a graph that one loss needs of each chain.
    seed: of what is drawn in learning, a function of it and of `image`: how chains are cut into
    batches does not change it.
    left_out: shares of the rollout's images that are not here, by reason.
    """

    x: Tensor
    sigmas: Tensor
    prompt: Tensor
    group: Tensor
    image: Tensor
    forwards: Tensor
    cond: Conditioning
    seed: int
    left_out: dict[str, float]

    def __len__(self) -> int:
        return len(self.x)

    @property
    def steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    @property
    def rows(self) -> Tensor:
        """(N,) long: every chain once."""
        return torch.arange(len(self), device=self.x.device)

    @property
    def x0(self) -> Tensor:
        """(N, *latent), the clean latents."""
        return widened(self.x[:, -1])

    @property
    def dt(self) -> Tensor:
        """(T,), negative: what the steps add to sigma."""
        return widened(self.sigmas.diff())

    def sigma(self, step: Tensor) -> Tensor:
        """Of step numbers (n,) long."""
        return widened(self.sigmas[step])

    def at(self, row: Tensor, step: Tensor) -> Tensor:
        """States (n, *latent) of chains `row` before steps `step`, both (n,) long."""
        return widened(self.x[row, step])

    def velocity(self, row: Tensor, step: Tensor) -> Tensor:
        """What moved the chains, (n, *latent): difference of two states over that of the sigmas."""
        moved = self.at(row, step + 1) - self.at(row, step)
        return moved / self.dt[step].view(-1, *[1] * (moved.ndim - 1))

    def take(self, rows: Tensor) -> "Trajectories":
        """The chains of `rows` (n,) long."""
        names = ("x", "prompt", "group", "image", "forwards")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def costing(self, forwards: Tensor | int) -> "Trajectories":
        """The same chains, for a loss that needs so many forwards of each; (N,) or one number."""
        return replace(self, forwards=torch.zeros_like(self.forwards) + forwards)

    def metrics(self) -> Metrics:
        shares = {f"path/{why}": torch.tensor(share) for why, share in self.left_out.items()}
        return shares | {
            "path/chains": torch.tensor(float(len(self))),
            "tree/train_forwards": self.forwards.sum().float(),
        }

    def updates(self, count: int) -> list["Trajectories"]:
        """`count` parts with whole groups each, dealt in turn."""
        return [self.take((self.group % count == i).nonzero().squeeze(1)) for i in range(count)]

    def chunks(self, size: int) -> Iterator["Trajectories"]:
        """Consecutive chains of at most `size` forwards together; one that needs more, alone."""
        start = cost = 0
        for row, forwards in enumerate(self.forwards.tolist()):
            if row > start and cost + forwards > size:
                yield self.take(self.rows[start:row])
                start, cost = row, 0
            cost += forwards
        if len(self) > start:
            yield self.take(self.rows[start:])


def widened(values: Tensor) -> Tensor:
    """At least fp32: 16 bits are for storage, not for arithmetic."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def paths(rollout: Rollout) -> Trajectories:
    """This process's chains of a rollout, a forward each; those without a reward are left out.

    Raises UserError when trees branch, skip states or hold noise: a gradient goes back along one
    chain, and each step must be the network's own.
    """
    tree = rollout.tree
    _check_chains(tree)
    valid = rollout.valid.cpu()
    own = rollout.trees.cpu()
    rows = valid[own].nonzero().squeeze(1)
    rows = rows[rollout.group.cpu()[own[rows]].argsort(stable=True)]
    image, device = own[rows], tree.x.device
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


def _check_chains(tree: Tree) -> None:
    steps = len(tree.sigmas) - 1
    whole = torch.arange(steps + 1)
    straight = tree.step.cpu().tolist() == whole.tolist()
    if straight and tree.parent.cpu().tolist() == (whole - 1).tolist() and not len(tree.noisy):
        return
    raise UserError(
        f"this objective goes back along chains of {steps} steps without noise, but the rollout's "
        f"trees have {len(tree.leaf)} images, {len(tree.step)} states and {len(tree.noisy)} "
        "steps with noise each: set rollout.tree to {kind: ode}"
    )
