"""What `flowrl collect` does: groups, drawn by a pipeline or given as pairs, into a store."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flowrl.api import try_rewards
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import read_lora
from flowrl.build.build_memory import Texts, needed_texts
from flowrl.build.build_store import about
from flowrl.build.learner import (
    PRECISION,
    Given,
    as_given,
    build_backbone,
    build_learner,
    drawn_prompts,
)
from flowrl.config import Config, load_config
from flowrl.errors import UserError
from flowrl.offline.format import PAIRS, About, Store, create, finished_shards
from flowrl.offline.pairs import REWARD, SHARD, pairs_digest, read_pairs, write_pairs
from flowrl.offline.store_index import open_store
from flowrl.offline.writer import fill
from flowrl.quantization.training import packed_within
from flowrl.sampling.source import Sampler
from flowrl.scoring.spec import Reward, closing
from flowrl.training.checkpoint import CONFIG
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import Steps

NAMED = 5  # lines of a file of pairs that are reported one by one


def collect_groups(
    config: Config,
    folder: Path,
    *,
    groups: int,
    lora: str | None = None,
    pipeline: Any = None,
    rewards: Mapping[str, Reward] | None = None,
) -> list[dict[str, Any]]:
    """Draw and score at least `groups` groups as the recipe's rollouts are, in whole iterations.

    What the folder has already is kept. lora: a run or file, of the model that draws. pipeline,
    rewards: objects to use in place of those that the recipe names. -> one row that sums up.
    """
    config = _without_store(as_given(config, pipeline))
    shards = -(-groups // config.rollout.prompts)  # iterations, as many as are drawn
    # What is written down about a rollout's stages belongs to the store.
    run = config.run.model_copy(update={"output_dir": str(folder), "iterations": shards})
    config = config.model_copy(update={"run": run})
    if config.prompts.retained is not None:
        raise UserError(
            "prompts.retained asks for pictures in other words than the prompt's own, which a "
            "store does not keep: set it to null"
        )
    if lora is not None:
        config = with_lora(config, lora)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    runtime = Runtime(
        device=config.pipeline.device, mixed_precision=PRECISION[config.pipeline.dtype]
    )
    given = Given(pipeline=pipeline, rewards=rewards)
    texts = Texts(config, pipeline)
    needed = needed_texts(config, drawn_prompts(config, given), ())
    learner = build_learner(config, runtime, given, texts, needed)
    sampler = learner.source
    assert isinstance(sampler, Sampler)  # the recipe has no store
    done = len(set(finished_shards(folder)) & set(range(shards)))
    steps = Steps("collecting", shards, start=done) if runtime.is_main else None

    def advance(rollout: Rollout) -> None:
        if steps is not None:
            steps.advance({"reward": rollout.reward.nanmean().item()})

    packed = packed_within(learner.policy.network)
    with closing(learner.specs), packed, steps or nullcontext():
        with runtime.together():
            try_rewards(learner, drawn_prompts(config, given))
        texts.free(learner.policy.backbone.pipeline, needed, runtime)
        store = fill(folder, about(config, sampler), sampler, shards=shards, advance=advance)
    return summary(store) if runtime.is_main else []


def collect_pairs(
    config: Config, source: Path, folder: Path, *, pipeline: Any = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Encode pairs of pictures with the recipe's pipeline: groups of two, scored 1 and 0.

    What the folder has already is kept. -> one row that sums up, and why pairs were left out.
    Raises UserError when no pair is left.
    """
    pairs = read_pairs(source)
    config = as_given(config, pipeline)
    p = config.pipeline
    runtime = Runtime(device=p.device)
    if runtime.world_size > 1:
        raise UserError("pairs are encoded by one process: start this without a launcher")
    if pipeline is None:
        pipeline = load_pipeline(p.path, dtype=p.dtype, device=runtime.device, revision=p.revision)
    backbone = build_backbone(config, pipeline, guidance=1.0)
    create(
        folder,
        About(
            pipeline=p.path,
            backbone=p.backbone,
            latent_shape=list(backbone.latent_shape()),
            dtype="float32",
            sigmas=backbone.sigmas(config.rollout.steps).tolist(),
            rewards=[{"name": REWARD, "version": None, "weight": 1.0}],
            recipe={PAIRS: pairs_digest(source)},
        ),
    )
    left_out: list[str] = []
    shards = -(-len(pairs) // SHARD)
    with Steps("encoding", shards) as steps:
        for reasons in write_pairs(folder, pairs, backbone, batch_size=p.decode_batch):
            left_out += reasons
            steps.advance({"left out": len(left_out)})
    if len(left_out) == len(pairs):
        raise UserError(f"none of the {len(pairs)} pairs can be used; the first: {left_out[0]}")
    return summary(open_store(folder)), left_out


def with_lora(config: Config, source: str) -> Config:
    """The recipe on top of a LoRA: its rank and strength, and of a run also its layers."""
    state, strength = read_lora(source)
    rank = next(t.shape[0] for name, t in state.items() if ".lora_A." in name)
    alpha = round(strength * rank, 6)  # as it was, before it was divided
    saved = Path(source) / CONFIG
    layers = load_config(saved).lora if saved.is_file() else config.lora
    changes = {"rank": rank, "alpha": alpha, "init_from": source}
    return config.model_copy(update={"lora": layers.model_copy(update=changes)})


def _without_store(config: Config) -> Config:
    """The recipe as it draws, whatever it would otherwise read."""
    rollout = config.rollout.model_copy(update={"store": None})
    return config.model_copy(update={"rollout": rollout})


def summary(store: Store) -> list[dict[str, Any]]:
    """One row: what is in a store, and the means of its scores."""
    means = store.scores.nanmean(0).tolist()
    return [
        {"groups": len(store.groups), "pictures": len(store)}
        | dict(zip(store.about.names, means, strict=True))
    ]
