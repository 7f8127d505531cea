"""Rollouts that are read: groups of a store in place of new images."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.backbones.base import Backbone
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.offline.format import DTYPES, OfflineDataset, StoredGroup, open_store
from flowrl.prompts.records import PromptSampler
from flowrl.reference_cache import ReferenceErrors
from flowrl.sampling.rollout import Stopwatch, occurrences
from flowrl.sampling.source import learning_seed
from flowrl.scoring.combine import combine, train_weights
from flowrl.scoring.spec import RewardResult, RewardSpec, trained
from flowrl.trajectory import Rollout, Tree
from flowrl.utils.distributed import Runtime

# --- A store under a recipe: whether it fits, and which of its groups can teach what -----------


def check_store(
    store: OfflineDataset,
    backbone: Backbone,
    specs: Sequence[RewardSpec],
    *,
    pipeline: str,
    family: str,
) -> None:
    """Finds before training that a store does not fit. pipeline: its path or name; family: of its
    backbone. Raises UserError for the first reason."""
    about, name = store.about, store.folder
    again = "collect groups with this one, or train the one they are from"
    precision = str(backbone.dtype).removeprefix("torch.")
    # The last part of a path: folders move.
    if about.pipeline.rstrip("/").split("/")[-1] != pipeline.rstrip("/").split("/")[-1]:
        raise UserError(
            f"the images in {name} are of the pipeline {about.pipeline!r}, and pipeline.path is "
            f"{pipeline!r}: {again}"
        )
    if about.backbone != family:
        raise UserError(
            f"the images in {name} are of a pipeline of the family {about.backbone!r}, and "
            f"pipeline.backbone is {family!r}: {again}"
        )
    shape = list(backbone.latent_shape())
    if about.latent_shape != shape:
        raise UserError(
            f"the latents in {name} have shape {about.latent_shape}, and this pipeline draws "
            f"{shape}: set pipeline.height and pipeline.width as they were when it was collected"
        )
    if DTYPES[about.dtype].itemsize < backbone.dtype.itemsize:
        raise UserError(
            f"the latents in {name} are {about.dtype}, and this pipeline computes in {precision}: "
            "set pipeline.dtype as it was when it was collected, or collect anew"
        )
    for spec in trained(specs):
        if spec.name not in about.names:
            raise UserError(
                f"{name} has no scores of the reward {spec.name!r}, only of "
                f"{', '.join(about.names)}: leave it out, or collect the groups with it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler:
    """A store under this recipe's rewards: groups with two rewarded images or more.

    scores, applicable, terms: (N, K) in the order of the recipe's rewards, as in `Rollout`, where
    transforms that compare a group compare all its stored images; reward, valid: (N,), their
    weighted sum and whether it is known. skipped: how many groups are left out. order: which groups
    when.
    """

    store: OfflineDataset
    groups: dict[str, StoredGroup]
    scores: Tensor
    applicable: Tensor
    terms: Tensor
    reward: Tensor
    valid: Tensor
    order: PromptSampler
    skipped: int
    number: Tensor  # (N,) long, of each image's group in the store


def shelve(
    store: OfflineDataset, specs: Sequence[RewardSpec], prompts: int, seed: int, balance: str | None
) -> GroupSampler:
    """Raises UserError when no group is left."""
    columns = [store.about.names.index(s.name) if s.name in store.about.names else None
               for s in specs]  # fmt: skip
    missing = torch.full((len(store),), torch.nan)
    scores = torch.stack([missing if c is None else store.scores[:, c] for c in columns], 1)
    applicable = scores.isfinite()
    number = torch.zeros(len(store), dtype=torch.long)
    for place, group in enumerate(store.groups):
        rows = torch.tensor(group.images)
        number[rows] = place
        for column, spec in enumerate(specs):
            applicable[rows, column] = _fits(spec, group, applicable[rows, column])
    result = RewardResult(scores=scores, valid=scores.isfinite(), applicable=applicable,
                          names=tuple(s.name for s in specs))  # fmt: skip
    reward, valid, terms = combine(specs, result, number)
    groups = {g.key: _rewarded(g, valid) for g in store.groups}
    groups = {key: group for key, group in groups.items() if len(group.images) >= 2}
    if not groups:
        raise UserError(
            f"no group in {store.folder} has two images with a reward: collect groups of at "
            "least two, with rewards that apply to their prompts"
        )
    # The sampler of prompts deals groups: its records are named by their groups here.
    records = [replace(group.record, uid=key) for key, group in groups.items()]
    return GroupSampler(
        store=store,
        groups=groups,
        scores=scores,
        applicable=applicable,
        terms=terms,
        reward=reward,
        valid=valid,
        order=PromptSampler(records, prompts, seed, balance=balance),
        skipped=len(store.groups) - len(groups),
        number=number,
    )


def _fits(spec: RewardSpec, group: StoredGroup, known: Tensor) -> Tensor:
    """Whether a reward speaks of the images of a group: where it gave a score, and where it would
    give one now, but that is missing; nowhere if the recipe keeps it to other prompts."""
    metadata = group.record.metadata
    if not spec.meant_for(metadata):
        return torch.zeros_like(known)
    return known | (not known.all() and spec.applies(group.record.text, metadata))


def _rewarded(group: StoredGroup, valid: Tensor) -> StoredGroup:
    return replace(group, images=tuple(p for p in group.images if valid[p]))


# --- Rollouts that are read: groups of a store in place of new images ------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshing:
    """The policy replaces the store every `every` iterations; what it draws lies in `folder`.

    draw: (iteration, folder of the new store) -> it; goes on with one that was begun. finished:
    whether one is whole.
    """

    every: int
    folder: Path
    draw: Callable[[int, Path], OfflineDataset]
    finished: Callable[[Path], bool]

    def path(self, iteration: int) -> Path:
        return self.folder / f"step-{iteration:06d}"

    def steps(self) -> list[int]:
        """Iterations with a store, whole or not, ascending."""
        return sorted(int(p.name.removeprefix("step-")) for p in self.folder.glob("step-*"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """The reference's errors at `draws` points of each image, kept in the file `path`.

    key: of everything but the store that decides them: pipeline and how points are drawn.
    """

    draws: int
    path: Path
    key: str


class StoredGroups:
    """A source of rollouts: each iteration `prompts` groups, `group_size` images of each.

    Groups come in seeded shuffles, one an epoch; a group with fewer images gives all it has.
    What is read is a function of seed, iteration and store, not of the number of processes. A
    rollout is a forest of bare roots: clean latents that nothing led to. skipped: groups that are
    never read, since fewer than two of their images have a reward. Raises UserError when the
    store has nothing to give, or when there are more processes than groups in an iteration.
    """

    def __init__(
        self,
        store: OfflineDataset,
        *,
        backbone: Backbone,
        encode: TextCache,
        specs: Sequence[RewardSpec],
        runtime: Runtime,
        prompts: int,
        group_size: int,
        seed: int,
        balance: str | None = None,
        refreshing: Refreshing | None = None,
        caching: Caching | None = None,
    ):
        self.backbone, self.encode, self.specs, self.runtime = backbone, encode, specs, runtime
        self.prompts, self.group_size, self.seed, self.balance = prompts, group_size, seed, balance
        self.refreshing, self.caching = refreshing, caching
        if prompts < runtime.world_size:
            raise UserError(
                f"rollout.prompts is {prompts}, but {runtime.world_size} processes take whole "
                "groups: raise it, or start fewer processes"
            )
        self._started = False
        self._take(store)

    @property
    def skipped(self) -> int:
        return self.shelf.skipped

    def _take(self, store: OfflineDataset) -> None:
        """Read from this store from now on."""
        self.shelf = shelve(store, self.specs, self.prompts, self.seed, self.balance)
        self.known: ReferenceErrors | None = None
        if self.caching is not None:
            key = f"{store.identity} {self.caching.key}"
            self.known = ReferenceErrors.empty(len(store), self.caching.draws, key)
            self.known.load(self.caching.path)

    def keep(self) -> None:
        """The reference's errors, for a later session; all processes call it together."""
        if self.known is not None and self.caching is not None:
            self.known.save(self.caching.path, self.runtime)

    # --- refreshing -----------------------------------------------------------------------------

    def _refresh(self, refreshing: Refreshing, iteration: int) -> None:
        """Have the store of this iteration, drawn now if it is time."""
        if not self._started:
            self._started = True
            self._forget(refreshing, iteration)
            whole = [s for s in refreshing.steps() if refreshing.finished(refreshing.path(s))]
            if whole:
                self._take(open_store(refreshing.path(whole[-1])))
        if iteration and iteration % refreshing.every == 0:
            self._take(refreshing.draw(iteration, refreshing.path(iteration)))

    def _forget(self, refreshing: Refreshing, iteration: int) -> None:
        """Remove what a policy drew that this session, which begins here, does not have: all later
        ones, and earlier ones that were not finished."""
        if self.runtime.is_main:
            for step in refreshing.steps():
                folder = refreshing.path(step)
                if step > iteration or (step < iteration and not refreshing.finished(folder)):
                    shutil.rmtree(folder)
        self.runtime.wait()

    # --- reading --------------------------------------------------------------------------------

    def collect(self, iteration: int, watch: Stopwatch) -> Rollout:
        """This process's groups of an iteration, with the scores of all."""
        if self.refreshing is not None:
            self._refresh(self.refreshing, iteration)
        shelf = self.shelf
        records = shelf.order.at(iteration)
        picked = [
            _pick(shelf.groups[record.uid], self.group_size, self.seed, iteration, turn)
            for record, turn in zip(records, occurrences(records), strict=True)
        ]
        group = torch.arange(len(picked)).repeat_interleave(torch.tensor([len(p) for p in picked]))
        images = torch.cat(picked)
        own = self.runtime.share(len(picked))
        trees = torch.isin(group, own).nonzero().squeeze(1)
        asked = [records[i] for i in own.tolist()]
        tree = bare_roots(
            shelf.store.latents(images[trees]).to(self.backbone.device),
            (group[trees] - own[0]).to(self.backbone.device),
            torch.tensor(shelf.store.about.sigmas, device=self.backbone.device),
        )
        rollout = Rollout(
            tree=tree,
            cond=self.encode(asked),
            prompts=tuple(record.text for record in asked),
            metadata=tuple(record.metadata for record in asked),
            images=torch.empty(0, 3, *self.backbone.image_size()),
            trees=trees,
            scores=shelf.scores[images],
            applicable=shelf.applicable[images],
            terms=shelf.terms[images],
            names=tuple(spec.name for spec in self.specs),
            weights=torch.tensor(train_weights(self.specs)),
            reward=shelf.reward[images],
            valid=shelf.valid[images],
            group=group,
            log_prob=torch.zeros(len(images), 1),
            seed=learning_seed(self.seed, iteration),
        )
        watch.lap("time/rollout")
        if self.known is None:
            return rollout
        return replace(rollout, known=self.known.view(images, shelf.number[images]))


def _pick(group: StoredGroup, count: int, seed: int, iteration: int, turn: int) -> Tensor:
    """`count` of a group's images, (n,) long ascending, none twice; `turn`: how often the group
    stood before in this iteration."""
    key = noise_seed(
        seed=seed, iteration=iteration, prompt=group.key, root=turn, step=0, role="pick"
    )
    order = keyed_uniform([key], (len(group.images),))[0].argsort()
    return torch.tensor(group.images)[order[:count].sort().values]


def bare_roots(x0: Tensor, prompt: Tensor, sigmas: Tensor) -> Tree:
    """R trees of one node each, clean latents x0 (R, *latent) that nothing led to.

    prompt: (R,) long; sigmas: (T+1,), of the rollout that drew them.
    """
    rows, latent, device = len(x0), x0.shape[1:], x0.device

    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Tree(
        x=x0[:, None],
        prompt=prompt,
        log_prob=torch.zeros(rows, 1, device=device),
        mean_old=torch.empty(rows, 0, *latent, device=device),
        step=index(len(sigmas) - 1),
        parent=index(-1),
        move=index(-1),
        g=torch.zeros(1, device=device),
        leaf=index(0),
        noisy=index(),
        edge=index(),
        sigmas=sigmas,
        forwards=0,
    )
