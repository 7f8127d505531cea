"""From options to what decides a GPU's memory: `flowrl.planning` knows no configuration."""

from typing import Any

from flowrl.backbones.sd3 import dual_targets
from flowrl.build.backbone import backbone_class
from flowrl.build.work_split import Geometry
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.planning.model_specs import Size
from flowrl.planning.plan_counts import doubles
from flowrl.planning.plan_rewards import reward_bytes
from flowrl.planning.plan_size import own_pixels, text_tokens
from flowrl.planning.setup import Copy, Setup
from flowrl.trees.plan import TreePlan

ENCODED = 64  # texts that are encoded at once, at most


def build_setup(
    config: Config,
    size: Size,
    needs: Needs,
    geometry: Geometry,
    plan: TreePlan,
    candidates: TreePlan | None,
) -> Setup:
    """Of the GPU that has most to do, in iterations that draw `plan` and explore `candidates`.

    Raises UserError for an adapter that the network has no layers for.
    """
    p, r, m, e = config.pipeline, config.rollout, config.memory, config.evaluation
    share, load = max(geometry.shares, key=lambda s: s.trees), geometry.load
    rows = max(max(s.rows) for s in geometry.shares) * load.row_forwards
    side = own_pixels(size)
    training = r.guidance if r.training_guidance is None else r.training_guidance
    images = -(-e.images // geometry.gpus) if e.prompts is not None else 0
    return Setup(
        dtype=p.dtype,
        base_bits=m.base_bits,
        base_library=m.base_library,
        height=p.height or side,
        width=p.width or side,
        text_tokens=text_tokens(size.family, p.max_sequence_length),
        rank=config.lora.rank,
        targets=_targets(config, size),
        adapters=1 + (config.ema.decay is not None) + (needs.old is not None),
        gradient_checkpointing=m.gradient_checkpointing,
        rollout_batch=r.batch_size,
        micro_batch=min(config.optim.micro_batch, max(rows, 1)),
        decode_batch=p.decode_batch,
        evaluation_batch=min(e.batch_size, images),
        evaluation_steps=e.steps,
        encode_batch=ENCODED,
        rollout_doubles=doubles(config, r.guidance),
        training_doubles=doubles(config, training),
        evaluation_doubles=doubles(config, e.guidance),
        reference=needs.reference or needs.old is not None,
        plan=plan,
        prompts_per_gpu=max(1, -(-share.trees // load.roots)),
        candidates=candidates,
        copies=_copies(config),
        training_copy=_training_copy(config),
        merged=_merged(config),
        text_encoders=m.text_encoders,
        vae=m.vae,
        reward_bytes=sum(reward_bytes(entry) or 0 for entry in config.rewards),
    )


def _targets(config: Config, size: Size) -> tuple[str, ...]:
    lora = config.lora
    own: Any = backbone_class(config.pipeline.backbone)
    targets = tuple(lora.targets or getattr(own, "lora_targets", ()))
    if not targets:
        raise UserError(
            f"pipeline.backbone {config.pipeline.backbone!r} does not say which layers it adapts "
            "before it is made: set lora.targets, or make lora_targets an attribute of its class"
        )
    if not lora.dual_attention:
        return targets
    return targets + dual_targets(size.transformer, size.config)


def _copies(config: Config) -> tuple[Copy, ...]:
    """Networks beside the policy's own: a compiled one, and that of candidates."""
    r, e, found = config.rollout, config.rollout.explore, []
    merged = _merged(config)
    if r.compile:
        found.append(Copy(format="bf16", merge=merged))
    if e is not None:
        folds = e.lora == "merge" and _foldable(config)
        if e.precision != "bf16" or folds != merged:
            found.append(
                Copy(
                    format=e.precision,
                    merge=e.lora == "merge",
                    min_dim=e.min_dim,
                    keep=None if e.keep_layers is None else tuple(e.keep_layers),
                )
            )
    return tuple(found)


def _training_copy(config: Config) -> Copy | None:
    p = config.pipeline
    if p.precision in (None, "bf16"):
        return None
    keep = None if p.keep_layers is None else tuple(p.keep_layers)
    # The larger of what auto may be: bf16 keeps nothing beside the weights.
    format = "fp8" if p.precision == "auto" else p.precision
    return Copy(format=format, merge=False, min_dim=p.min_dim, keep=keep)


def _foldable(config: Config) -> bool:
    """As `Drawing.foldable` of `flowrl.build.rollout` finds it of the network itself."""
    return config.pipeline.precision is None and config.memory.base_bits is None


def _merged(config: Config) -> bool:
    wanted = config.rollout.merge_lora
    if wanted == "auto":
        return config.pipeline.dtype == "fp32" and _foldable(config)
    return bool(wanted)
