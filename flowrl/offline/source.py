"""A source of rollouts that reads groups of an offline data set in place of new images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.functional.noise import keyed_uniform, noise_seed
from flowrl.offline.format import DTYPES, OfflineDataset, StoredGroup
from flowrl.prompts.records import PromptSampler
from flowrl.sampling.rollout import Timer, learning_seed, occurrences
from flowrl.scoring.combine import combine, train_weights
from flowrl.scoring.spec import RewardResult, RewardSpec, trained
from flowrl.trajectory import Rollout, Tree
from flowrl.utils.distributed import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroups:
    """A source of rollouts that reads `group_size` images of each group of an iteration.

    Groups come in seeded shuffles, one an epoch; a group with fewer images gives all it has. The
    images depend on seed, iteration and data set, not on the number of processes.

    Raises UserError when there are more processes than groups in an iteration.
    """

    sampler: "GroupSampler"
    backbone: PipelineBackbone
    text_cache: TextCache
    specs: Sequence[RewardSpec]
    runtime: Runtime
    group_size: int
    seed: int

    def __post_init__(self) -> None:
        prompts, processes = self.sampler.order.per_iteration, self.runtime.world_size
        if prompts < processes:
            raise UserError(
                f"rollout.prompts_per_iteration is {prompts}, too few for {processes} processes, "
                "each of which takes whole groups: raise it, or start fewer processes"
            )

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Return this process's groups of an iteration, with the scores of all groups."""
        sampler = self.sampler
        records = sampler.order.at(iteration)
        groups = [
            _pick(sampler.groups[record.uid], self.group_size, self.seed, iteration, turn)
            for record, turn in zip(records, occurrences(records), strict=True)
        ]
        group = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
        images = torch.cat(groups)
        share = self.runtime.local_rows(len(groups))  # this process's groups
        trees = torch.isin(group, share).nonzero().squeeze(1)
        prompts = [records[i] for i in share.tolist()]
        tree = single_node_trees(
            sampler.dataset.latents(images[trees]).to(self.backbone.device),
            (group[trees] - share[0]).to(self.backbone.device),
            torch.tensor(sampler.dataset.metadata.sigmas, device=self.backbone.device),
        )
        rollout = Rollout(
            tree=tree,
            cond=self.text_cache(prompts),
            prompts=tuple(record.text for record in prompts),
            metadata=tuple(record.metadata for record in prompts),
            images=torch.empty(0, 3, *self.backbone.image_size()),
            trees=trees,
            scores=sampler.scores[images],
            applicable=sampler.applicable[images],
            names=tuple(spec.name for spec in self.specs),
            weights=torch.tensor(train_weights(self.specs)),
            reward=sampler.reward[images],
            valid=sampler.valid[images],
            group=group,
            log_prob=torch.zeros(len(images), 1),
            seed=learning_seed(self.seed, iteration),
        )
        timer.lap("time/rollout")
        return rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler:
    """A data set under this recipe's K rewards: groups with at least two rewarded images."""

    dataset: OfflineDataset
    groups: dict[str, StoredGroup]  # by key
    scores: Tensor  # (N, K) fp32
    applicable: Tensor  # (N, K) bool
    reward: Tensor  # (N,) fp32, weighted sum
    valid: Tensor  # (N,) bool, whether that is known
    order: PromptSampler  # which groups an iteration gets
    skipped: int  # groups that are left out


def filter_groups(
    dataset: OfflineDataset,
    specs: Sequence[RewardSpec],
    prompts: int,
    seed: int,
    *,
    balance: str | None,
    weights: Mapping[str, int] | None,
) -> GroupSampler:
    """Keep the groups with two rewarded images.

    Raises UserError when none is left, and for a trained reward that was not scored.
    """
    for spec in trained(specs):
        if spec.name not in dataset.metadata.names:
            raise UserError(
                f"{dataset.folder} has no scores of the reward {spec.name!r}, only of "
                f"{', '.join(dataset.metadata.names)}: leave it out, or collect with it"
            )
    stored = dict(zip(dataset.metadata.names, dataset.scores.unbind(1), strict=True))
    missing = torch.full((len(dataset),), torch.nan)
    scores = torch.stack([stored.get(spec.name, missing) for spec in specs], 1)
    applicable = scores.isfinite()
    for group in dataset.groups:
        rows = torch.tensor(group.images)
        for column, spec in enumerate(specs):
            # A reward applies where it gave a score, or would now give one.
            text, metadata = group.record.text, group.record.metadata
            if any(metadata.get(key) not in values for key, values in spec.applies_to.items()):
                applicable[rows, column] = False
            elif not applicable[rows, column].all() and spec.applies(text, metadata):
                applicable[rows, column] = True
    result = RewardResult(scores=scores, valid=scores.isfinite(), applicable=applicable,
                          names=tuple(s.name for s in specs))  # fmt: skip
    reward, valid = combine(specs, result)
    rewarded = (
        replace(group, images=tuple(i for i in group.images if valid[i]))
        for group in dataset.groups
    )
    groups = {group.key: group for group in rewarded if len(group.images) >= 2}
    if not groups:
        raise UserError(
            f"no group in {dataset.folder} has two images with a reward: collect groups of at "
            "least two, with rewards that apply to their prompts"
        )
    # The prompt sampler chooses groups here: its records have their groups' keys as uid.
    records = [replace(group.record, uid=key) for key, group in groups.items()]
    stored = {str(record.metadata.get(balance)) for record in records}  # not of every kind
    weights = {kind: n for kind, n in (weights or {}).items() if kind in stored}
    return GroupSampler(
        dataset=dataset, groups=groups, scores=scores, applicable=applicable,
        reward=reward, valid=valid, skipped=len(dataset.groups) - len(groups),
        order=PromptSampler(records, prompts, seed, balance=balance, weights=weights),
    )  # fmt: skip


def _pick(group: StoredGroup, count: int, seed: int, iteration: int, turn: int) -> Tensor:
    """Return `count` of a group's images, (n,) long ascending, without repetition.

    turn: how often the group occurred before in this iteration.
    """
    key = noise_seed(
        seed=seed, iteration=iteration, prompt=group.key, root=turn, step=0, role="pick"
    )
    order = keyed_uniform([key], (len(group.images),))[0].argsort()
    return torch.tensor(group.images)[order[:count].sort().values]


def single_node_trees(x0: Tensor, prompt: Tensor, sigmas: Tensor) -> Tree:
    """Return R trees of one node each: clean latents without the steps that led to them.

    Args:
        x0: (R, *latent)
        prompt: (R,) long
        sigmas: (T+1,), of the rollout that generated them
    """
    rows, latent, device = len(x0), x0.shape[1:], x0.device

    def index(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.long)

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


def check_dataset(
    dataset: OfflineDataset,
    backbone: PipelineBackbone,
    *,
    pipeline: str,
    family: str,
) -> None:
    """Raise UserError, before training, for the first reason why a data set does not fit.

    pipeline, family: the recipe's pipeline.path, and the class of the pipeline there.
    """
    metadata, name = dataset.metadata, dataset.folder
    stored, wanted = (p.rstrip("/").split("/")[-1] for p in (metadata.pipeline, pipeline))
    same_name = stored == wanted  # folders move
    before, now = (metadata.backbone, family) if same_name else (metadata.pipeline, pipeline)
    if before != now:
        raise UserError(
            f"the images in {name} were made with pipeline.path {before!r}, and this recipe has "
            f"{now!r}: collect groups with this pipeline, or train the other one"
        )
    shape = list(backbone.latent_shape())
    if metadata.latent_shape != shape:
        raise UserError(
            f"the latents in {name} have shape {metadata.latent_shape}, and this pipeline makes "
            f"{shape}: set pipeline.height and pipeline.width as they were when it was collected"
        )
    if DTYPES[metadata.dtype].itemsize < backbone.dtype.itemsize:
        precision = str(backbone.dtype).removeprefix("torch.")
        raise UserError(
            f"the latents in {name} are {metadata.dtype}, and this pipeline computes in "
            f"{precision}: set pipeline.dtype as it was when it was collected, or collect anew"
        )
