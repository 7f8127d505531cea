"""From options to the source of rollouts: a sampler, or a store that is read."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from flowrl.backbones.base import Backbone
from flowrl.build_rewards import build_limit
from flowrl.build_store import build_stored
from flowrl.checks import check_plans_for
from flowrl.collect import RolloutSettings, Sampler, Source
from flowrl.config import Config
from flowrl.encode import TextCache
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.memory import check_memory, free_bytes
from flowrl.objectives.base import Needs
from flowrl.policy import OLD, POLICY, Policy
from flowrl.prompts import PromptRecord, PromptSampler
from flowrl.reward import RewardSpec
from flowrl.runtime import Runtime
from flowrl.trees.plan import PlanError, TreePlan


def build_source(
    config: Config,
    runtime: Runtime,
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    policy: Policy,
    backbone: Backbone,
    needs: Needs,
) -> Source:
    """backbone: with the guidance of rollouts. prompts: none, for a store that has its own."""
    r, seed = config.rollout, config.run.seed
    drawn_by_old = needs.old is not None and needs.old.samples
    sampler = Sampler(
        backbone=backbone,
        policy=policy,
        encode=TextCache(backbone, r.negative),
        prompts=PromptSampler(prompts, r.prompts, seed, balance=config.prompts.balance),
        specs=specs,
        runtime=runtime,
        rollout=rollout_settings(config),
        failures=build_limit(config),
        seed=seed,
        adapter=OLD if drawn_by_old else POLICY,
        whole_prompts=whole_prompts(needs, specs),
        retained=config.prompts.retained,
    )
    if r.store is not None and r.store.path is not None:
        _check_store(config, needs)
        return build_stored(
            config, sampler, lambda c: replace(sampler, rollout=rollout_settings(c))
        )
    _check_memory(config, backbone, runtime)
    return sampler


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


def whole_prompts(needs: Needs, specs: Sequence[RewardSpec]) -> bool:
    """Whether one process must draw all pictures of a prompt: they are compared there."""
    return needs.complete_groups or any(spec.whole_groups for spec in specs)


def check_shares(
    config: Config, runtime: Runtime, needs: Needs, specs: Sequence[RewardSpec] = ()
) -> None:
    """Every process gets what its objective and its rewards compare, in every iteration."""
    r, processes = config.rollout, runtime.world_size
    if needs.whole_update and processes > 1:
        raise UserError(
            f"objective.kind {config.objective.kind} compares all pictures of an update with their "
            f"mean, which {processes} processes do not share: start one process, or take another "
            "objective"
        )
    if whole_prompts(needs, specs) and r.prompts < processes:
        what = "this objective compares" if needs.complete_groups else "a reward compares"
        raise UserError(
            f"rollout.prompts is {r.prompts}, but {processes} processes take whole prompts, whose "
            f"pictures {what}: raise it, or start fewer processes"
        )
    trees = min(r.prompts * plan.roots for plan in config.plans())
    if trees < processes:
        raise UserError(
            f"{trees} trees cannot be shared among {processes} processes, which take whole ones: "
            "raise rollout.prompts or the roots of a prompt, or start fewer processes"
        )


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


def _plan(config: Config, iteration: int) -> TreePlan:
    try:
        return config.rollout.plan(iteration, config.run.seed)
    except PlanError as error:
        raise UserError(f"iteration {iteration} cannot be drawn: {error}") from error


def rollout_settings(config: Config) -> RolloutSettings:
    r = config.rollout
    # Folding rounds the weights: in fp32 that is far below any clip, in half precision it is not.
    exact = config.pipeline.dtype == "fp32"
    return RolloutSettings(
        plan=functools.partial(_plan, config),
        steps=r.steps,
        kernel=KERNELS[r.kernel],
        noise_level=r.noise_level,
        batch_size=r.batch_size,
        decode_batch=config.pipeline.decode_batch,
        merge_lora=exact if r.merge_lora == "auto" else r.merge_lora,
    )
