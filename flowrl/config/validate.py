"""The rules between options of different sections. All raise ValueError with what to do."""

from collections.abc import Mapping

from flowrl.config.objectives import (
    ComparedOptions,
    GRPOOptions,
    NoisingOptions,
    Objective,
    SPOOptions,
    check_credit,
    check_draws,
    check_spo,
)
from flowrl.config.rollout import OptimOptions, RolloutOptions, StoreOptions
from flowrl.config.sections import MemoryOptions, PipelineOptions
from flowrl.trees.plan import TreePlan, count


def check_plans(
    plans: Mapping[TreePlan, int], rollout: RolloutOptions, objective: Objective, seed: int
) -> None:
    """Every tree that will be drawn suits the objective and the kernel.

    plans: each with the first iteration that draws it.
    """
    if rollout.store is None or rollout.store.path is None:
        check_plans_for(objective.states, plans, rollout, seed)
    for plan in plans:
        _check_gains(rollout, [move.gain for move in plan.moves if move.noise])
        if isinstance(objective, GRPOOptions):
            check_credit(objective.credit, plan)
        if isinstance(objective, SPOOptions):
            check_spo(plan)


def check_plans_for(
    states: str, plans: Mapping[TreePlan, int], rollout: RolloutOptions, seed: int
) -> None:
    """The trees hold the states that are learned from; anything goes for clean images."""
    if states == "transitions":
        _check_steps(plans, rollout, seed)
    if states == "path":
        _check_chains(plans)
    if states in ("transitions", "path"):
        _check_guidance(rollout)


def _check_chains(plans: Mapping[TreePlan, int]) -> None:
    for plan in plans:
        if plan.fans or any(move.noise or move.branch > 1 for move in plan.moves):
            raise ValueError(
                "this objective goes back along chains without noise, but rollout.tree has noise "
                "or branches: set rollout.tree to {kind: ode}"
            )


def check_explore(plans: Mapping[TreePlan, int], rollout: RolloutOptions) -> None:
    """There are candidates to choose among, each with a noise of its own."""
    explore = rollout.explore
    if explore is None:
        return
    if rollout.store is not None and rollout.store.path is not None:
        raise ValueError(
            "rollout.explore draws candidates, but rollout.store.path names groups that were drawn "
            "before: set one of them to null"
        )
    most = max(plan.roots for plan in plans)
    if explore.candidates < most:
        raise ValueError(
            f"rollout.explore.candidates is {explore.candidates}, fewer than the {most} trees of a "
            f"prompt that are kept: the nearest valid value is {most}"
        )
    if explore.steps is not None and not 2 <= explore.steps <= rollout.steps:
        near = min(max(explore.steps, 2), rollout.steps)
        raise ValueError(
            f"rollout.explore.steps is {explore.steps}, expected 2 to the {rollout.steps} of "
            f"rollout.steps: the nearest valid value is {near}"
        )
    if explore.audit.every and explore.audit.prompts > rollout.prompts:
        raise ValueError(
            f"rollout.explore.audit.prompts is {explore.audit.prompts}, more than the "
            f"{rollout.prompts} of rollout.prompts: the nearest valid value is {rollout.prompts}"
        )
    if any(plan.same_noise or plan.roots == 1 for plan in plans):
        raise ValueError(
            f"rollout.tree {rollout.tree.kind} starts all images of a prompt from one noise, so "
            "that rollout.explore has nothing to choose among: set it to null, or take a tree with "
            "several roots, such as {kind: ode} or {kind: flow_grpo}"
        )


def check_precision(pipeline: PipelineOptions, rollout: RolloutOptions) -> None:
    """Rollouts can be drawn in the precision of training, and its options have a meaning."""
    if pipeline.precision is None:
        for name in ("keep_layers", "min_dim"):
            if getattr(pipeline, name) is not None:
                raise ValueError(
                    f"pipeline.{name} names layers for pipeline.precision, which is null: set "
                    f"precision, or {name} to null"
                )
        return
    if rollout.merge_lora is True:
        raise ValueError(
            f"rollout.merge_lora is true, but with pipeline.precision {pipeline.precision} the "
            "adapter stays beside the packed weights in training, and rollouts that fold it in "
            "would be another policy's: set it to auto or false"
        )


def check_base_bits(
    memory: MemoryOptions, pipeline: PipelineOptions, rollout: RolloutOptions
) -> None:
    """Nothing else wants the frozen weights that are kept in few bits."""
    if memory.base_bits is None:
        return
    if memory.base_bits == 4 and memory.base_library == "torchao":
        raise ValueError(
            "memory.base_bits is 4 with torchao, but PEFT has no adapters on torchao's 4-bit "
            "weights: set memory.base_library to bitsandbytes, or base_bits to 8"
        )
    explore = rollout.explore
    wanted = {
        "pipeline.precision": (pipeline.precision, "null"),
        "rollout.merge_lora": (rollout.merge_lora is True, "auto or false"),
        "rollout.compile": (rollout.compile, "false"),
        "rollout.explore.precision": (explore and explore.precision != "bf16", "bf16"),
    }
    for option, (conflict, instead) in wanted.items():
        if conflict:
            raise ValueError(
                f"memory.base_bits is {memory.base_bits}, which leaves no exact weights for "
                f"{option} to work on: set that to {instead}, or memory.base_bits to null"
            )


def check_objective(objective: Objective, rollout: RolloutOptions) -> None:
    """The objective's own options agree, and with those of the rollout."""
    if isinstance(objective, GRPOOptions):
        _check_clip(objective)
        _check_kl(objective, rollout)
    stored = rollout.store is not None and rollout.store.path is not None
    if isinstance(draws := getattr(objective, "draws", None), NoisingOptions) and not stored:
        check_draws(draws, rollout.steps)
    if rollout.store is not None:
        _check_store(objective, rollout.store)


def _check_store(objective: Objective, store: StoreOptions) -> None:
    """Kept reference errors serve the objective."""
    if store.cache_draws is None:
        return
    alone = isinstance(objective, ComparedOptions)
    if not alone or objective.anchor.kind != "base" or objective.kl_coef > 0:
        raise ValueError(
            "rollout.store.cache_draws keeps errors of the base model, which serve dpo, gdro, "
            "lair, dgpo and kto with anchor base and kl_coef 0, not this objective "
            f"({objective.kind}): set it to null"
        )
    if store.cache_draws < objective.draws.count:
        raise ValueError(
            f"rollout.store.cache_draws is {store.cache_draws}, fewer than the "
            f"{objective.draws.count} of objective.draws.count that each look takes: the nearest "
            f"that works is {objective.draws.count}"
        )


def _check_steps(plans: Mapping[TreePlan, int], rollout: RolloutOptions, seed: int) -> None:
    """Every iteration has a step to learn from, drawn with the guidance of training."""
    for plan, iteration in plans.items():
        _check_plan(plan, iteration, rollout, seed)
    if rollout.depth_pruning and all(
        plan == rollout.whole(iteration, seed) for plan, iteration in plans.items()
    ):
        raise ValueError(
            "rollout.depth_pruning covers no step that rollout.tree trains in any iteration: "
            "move its start there, or set it to null"
        )


def _check_guidance(rollout: RolloutOptions) -> None:
    if rollout.training_guidance not in (None, rollout.guidance):
        raise ValueError(
            f"rollout.training_guidance is {rollout.training_guidance:g} and rollout.guidance "
            f"{rollout.guidance:g}, but this objective learns from the rollout's own steps, which "
            "need the same: set training_guidance to null"
        )


def _check_plan(plan: TreePlan, iteration: int, rollout: RolloutOptions, seed: int) -> None:
    if not count(plan).trained_edges:
        reason = (
            "rollout.depth_pruning leaves no step to learn from: make it smaller, or null"
            if rollout.depth_pruning and count(rollout.whole(iteration, seed)).trained_edges
            else "rollout.tree trains no step: give it at least one with noise and training"
        )
        raise ValueError(f"in iteration {iteration} {reason}")


def _check_gains(rollout: RolloutOptions, gains: list[float]) -> None:
    """What a tree multiplies the noise by stays within what the kernel can take."""
    gain = max(gains, default=1.0)
    if rollout.kernel == "cps" and gain * rollout.noise_level > 1:
        raise ValueError(
            f"rollout.tree raises the noise {gain:g} times above rollout.noise_level "
            f"{rollout.noise_level:g}, but cps takes at most 1 in all: the nearest noise_level "
            f"that works is {1 / gain:g}"
        )
    if rollout.kernel == "renoise" and set(gains) - {1.0}:
        raise ValueError(
            f"rollout.tree multiplies the noise by up to {gain:g}, but renoise always replaces all "
            "of it: the nearest rollout.tree.gain_growth that works is 0"
        )


def check_noise(rollout: RolloutOptions) -> None:
    if rollout.steps < 2:
        raise ValueError("rollout.steps is 1, expected at least 2: the last step has no noise")
    if rollout.kernel == "cps" and rollout.noise_level > 1:
        raise ValueError(
            f"rollout.noise_level is {rollout.noise_level}, but cps takes at most 1, which "
            "replaces all noise: the nearest valid value is 1"
        )
    if rollout.kernel == "renoise" and rollout.noise_level != 1:
        raise ValueError(
            f"rollout.noise_level is {rollout.noise_level}, but renoise always replaces all "
            "noise: the nearest valid value is 1"
        )


def check_groups(rollout: RolloutOptions, optim: OptimOptions) -> None:
    """Updates take whole groups of at least two."""
    if rollout.group_size < 2:
        raise ValueError(
            "rollout.group_size is 1, but an image is judged against the others of its prompt: "
            "the nearest valid value is 2"
        )
    updates = optim.updates_per_rollout
    if rollout.prompts % updates:
        raise ValueError(
            f"optim.updates_per_rollout is {updates}, but an update takes whole groups and "
            f"rollout.prompts is {rollout.prompts}: the nearest valid value is "
            f"{_nearest_divisor(rollout.prompts, updates)}"
        )


def _nearest_divisor(total: int, wanted: int) -> int:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def _check_clip(objective: GRPOOptions) -> None:
    if (objective.clip_nats is None) == (objective.clip_eps is None):
        state = "neither is" if objective.clip_nats is None else "both are"
        raise ValueError(
            f"objective.clip_nats and objective.clip_eps: {state} set, expected one; to use "
            "clip_eps, write objective.clip_nats=null beside it"
        )


def _check_kl(objective: GRPOOptions, rollout: RolloutOptions) -> None:
    if objective.kl_form == "latent_no_dt" and rollout.kernel in ("cps", "renoise"):
        raise ValueError(
            "objective.kl_form is latent_no_dt, which leaves out the step length of an SDE, and "
            f"rollout.kernel {rollout.kernel} has none: use latent_dt, the published form for cps"
        )
