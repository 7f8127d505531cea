"""Filling a store: a sampler's iterations become shards, one after the other."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.offline.format import (
    ABOUT,
    PAIRS,
    About,
    Picture,
    Store,
    append,
    create,
    finished_shards,
)
from flowrl.offline.store_index import open_store
from flowrl.sampling.rollout import Stopwatch, occurrences
from flowrl.sampling.source import Sampler
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime


def fill(
    folder: Path,
    about: About,
    sampler: Sampler,
    *,
    shards: int,
    first: int = 0,
    watch: Stopwatch | None = None,
    advance: Callable[[Rollout], None] = lambda rollout: None,
) -> Store:
    """Make those of the shards 0, 1, ... that are missing, from the sampler's iterations.

    Shard k is iteration `first` + k, whatever was made before, by however many processes. All of
    them call this; the main one writes. advance: is told of each new shard.
    """
    runtime = sampler.stage.runtime
    if runtime.is_main:
        create(folder, about)
    runtime.wait()
    missing = sorted(set(range(shards)) - set(finished_shards(folder)))
    runtime.wait()  # nobody writes before all have looked
    for shard in missing:
        iteration = first + shard
        rollout = sampler.collect(iteration, watch or Stopwatch())
        x0 = gather_latents(rollout.tree.leaves(), runtime)
        if runtime.is_main:
            pictures = list(_pictures(rollout, sampler, iteration, shard))
            append(folder, shard, x0, pictures)
        advance(rollout)
    runtime.wait()
    return open_store(folder)


def gather_latents(x0: Tensor, runtime: Runtime) -> Tensor:
    """The latents of all processes, in order; as bytes, since back ends differ in formats."""
    if runtime.world_size == 1:
        return x0
    raw = x0.contiguous().view(torch.uint8)
    return runtime.gather(raw).view(x0.dtype)


def _pictures(rollout: Rollout, sampler: Sampler, iteration: int, shard: int) -> Iterator[Picture]:
    """The rows of all processes' pictures; groups are numbered through the whole store."""
    records = sampler.prompts.at(iteration)
    before = occurrences(records)
    groups, leaves = rollout.group.tolist(), len(rollout.tree.leaf)
    seen: list[int] = [0] * len(records)
    size = len(groups) // len(records)
    scores, valid = rollout.scores.tolist(), rollout.valid.tolist()
    trees = size // leaves
    # Places of a group's trees among all that were drawn of it, and how many those were.
    chosen = torch.arange(trees).expand(len(records), -1)
    if rollout.explored is not None:
        chosen, trees = rollout.explored.chosen, rollout.explored.proxy.shape[1]
    for i, group in enumerate(groups):
        yield Picture(
            record=records[group],
            group=shard * len(records) + group,
            image=seen[group],
            valid=valid[i],
            scores=scores[i],
            seed=sampler.seed,
            iteration=iteration,
            root=before[group] * trees + int(chosen[group, seen[group] // leaves]),
        )
        seen[group] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Draws a store anew with the policy as it is: as many groups, from prompts not yet drawn.

    like: the store that is replaced; about: what is said of the new ones; every: iterations
    between them, so that each has iterations of the sampler for itself. Raises UserError when
    the store holds pictures that no policy drew.
    """

    like: Store
    about: About
    sampler: Sampler
    every: int

    def __post_init__(self) -> None:
        if PAIRS in self.like.about.recipe:
            raise UserError(
                f"{self.like.folder} holds pairs of given pictures, which the policy cannot draw "
                "anew: set rollout.store.refresh_every to null"
            )

    @property
    def shards(self) -> int:
        return -(-len(self.like.groups) // self.sampler.prompts.per_iteration)

    def __call__(self, iteration: int, folder: Path) -> Store:
        about = replace(self.about, lora={"iteration": iteration})
        runtime = self.sampler.stage.runtime
        # Shards that were begun before the recipe changed do not belong to this policy.
        if runtime.is_main and (folder / ABOUT).exists():
            if About.read(folder).text() != about.text():
                shutil.rmtree(folder)
        first = iteration // self.every * self.shards
        return fill(folder, about, self.sampler, shards=self.shards, first=first)

    def finished(self, folder: Path) -> bool:
        return set(finished_shards(folder)) >= set(range(self.shards))
