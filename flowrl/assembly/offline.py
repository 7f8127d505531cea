"""Build the source that reads an offline data set, and describe how one was made."""

import warnings

from flowrl.assembly.backbone import rounding_key
from flowrl.assembly.rollout import RolloutParts
from flowrl.backbones.lora_formats import lora_file
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.text_cache import TextCache
from flowrl.config import Config
from flowrl.config.validate import check_noising
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.offline.format import DatasetMetadata, open_dataset
from flowrl.offline.source import StoredGroups, check_dataset, filter_groups
from flowrl.sampling.rollout import Sampler
from flowrl.utils.digests import content_digest, digest_of_file

# Options under `rollout` that leave the images as they are.
INDIFFERENT = {
    "batch_size", "depth_pruning", "merge_lora", "store", "training_guidance_scale", "workers",
}  # fmt: skip
CHECKED = {"allow_overlap"}  # the same, under `prompts`
# Options under `pipeline` that change them, beside what the metadata hold anyway.
DECISIVE = {"max_sequence_length", "precision", "min_dim"}


def build_stored(
    parts: RolloutParts, backbone: PipelineBackbone, text_cache: TextCache
) -> StoredGroups:
    """Return the source that reads `rollout.store`, checked against the recipe.

    backbone: with the guidance of training.
    """
    config = parts.config
    r, p = config.rollout, config.prompts
    assert r.store is not None
    dataset = open_dataset(r.store)
    check_dataset(
        dataset,
        parts.backbone,
        pipeline=config.pipeline.path,
        family=type(parts.backbone.pipeline).__name__,
    )
    noising = getattr(config.objective, "noising", None)
    if noising is not None:  # as many noise levels as the objective takes
        try:
            check_noising(noising, len(dataset.metadata.sigmas) - 1)
        except ValueError as error:
            raise UserError(str(error)) from error
    groups = filter_groups(
        dataset, parts.specs, r.prompts_per_iteration, config.run.seed,
        balance=p.balance, weights=p.weights,
    )  # fmt: skip
    if groups.skipped and parts.runtime.is_main:
        warnings.warn(
            f"{groups.skipped} groups of {r.store} are never read: fewer than two of their images "
            "have a reward",
            stacklevel=2,
        )
    return StoredGroups(
        sampler=groups,
        backbone=backbone,
        text_cache=text_cache,
        specs=parts.specs,
        runtime=parts.runtime,
        group_size=r.group_size,
        seed=config.run.seed,
    )


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


def dataset_metadata(config: Config, sampler: Sampler) -> DatasetMetadata:
    """Return how the sampler of a recipe makes images."""
    p, lora, generator = config.pipeline, config.lora.init_from, sampler.generator
    uids = sorted(r.uid for records in sampler.prompts.kinds.values() for r in records)
    return DatasetMetadata(
        pipeline=p.path,
        backbone=type(generator.backbone.pipeline).__name__,
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
            | {"digest": content_digest(uids)},
            "run": {"seed": config.run.seed},
        },
        lora=None if lora is None else {"path": lora, "digest": digest_of_file(lora_file(lora))},
    )
