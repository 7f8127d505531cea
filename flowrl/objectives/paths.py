"""Chains without noise to learn from: the unit of objectives that follow a reward's gradient."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.trajectory import Conditioning, Metrics, Rollout, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """N chains of T Euler steps with all their states, those of a group side by side.

    x: (N, T+1, *latent) in the dtype they were drawn in, from noise to the clean latent; sigmas:
    (T+1,), falling. prompt: (N,) long, index into `cond` (P rows); group: (N,) long, the same
    numbers on every process; image: (N,) long, number in the rollout.
    forwards: (N,) long, velocities with a graph that one loss needs of each chain.
    seed: of what is drawn in learning, a function of it and of `image`: how chains are cut into
    batches does not change it.
    left_out: shares of the rollout's pictures that are not here, by reason.
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

    def take(self, rows: Tensor) -> "Paths":
        """The chains of `rows` (n,) long."""
        names = ("x", "prompt", "group", "image", "forwards")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def costing(self, forwards: Tensor | int) -> "Paths":
        """The same chains, for a loss that needs so many forwards of each; (N,) or one number."""
        return replace(self, forwards=torch.zeros_like(self.forwards) + forwards)

    def metrics(self) -> Metrics:
        shares = {f"path/{why}": torch.tensor(share) for why, share in self.left_out.items()}
        return shares | {
            "path/chains": torch.tensor(float(len(self))),
            "tree/train_forwards": self.forwards.sum().float(),
        }

    def updates(self, count: int) -> list["Paths"]:
        """`count` parts with whole groups each, dealt in turn."""
        return [self.take((self.group % count == i).nonzero().squeeze(1)) for i in range(count)]

    def chunks(self, size: int) -> Iterator["Paths"]:
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


def paths(rollout: Rollout) -> Paths:
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
    return Paths(
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
        f"trees have {len(tree.leaf)} pictures, {len(tree.step)} states and {len(tree.noisy)} "
        "steps with noise each: set rollout.tree to {kind: ode}"
    )
