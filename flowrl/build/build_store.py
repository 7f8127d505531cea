"""From options to stores: how one was made, and one as the source of rollouts."""

import json
import warnings
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from flowrl.backbones.base import Backbone
from flowrl.backbones.lora_files import lora_file
from flowrl.backbones.text_cache import TextCache
from flowrl.build.build_memory import learning_guidance, rounded
from flowrl.config import Config
from flowrl.config.sections_forward import check_draws
from flowrl.errors import UserError
from flowrl.offline.format import About, Store
from flowrl.offline.shelf import check_store
from flowrl.offline.source import Caching, Refreshing, StoredGroups
from flowrl.offline.store_index import open_store
from flowrl.offline.writer import Refresh
from flowrl.sampling.source import Sampler

# Options under `rollout` that leave the pictures as they are.
INDIFFERENT = {
    "batch_size", "compile", "depth_pruning", "merge_lora", "store", "training_guidance",
}  # fmt: skip
# Options under `pipeline` that change them, beside what a store says of it anyway.
DECISIVE = {"max_sequence_length", "precision", "keep_layers", "min_dim"}
REFERENCE = "reference.safetensors"
STORES = "stores"


def build_stored(
    config: Config,
    sampler: Sampler,
    backbone: Backbone,
    redraw: Callable[[Config], Sampler],
    encode: TextCache,
) -> StoredGroups:
    """The source that reads `rollout.store`, checked against the recipe.

    sampler: what would draw instead; backbone: with the guidance of training; redraw: what draws
    as another recipe says, with the same policy, when the store is refreshed; encode: reads the
    store's prompts.
    """
    r, p, folder = config.rollout, config.pipeline, Path(config.run.output_dir)
    assert r.store is not None and r.store.path is not None
    store = open_store(r.store.path)
    stage = sampler.stage
    check_store(store, stage.backbone, stage.specs, pipeline=p.path, family=p.backbone)
    _check_draws(config, store)
    refreshing = caching = None
    if r.store.refresh_every is not None:
        refresh = _refresh(config, store, redraw, r.store.refresh_every)
        refreshing = Refreshing(
            every=r.store.refresh_every,
            folder=folder / STORES,
            draw=refresh,
            finished=refresh.finished,
        )
    if r.store.cache_draws is not None:
        key = _reference_key(config)
        caching = Caching(draws=r.store.cache_draws, path=folder / REFERENCE, key=key)
    source = StoredGroups(
        store,
        backbone=backbone,
        encode=encode,
        specs=stage.specs,
        runtime=stage.runtime,
        prompts=r.prompts,
        group_size=r.group_size,
        seed=config.run.seed,
        balance=config.prompts.balance,
        refreshing=refreshing,
        caching=caching,
    )
    if source.skipped and stage.runtime.is_main:
        warnings.warn(
            f"{source.skipped} groups of {r.store.path} are never read: fewer than two of their "
            "pictures have a reward",
            stacklevel=2,
        )
    return source


def _check_draws(config: Config, store: Store) -> None:
    """The noise levels that the store was drawn with are enough for what is asked of them."""
    draws, stored = getattr(config.objective, "draws", None), config.rollout.store
    if draws is None or stored is None:
        return
    try:
        check_draws(draws, len(store.about.sigmas) - 1, stored.cache_draws)
    except ValueError as error:
        raise UserError(str(error)) from error


def _refresh(
    config: Config, store: Store, redraw: Callable[[Config], Sampler], every: int
) -> Refresh:
    """Draws as the recipe says, but as many pictures of a prompt as the store has."""
    size = max(len(group.pictures) for group in store.groups)
    rollout = config.rollout.model_copy(update={"group_size": size, "store": None})
    config = config.model_copy(update={"rollout": rollout})
    sampler = redraw(config)
    sampler.plan(0)  # or it would be refused only when it is drawn
    return Refresh(like=store, about=about(config, sampler), sampler=sampler, every=every)


def _reference_key(config: Config) -> str:
    """Everything but the store that decides the reference's errors; rather too much than less."""
    r, p = config.rollout, config.pipeline.model_dump(exclude={"device", "decode_batch"})
    p, guidance = p | rounded(config), learning_guidance(config)
    parts = [p, config.objective.model_dump(mode="json"), guidance, r.negative]
    return _digest([json.dumps(parts, sort_keys=True)])


def about(config: Config, sampler: Sampler) -> About:
    """How the sampler of a recipe makes pictures."""
    p, lora = config.pipeline, config.lora.init_from
    uids = sorted(r.uid for records in sampler.prompts.kinds.values() for r in records)
    return About(
        pipeline=p.path,
        backbone=p.backbone,
        latent_shape=list(sampler.stage.backbone.latent_shape()),
        dtype=str(sampler.stage.backbone.dtype).removeprefix("torch."),
        sigmas=sampler.stage.schedule().sigmas.tolist(),
        rewards=[
            {
                "name": spec.name,
                "version": getattr(spec.reward, "version", None),
                "weight": 0.0 if spec.held_out else spec.weight,
            }
            for spec in sampler.stage.specs
        ],
        recipe={
            "rollout": config.rollout.model_dump(mode="json", exclude=INDIFFERENT),
            "pipeline": p.model_dump(mode="json", include=DECISIVE) | rounded(config),
            "prompts": config.prompts.model_dump(mode="json") | {"digest": _digest(uids)},
            "run": {"seed": config.run.seed},
        },
        lora=None if lora is None else {"path": lora, "digest": _file_digest(lora_file(lora))},
    )


def _digest(words: Sequence[str]) -> str:
    return blake2b("\n".join(words).encode(), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()
