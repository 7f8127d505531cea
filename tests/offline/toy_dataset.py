"""A store whose latents tell their numbers, and a source that reads it without a network."""

from dataclasses import dataclass

import torch

from flowrl.backbones.text_cache import TextCache
from flowrl.offline.format import (
    DatasetMetadata,
    append_shard,
    create_dataset,
    open_dataset,
)
from flowrl.offline.source import StoredGroups, filter_groups
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import Timer
from flowrl.scoring.spec import RewardSpec
from flowrl.trajectory import Conditioning
from flowrl.utils.distributed import Runtime

SHAPE = (2, 2, 2)
GROUPS, SIZE, SHARD = 7, 6, 2


class Backbone:
    """Text becomes its length; nothing else is asked of it."""

    pipeline = None
    dtype, device = torch.float32, torch.device("cpu")

    def encode(self, prompts, negatives):
        return Conditioning(tensors={"length": torch.tensor([len(p) for p in prompts])})

    def latent_shape(self):
        return SHAPE

    def image_size(self):
        return 16, 24


@dataclass
class Process:
    """One of several, as far as sharing goes."""

    world_size: int = 1
    rank: int = 0
    local_rows = Runtime.local_rows

    @property
    def is_main(self):
        return self.rank == 0

    def wait(self):
        pass


def reward(images, prompts, metadata):
    raise AssertionError("a stored image is not judged again")


def spec(name="a", **options):
    return RewardSpec(name=name, reward=reward, **options)


class OnlyRound:
    def applies(self, prompt, metadata):
        return metadata["kind"] == "round"

    __call__ = staticmethod(reward)


def write(folder, scores, *, first=0.0, names=("a", "b")):
    """Groups of SIZE, SHARD of them in a shard; latent i is filled with `first` + i."""
    create_dataset(
        folder,
        DatasetMetadata(
            pipeline="models/tiny",
            backbone="sd3",
            latent_shape=list(SHAPE),
            dtype="float32",
            sigmas=torch.linspace(1, 0, 6).sqrt().tolist(),
            rewards=[{"name": n, "version": None, "weight": 1.0} for n in names],
            recipe={},
        ),
    )
    for shard, start in enumerate(range(0, GROUPS, SHARD)):
        numbers = range(start * SIZE, min(start + SHARD, GROUPS) * SIZE)
        x0 = first + torch.tensor([*numbers]).float().view(-1, 1, 1, 1).expand(-1, *SHAPE)
        groups = [i // SIZE for i in numbers]
        append_shard(folder, shard, x0, scores[[*numbers]], [record(g) for g in groups], groups)
    return open_dataset(folder)


def record(group):
    kind = "round" if group % 2 else "square"
    return PromptRecord(uid=f"u{group}", text="x" * (group + 1), metadata={"kind": kind})


def plain_scores():
    number = torch.arange(GROUPS * SIZE).float()
    return torch.stack([number / 100, -number], 1)


def source(
    store, *, process=None, specs=None, prompts=3, group_size=4, seed=0, balance=None, weights=None
):
    backbone, specs = Backbone(), specs or [spec()]
    groups = filter_groups(store, specs, prompts, seed, balance=balance, weights=weights)
    return StoredGroups(
        groups,
        backbone=backbone,
        text_cache=TextCache(backbone),
        specs=specs,
        runtime=process or Process(),
        group_size=group_size,
        seed=seed,
    )


def read(groups, iteration):
    return groups.collect(iteration, Timer())


def numbers(rollout):
    """Of the images in the store, as their latents tell."""
    return rollout.tree.leaves()[:, 0, 0, 0].long()
