"""Where pictures are looked at in training: times and noise, and the velocity's errors there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.functional.noise import keyed_noise, keyed_uniform, noise_seed
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.forward import noised, velocity_error, velocity_target
from flowrl.trajectory import Conditioning

# (u (N, D) uniform in [0, 1), the rollout's sigmas (T+1,)) -> training sigmas (N, D)
TimeSampler = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """N pictures at D points each on their way to noise, picture by picture.

    x, x0, target: (N * D, *latent) fp32, target the velocity noise - x0; sigma: (N * D,) fp32;
    cond: N * D rows; place: (N, D) long, each point's number in the pool of a store, or its own.
    """

    x: Tensor
    x0: Tensor
    target: Tensor
    sigma: Tensor
    cond: Conditioning
    place: Tensor

    @property
    def draws(self) -> int:
        return self.place.shape[1]

    def velocity(self, field: VelocityField) -> Tensor:
        """(N * D, *latent) fp32, with the field's graph if it has one."""
        return field(self.x, self.sigma, self.cond).float()

    def error(self, v: Tensor) -> Tensor:
        """(N, D): mean over the latent of the squared distance of velocities and target."""
        return self.by_picture(velocity_error(v, self.target))

    def distance(self, v: Tensor, field: VelocityField) -> Tensor:
        """Mean squared distance of velocities (N * D, *latent) from those of another field. ()"""
        with torch.no_grad():
            other = self.velocity(field)
        return velocity_kl(v, other).mean()

    def by_picture(self, rows: Tensor) -> Tensor:
        """(N * D,) -> (N, D)."""
        return rows.view(-1, self.draws)

    def take(self, pictures: Tensor) -> "Points":
        """The points of some pictures, (n,) long."""
        places = torch.arange(self.draws, device=pictures.device)
        rows = (pictures[:, None] * self.draws + places).flatten()
        tensors = {name: getattr(self, name)[rows] for name in ("x", "x0", "target", "sigma")}
        return Points(**tensors, cond=self.cond.take(rows), place=self.place[pictures])


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """`count` points for each picture.

    times: from uniform numbers to sigmas. share: pictures of a "group" get the same times and
    noise, so that what is common to them cancels when they are compared; or each "image" its own.
    """

    times: TimeSampler
    count: int = 1
    share: Literal["group", "image"] = "group"

    def __call__(self, batch: Endpoints) -> Points:
        """A function of the batch's seed and its rows' numbers alone.

        Where the reference's errors are kept, points are chosen from a pool of each picture or
        group that never changes.
        """
        pool, seed = (self.count, batch.seed) if batch.known is None else (batch.known.pool, 0)
        name, row = self._owner(batch).unique(return_inverse=True)
        names = name.tolist()
        place = torch.arange(self.count).expand(len(names), -1)
        if batch.known is not None:
            lots = keyed_uniform([self._seed(batch.seed, n, 0, "place") for n in names], (pool,))
            place = lots.argsort(1)[:, : self.count]
        u = keyed_uniform([self._seed(seed, n, 0, "time") for n in names], (pool,))
        latent, device = batch.x0.shape[1:], batch.x0.device
        sigmas = self.times(u.to(device), batch.sigmas.float())
        sigma = sigmas.gather(1, place.to(device))[row].flatten()
        noise = keyed_noise(
            [
                self._seed(seed, n, p, "noise")
                for n, places in zip(names, place.tolist(), strict=True)
                for p in places
            ],
            latent,
            device=device,
        )
        noise = noise.view(len(names), self.count, *latent)[row].flatten(0, 1)
        x0 = batch.x0.float().repeat_interleave(self.count, 0)
        return Points(
            x=noised(x0, noise, sigma),
            x0=x0,
            target=velocity_target(x0, noise),
            sigma=sigma,
            cond=batch.cond.take(batch.prompt.repeat_interleave(self.count)),
            place=place[row.cpu()].to(device),
        )

    def _owner(self, batch: Endpoints) -> Tensor:
        """(N,) long: whose points a picture gets, by a number that outlasts the batch."""
        if batch.known is None:
            return (batch.group if self.share == "group" else batch.image).cpu()
        of = batch.known.group if self.share == "group" else batch.known.picture
        return of[batch.image.cpu()]

    def _seed(self, seed: int, owner: int, place: int, role: str) -> int:
        return noise_seed(
            seed=seed, iteration=0, prompt=self.share, root=owner, step=place, role=role
        )
