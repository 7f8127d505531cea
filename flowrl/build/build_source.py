"""From options to the source of rollouts: a sampler, or a store that is read."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from flowrl.backbones.base import Backbone
from flowrl.backbones.policy import Policy
from flowrl.build.build_geometry import build_load
from flowrl.build.build_memory import Texts, learning_guidance
from flowrl.build.build_store import build_stored
from flowrl.build.rollout import (
    Drawing,
    build_explorer,
    build_stage,
    plan_at,
)
from flowrl.build.work_split import check
from flowrl.config import Config
from flowrl.config.validate import check_plans_for
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.sampling.source import Sampler, Source
from flowrl.scoring.spec import RewardSpec
from flowrl.trees.memory import check_memory, free_bytes
from flowrl.utils.distributed import Runtime


def build_source(
    config: Config,
    runtime: Runtime,
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    policy: Policy,
    backbone: Backbone,
    needs: Needs,
    texts: Texts,
) -> Source:
    """backbone: with the guidance of rollouts. prompts: none, for a store that has its own."""
    r = config.rollout
    drawing = Drawing(
        config=config,
        runtime=runtime,
        specs=specs,
        policy=policy,
        backbone=backbone,
        needs=needs,
        encode=texts.of(backbone, r.guidance),
    )
    if r.store is not None and r.store.path is not None:
        _check_store(config, needs)

        def redraw(other: Config) -> Sampler:
            return build_sampler(replace(drawing, config=other), prompts)

        encode = texts.of(policy.backbone, learning_guidance(config))
        return build_stored(config, redraw(config), policy.backbone, redraw, encode)
    _check_memory(config, backbone, runtime)
    return build_sampler(drawing, prompts)


def build_sampler(drawing: Drawing, prompts: Sequence[PromptRecord]) -> Sampler:
    """What draws as the recipe says."""
    config, seed = drawing.config, drawing.config.run.seed
    stage = build_stage(drawing)
    return Sampler(
        stage=stage,
        plan=functools.partial(plan_at, config.rollout.plan, seed),
        prompts=PromptSampler(
            prompts, config.rollout.prompts, seed, balance=config.prompts.balance
        ),
        seed=seed,
        explorer=build_explorer(drawing, stage),
        retained=config.prompts.retained,
    )


def _check_store(config: Config, needs: Needs) -> None:
    """A store has what the objective learns from."""
    if needs.states != "endpoints":
        raise UserError(
            f"objective.kind {config.objective.kind} learns from {needs.states} of its own "
            "rollouts, and a store holds clean pictures alone: set rollout.store to null, or take "
            "an objective on pictures, such as gdro, dpo or sft"
        )
    if needs.old is not None and needs.old.samples:
        raise UserError(
            f"objective.kind {config.objective.kind} learns from what its own old policy draws, "
            "and the store was drawn by another: set rollout.store to null, or take an objective "
            "compared with the base, such as gdro, or dpo with anchor: {kind: base}"
        )


def check_shares(
    config: Config, runtime: Runtime, needs: Needs, specs: Sequence[RewardSpec] = ()
) -> None:
    """Every process gets what its objective and its rewards compare, in every iteration."""
    whole = any(spec.whole_groups for spec in specs)
    for plan in config.plans():
        check(build_load(config, needs, plan, whole_groups=whole), runtime.world_size)


def check_states(config: Config, needs: Needs) -> None:
    """The trees give what the objective learns from, also one of the user's own."""
    try:
        check_plans_for(needs.states, config.plans(), config.rollout, config.run.seed)
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_memory(config: Config, backbone: Backbone, runtime: Runtime) -> None:
    """The trees of every iteration fit beside the weights, which are loaded by now."""
    prompts = -(-config.rollout.prompts // runtime.world_size)
    latent, itemsize = math.prod(backbone.latent_shape()), backbone.dtype.itemsize
    free = free_bytes(runtime.device)
    for plan in config.plans():
        check_memory(plan, prompts, latent, itemsize, free)
