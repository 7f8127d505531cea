"""A store under a recipe: whether it fits, and which of its groups can teach what."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.backbones.base import Backbone
from flowrl.errors import UserError
from flowrl.offline.format import DTYPES, Group, Store
from flowrl.prompts.records import PromptSampler
from flowrl.scoring.combine import combine
from flowrl.scoring.spec import RewardResult, RewardSpec, trained


def check_store(
    store: Store, backbone: Backbone, specs: Sequence[RewardSpec], *, pipeline: str, family: str
) -> None:
    """Finds before training that a store does not fit. pipeline: its path or name; family: of its
    backbone. Raises UserError for the first reason."""
    about, name = store.about, store.folder
    again = "collect groups with this one, or train the one they are from"
    precision = str(backbone.dtype).removeprefix("torch.")
    # The last part of a path: folders move.
    if about.pipeline.rstrip("/").split("/")[-1] != pipeline.rstrip("/").split("/")[-1]:
        raise UserError(
            f"the pictures in {name} are of the pipeline {about.pipeline!r}, and pipeline.path is "
            f"{pipeline!r}: {again}"
        )
    if about.backbone != family:
        raise UserError(
            f"the pictures in {name} are of a pipeline of the family {about.backbone!r}, and "
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
class Shelf:
    """A store under this recipe's rewards: groups with two rewarded pictures or more.

    scores, applicable, terms: (N, K) in the order of the recipe's rewards, as in `Rollout`, where
    transforms that compare a group compare all its stored pictures; reward, valid: (N,), their
    weighted sum and whether it is known. skipped: how many groups are left out. order: which groups
    when.
    """

    store: Store
    groups: dict[str, Group]
    scores: Tensor
    applicable: Tensor
    terms: Tensor
    reward: Tensor
    valid: Tensor
    order: PromptSampler
    skipped: int
    number: Tensor  # (N,) long, of each picture's group in the store


def shelve(
    store: Store, specs: Sequence[RewardSpec], prompts: int, seed: int, balance: str | None
) -> Shelf:
    """Raises UserError when no group is left."""
    columns = [store.about.names.index(s.name) if s.name in store.about.names else None
               for s in specs]  # fmt: skip
    missing = torch.full((len(store),), torch.nan)
    scores = torch.stack([missing if c is None else store.scores[:, c] for c in columns], 1)
    applicable = scores.isfinite()
    number = torch.zeros(len(store), dtype=torch.long)
    for place, group in enumerate(store.groups):
        rows = torch.tensor(group.pictures)
        number[rows] = place
        for column, spec in enumerate(specs):
            applicable[rows, column] = _fits(spec, group, applicable[rows, column])
    result = RewardResult(scores=scores, valid=scores.isfinite(), applicable=applicable,
                          names=tuple(s.name for s in specs))  # fmt: skip
    reward, valid, terms = combine(specs, result, number)
    groups = {g.key: _rewarded(g, valid) for g in store.groups}
    groups = {key: group for key, group in groups.items() if len(group.pictures) >= 2}
    if not groups:
        raise UserError(
            f"no group in {store.folder} has two pictures with a reward: collect groups of at "
            "least two, with rewards that apply to their prompts"
        )
    # The sampler of prompts deals groups: its records are named by their groups here.
    records = [replace(group.record, uid=key) for key, group in groups.items()]
    return Shelf(
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


def _fits(spec: RewardSpec, group: Group, known: Tensor) -> Tensor:
    """Whether a reward speaks of the pictures of a group: where it gave a score, and where it would
    give one now, but that is missing; nowhere if the recipe keeps it to other prompts."""
    metadata = group.record.metadata
    if not spec.meant_for(metadata):
        return torch.zeros_like(known)
    return known | (not known.all() and spec.applies(group.record.text, metadata))


def _rewarded(group: Group, valid: Tensor) -> Group:
    return replace(group, pictures=tuple(p for p in group.pictures if valid[p]))
