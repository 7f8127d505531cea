"""Build the source that reads an offline data set, and describe how one was made."""

import warnings
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from flowrl.assembly.backbone import rounding_key
from flowrl.backbones.base import Backbone
from flowrl.backbones.lora_formats import lora_file
from flowrl.backbones.text_cache import TextCache
from flowrl.config import Config
from flowrl.config.validate import check_noising
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.offline.format import DatasetMetadata, OfflineDataset, open_dataset
from flowrl.offline.source import StoredGroups, check_dataset
from flowrl.offline.writer import Refresher
from flowrl.sampling.source import Sampler

# Options under `rollout` that leave the images as they are.
INDIFFERENT = {
    "batch_size", "compile", "depth_pruning", "merge_lora", "store", "training_guidance_scale",
    "workers",
}  # fmt: skip
CHECKED = {"allow_overlap"}  # the same, under `prompts`
# Options under `pipeline` that change them, beside what the metadata hold anyway.
DECISIVE = {"max_sequence_length", "precision", "keep_layers", "min_dim"}
STORES = "stores"


def build_stored(
    config: Config,
    sampler: Sampler,
    backbone: Backbone,
    resample: Callable[[Config], Sampler],
    text_cache: TextCache,
) -> StoredGroups:
    """Return the source that reads `rollout.store`, checked against the recipe.

    Args:
        sampler: of this recipe without the store.
        backbone: with the guidance of training.
        resample: returns the sampler of another recipe, with the same policy.
    """
    r = config.rollout
    assert r.store is not None and r.store.path is not None
    dataset, generator = open_dataset(r.store.path), sampler.generator
    check_dataset(
        dataset, generator.backbone, generator.specs,
        pipeline=config.pipeline.path, family=config.pipeline.backbone,
    )  # fmt: skip
    _check_noising(config, dataset)
    refresher = None
    if r.store.refresh_every is not None:
        refresher = _refresher(config, dataset, resample, r.store.refresh_every)
    source = StoredGroups(
        dataset,
        backbone=backbone,
        text_cache=text_cache,
        specs=generator.specs,
        runtime=generator.runtime,
        prompts=r.prompts_per_iteration,
        group_size=r.group_size,
        seed=config.run.seed,
        balance=config.prompts.balance,
        weights=config.prompts.weights,
        refresher=refresher,
    )
    if source.sampler.skipped and generator.runtime.is_main:
        warnings.warn(
            f"{source.sampler.skipped} groups of {r.store.path} are never read: fewer than two of "
            "their images have a reward",
            stacklevel=2,
        )
    return source


def check_offline(config: Config, needs: Needs) -> None:
    """Check that an offline data set has what the objective learns from."""
    if needs.states != "endpoints":
        raise UserError(
            f"objective.kind {config.objective.kind} learns from {needs.states} of its own "
            "rollouts, but an offline data set holds clean images only: set rollout.store to "
            "null, or take an objective on images, such as gdro, dpo or sft"
        )
    if needs.old is not None and needs.old.samples:
        raise UserError(
            f"objective.kind {config.objective.kind} learns from images of its own old policy, and "
            "those of an offline data set are another's: set rollout.store to null, or take an "
            "objective compared with the base, such as gdro, or dpo with anchor_every: null"
        )


def _check_noising(config: Config, dataset: OfflineDataset) -> None:
    """Check that the data set was sampled with as many noise levels as the objective takes."""
    noising, store = getattr(config.objective, "noising", None), config.rollout.store
    if noising is None or store is None:
        return
    try:
        check_noising(noising, len(dataset.metadata.sigmas) - 1)
    except ValueError as error:
        raise UserError(str(error)) from error


def _refresher(
    config: Config, dataset: OfflineDataset, resample: Callable[[Config], Sampler], every: int
) -> Refresher:
    """Return what samples as the recipe says, as many images of a prompt as the data set has."""
    size = max(len(group.images) for group in dataset.groups)
    rollout = config.rollout.model_copy(update={"group_size": size, "store": None})
    config = config.model_copy(update={"rollout": rollout})
    sampler = resample(config)
    sampler.plan(0)  # what cannot be sampled fails now
    return Refresher(
        original=dataset,
        metadata=dataset_metadata(config, sampler),
        sampler=sampler,
        every=every,
        folder=Path(config.run.output_dir) / STORES,
    )


def dataset_metadata(config: Config, sampler: Sampler) -> DatasetMetadata:
    """Return how the sampler of a recipe makes images."""
    p, lora, generator = config.pipeline, config.lora.init_from, sampler.generator
    uids = sorted(r.uid for records in sampler.prompts.kinds.values() for r in records)
    return DatasetMetadata(
        pipeline=p.path,
        backbone=p.backbone,
        latent_shape=list(generator.backbone.latent_shape()),
        dtype=str(generator.backbone.dtype).removeprefix("torch."),
        sigmas=generator.schedule().sigmas.tolist(),
        rewards=[
            {
                "name": spec.name,
                "version": getattr(spec.reward, "version", None),
                "weight": 0.0 if spec.held_out else spec.weight,
            }
            for spec in generator.specs
        ],
        recipe={
            "rollout": config.rollout.model_dump(mode="json", exclude=INDIFFERENT),
            "pipeline": p.model_dump(mode="json", include=DECISIVE) | rounding_key(config.memory),
            "prompts": config.prompts.model_dump(mode="json", exclude=CHECKED)
            | {"digest": _digest(uids)},
            "run": {"seed": config.run.seed},
        },
        lora=None
        if lora is None
        else {"path": lora, "digest": _digest([lora_file(lora).read_bytes()])},
    )


def _digest(parts: Sequence[str | bytes]) -> str:
    data = b"\n".join(part.encode() if isinstance(part, str) else part for part in parts)
    return blake2b(data, digest_size=16).hexdigest()
