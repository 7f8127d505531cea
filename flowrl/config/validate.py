"""The rules between options of different sections. Each raises ValueError with what to do."""

from collections.abc import Mapping

from flowrl.config.objectives import (
    AdvantageOptions,
    ComparedOptions,
    CreditOptions,
    GRPOOptions,
    NoisingOptions,
    Objective,
    SPOOptions,
)
from flowrl.config.rollout import OptimOptions, ReferenceOptions, RolloutOptions
from flowrl.config.sections import (
    EvaluationOptions,
    LoRAOptions,
    MemoryOptions,
    PipelineOptions,
    PromptOptions,
    RunOptions,
    RuntimeOptions,
)
from flowrl.trees.plan import TreePlan, count

Plans = Mapping[TreePlan, int]  # each with the first iteration that samples it


def check_rollout(rollout: RolloutOptions, optim: OptimOptions, objective: Objective) -> None:
    """Check the kernel's noise, and that updates take whole groups of as many images as needed."""
    center = getattr(getattr(objective, "advantage", None), "center", "group")
    if rollout.num_inference_steps < 2:
        raise ValueError(
            "rollout.num_inference_steps is 1, expected at least 2: the last step has no noise"
        )
    if rollout.kernel == "cps" and rollout.noise_level > 1:
        raise ValueError(
            f"rollout.noise_level is {rollout.noise_level}, but cps takes at most 1, which "
            "replaces all noise: the nearest valid value is 1"
        )
    if rollout.group_size < 2 and center != "tracker":
        raise ValueError(
            "rollout.group_size is 1, but an image is compared with the others of its prompt: "
            "the nearest valid value is 2, or 1 with objective.advantage.center: tracker"
        )
    prompts, updates = rollout.prompts_per_iteration, optim.updates_per_rollout
    if prompts % updates:
        divisors = [d for d in range(1, prompts + 1) if prompts % d == 0]
        raise ValueError(
            f"optim.updates_per_rollout is {updates}, but an update takes whole groups and "
            f"rollout.prompts_per_iteration is {prompts}: the nearest valid value is "
            f"{min(divisors, key=lambda d: (abs(d - updates), d))}"
        )


def check_plans(plans: Plans, rollout: RolloutOptions, objective: Objective, seed: int) -> None:
    """Check that every tree of the run suits the objective and the kernel."""
    if rollout.store is None:
        check_states(objective.states, plans, rollout, seed)
    for plan in plans:
        if isinstance(objective, GRPOOptions):
            check_credit(objective.advantage, plan)
        if isinstance(objective, SPOOptions):
            check_spo(plan)


def check_states(states: str, plans: Plans, rollout: RolloutOptions, seed: int) -> None:
    """Check that the trees hold what the objective learns from; clean images are in all of them."""
    if states == "transitions":
        for plan, iteration in plans.items():
            whole = rollout.whole(iteration, seed)
            if not count(whole).trained_edges:
                raise ValueError(
                    f"in iteration {iteration} rollout.tree trains no step: give it at least one "
                    "with noise and training"
                )
            if not count(plan).trained_edges:
                raise ValueError(
                    f"in iteration {iteration} rollout.depth_pruning leaves no step to learn from: "
                    "make it smaller, or null"
                )
    if states == "path":
        if rollout.depth_pruning and all(
            plan == rollout.whole(iteration, seed) for plan, iteration in plans.items()
        ):
            raise ValueError(
                "rollout.depth_pruning covers no step that rollout.tree trains in any iteration: "
                "move its start there, or set it to null"
            )
        for plan in plans:
            if plan.fans or any(move.noise or move.branch > 1 for move in plan.moves):
                raise ValueError(
                    "this objective goes back along chains without noise, but rollout.tree has "
                    "noise or branches: set rollout.tree to {kind: ode}"
                )
    training, sampling = rollout.training_guidance_scale, rollout.guidance_scale
    if states in ("transitions", "path") and training not in (None, sampling):
        raise ValueError(
            f"rollout.training_guidance_scale is {training:g} and rollout.guidance_scale "
            f"{sampling:g}, but this objective learns from the rollout's own steps, which need the "
            "same: set training_guidance_scale to null"
        )


def check_explore(plans: Plans, rollout: RolloutOptions) -> None:
    """Check that there are candidates to choose among, each with a noise of its own."""
    explore = rollout.explore
    if explore is None:
        return
    if rollout.store is not None:
        raise ValueError(
            "rollout.explore samples candidates, but rollout.store names groups that were "
            "sampled before: set one of them to null"
        )
    most = max(plan.roots for plan in plans)
    if explore.candidates < most:
        raise ValueError(
            f"rollout.explore.candidates is {explore.candidates}, fewer than the {most} trees of a "
            f"prompt that are kept: the nearest valid value is {most}"
        )
    steps, whole = explore.num_inference_steps, rollout.num_inference_steps
    if steps is not None and not 2 <= steps <= whole:
        raise ValueError(
            f"rollout.explore.num_inference_steps is {steps}, expected 2 to the {whole} of "
            f"rollout.num_inference_steps: the nearest valid value is {min(max(steps, 2), whole)}"
        )
    if explore.stop_at is not None and (steps is not None or explore.stop_at >= whole):
        raise ValueError(
            f"rollout.explore.stop_at is {explore.stop_at}: it must be below the {whole} of "
            "rollout.num_inference_steps, and rollout.explore.num_inference_steps must be null"
        )
    prompts = rollout.prompts_per_iteration
    if explore.audit.every and explore.audit.prompts > prompts:
        raise ValueError(
            f"rollout.explore.audit.prompts is {explore.audit.prompts}, more than the {prompts} of "
            f"rollout.prompts_per_iteration: the nearest valid value is {prompts}"
        )
    if any(plan.same_noise or plan.roots == 1 for plan in plans):
        raise ValueError(
            f"rollout.tree {rollout.tree.kind} starts all images of a prompt from one noise, so "
            "that rollout.explore has nothing to choose among: set it to null, or take a tree with "
            "several roots, such as {kind: ode} or {kind: flow_grpo}"
        )


def check_precision(pipeline: PipelineOptions, rollout: RolloutOptions) -> None:
    """Check that rollouts can be sampled in the precision of training."""
    if pipeline.precision is None and pipeline.min_dim is not None:
        raise ValueError(
            "pipeline.min_dim chooses layers for pipeline.precision, which is null: set "
            "precision, or min_dim to null"
        )
    if pipeline.precision is None and pipeline.quantize_gradients:
        raise ValueError(
            "pipeline.quantize_gradients rounds to the format of pipeline.precision, which is "
            "null: set precision, or quantize_gradients to false"
        )
    if pipeline.precision is not None and rollout.merge_lora is True:
        raise ValueError(
            f"rollout.merge_lora is true, but with pipeline.precision {pipeline.precision} the "
            "adapter stays beside the packed weights in training, and rollouts that fold it in "
            "would be another policy's: set it to auto or false"
        )


def check_base_bits(
    memory: MemoryOptions, pipeline: PipelineOptions, rollout: RolloutOptions
) -> None:
    """Check that nothing else needs the exact frozen weights where they are kept in few bits."""
    if memory.base_bits is None:
        return
    explore = rollout.explore
    wanted = {
        "pipeline.precision": (pipeline.precision, "null"),
        "rollout.merge_lora": (rollout.merge_lora is True, "auto or false"),
        "rollout.explore.precision": (explore and explore.precision != "bf16", "bf16"),
    }
    for option, (conflict, instead) in wanted.items():
        if conflict:
            raise ValueError(
                f"memory.base_bits is {memory.base_bits}, which leaves no exact weights for "
                f"{option} to work on: set that to {instead}, or memory.base_bits to null"
            )
    if pipeline.compile:
        raise ValueError(
            f"pipeline.compile is true, which was not tried with memory.base_bits "
            f"{memory.base_bits}: set pipeline.compile to false"
        )


def check_objective(objective: Objective, rollout: RolloutOptions, *, gates: bool) -> None:
    """Check that the objective's options agree with each other, the rollout's and the rewards'.

    gates: whether a reward has one.
    """
    if gates and getattr(getattr(objective, "advantage", None), "rewards", "sum") == "gdpo":
        raise ValueError(
            "objective.advantage.rewards is gdpo, which adds z-scores, and a reward has a gate, "
            "which counts scores: set it to sum, or remove the gate"
        )
    no_dt = isinstance(objective, GRPOOptions) and objective.kl_form == "latent_no_dt"
    if no_dt and rollout.kernel == "cps":
        raise ValueError(
            "objective.kl_form is latent_no_dt, which leaves out the step length of an SDE, and "
            "rollout.kernel cps has none: use latent_dt, the published form for it"
        )
    noising = getattr(objective, "noising", None)
    if noising is not None and rollout.store is None:
        check_noising(noising, rollout.num_inference_steps)


def check_book(prompts: PromptOptions, rollout: RolloutOptions, objective: Objective) -> None:
    """Check that the book of prompts sees each iteration's scores in time, and all that read it."""
    advantage: AdvantageOptions | None = getattr(objective, "advantage", None)
    if prompts.book is not None:
        for option, value, works, why in (
            ("staleness", rollout.staleness, "0", "samples before the last scores are told"),
            ("explore", rollout.explore, "null", "chooses images by their scores"),
            ("store", rollout.store, "null", "draws no prompts"),
        ):
            if value:
                raise ValueError(
                    f"prompts.book counts the successes of an iteration's images to choose the "
                    f"next prompts, but rollout.{option} {why}: set it to {works}, or "
                    "prompts.book to null"
                )
    elif advantage is not None and (advantage.center == "tracker" or advantage.emphasis):
        raise ValueError(
            "objective.advantage.center: tracker and emphasis read what is remembered of prompts: "
            "set prompts.book, for example to {choose: uniform}"
        )
    if advantage is None or advantage.center == "group":
        return
    for option, wrong, works in (
        ("kind", isinstance(objective, ComparedOptions), "one that compares no images itself"),
        ("advantage.rewards", advantage.rewards == "gdpo", "sum"),
        ("advantage.scope", getattr(advantage, "scope", "prompt") != "prompt", "prompt"),
    ):
        if wrong:
            raise ValueError(
                "objective.advantage.center is tracker, which compares all images of an iteration "
                f"by their rewards: set objective.{option} to {works}, or center to group"
            )


def check_reference(reference: ReferenceOptions, objective: Objective, run: RunOptions) -> None:
    """Check that there is a pull where the reference moves or only some images are pulled."""
    raised = run.on_hacking is not None and run.on_hacking.action == "raise_kl"
    pulls = raised or getattr(objective, "kl_coef", 0)
    if getattr(objective, "kl_on", None) is not None and not pulls:
        raise ValueError(
            "objective.kl_on chooses the images that pay the KL penalty, but objective.kl_coef is "
            "0: set it above 0, for example 0.1, or kl_on to null"
        )
    if reference != ReferenceOptions() and not pulls:
        raise ValueError(
            "reference moves, but no penalty pulls to it: set objective.kl_coef, for an objective "
            "that has it, or leave reference out"
        )
    if reference != ReferenceOptions() and "anchor_every" in type(objective).model_fields:
        raise ValueError(
            f"objective.kind {objective.kind} compares with the reference itself: set "
            "objective.anchor_every in place of reference"
        )


def check_hacking(
    run: RunOptions, evaluation: EvaluationOptions, objective: Objective, lora: LoRAOptions
) -> None:
    """Check that `run.on_hacking` has evaluations during training, and what to compare with."""
    if run.on_hacking is not None and run.on_hacking.held_out is None and lora.init_from:
        raise ValueError(
            "run.on_hacking.held_out is null, which compares images with the base's, but "
            "lora.init_from begins elsewhere: name a held-out reward, or set run.on_hacking to null"
        )
    if run.on_hacking is not None and not evaluation.every:
        raise ValueError(
            "run.on_hacking compares evaluations during training, but evaluation.every is "
            "0: set it to a number of iterations, for example 10, or run.on_hacking to null"
        )
    if run.on_hacking is None or run.on_hacking.action != "raise_kl":
        return
    kl_coef = getattr(objective, "kl_coef", None)
    if kl_coef is None:
        raise ValueError(
            f"run.on_hacking.action is raise_kl, and objective.kind {objective.kind} has no "
            "kl_coef: take rollback, or another objective"
        )
    if kl_coef >= run.on_hacking.kl_coef:
        raise ValueError(
            f"run.on_hacking.kl_coef is {run.on_hacking.kl_coef:g}, and objective.kl_coef is "
            f"{kl_coef:g} from the start: set a larger one to raise it"
        )


def check_credit(credit: CreditOptions, plan: TreePlan) -> None:
    """Raise ValueError for a comparison that the trees do not have, or that means nothing."""
    if count(plan).leaves == plan.roots:
        for name, value, instead in (
            ("scope", credit.scope in ("leaf", "depth", "sibling"), "prompt"),
            ("edges", credit.edges == "sibling", "node"),
            ("keep", credit.keep == "parent_top1", "extreme"),
        ):
            if value:
                raise ValueError(
                    f"objective.advantage.{name} compares images of one tree, but each tree of "
                    f"rollout.tree has one image: use {instead}"
                )
    if credit.edges == "sibling" and credit.scope in ("depth", "sibling"):
        raise ValueError(
            f"objective.advantage.scope is {credit.scope}, which compares a node and its parent "
            "with different nodes, and edges: sibling subtracts the two: use prompt, leaf or joint"
        )
    if credit.edges == "fan" and credit.scope not in ("leaf", "prompt"):
        raise ValueError(
            f"objective.advantage.scope is {credit.scope}, but fans are compared within their tree "
            "(leaf) or over those of the prompt (prompt): use one of these with edges: fan"
        )


def check_spo(plan: TreePlan) -> None:
    """Raise ValueError for a tree without trained siblings."""
    if not any(move.train and move.branch > 1 for move in plan.moves):
        raise ValueError(
            "objective.kind is spo, which compares the children of one latent, but no step that "
            "rollout.tree trains has more than one child: use a tree that branches where it "
            "trains, such as branch_grpo, tree_grpo or tempflow, or the objective grpo"
        )


def check_noising(noising: NoisingOptions, steps: int) -> None:
    """Raise ValueError when a schedule of `steps` has fewer noise levels than `noising` takes."""
    times = noising.times
    if times.kind != "schedule" and times.kind != "strata":
        return
    left = max(0, int(steps * times.fraction + 1e-9) - (times.kind == "strata"))
    if noising.count > left:
        raise ValueError(
            f"objective.noising.count is {noising.count}, but objective.noising.times leaves "
            f"{left} of the rollout's {steps} noise levels: the nearest that works is "
            f"{max(left, 1)}" + (", with a larger fraction" if left < 1 else "")
        )


def check_sharding(
    runtime: RuntimeOptions,
    pipeline: PipelineOptions,
    memory: MemoryOptions,
    rollout: RolloutOptions,
) -> None:
    """Check that nothing copies or changes the weights of a network that is in parts."""
    if runtime.shard is None:
        return
    explore = rollout.explore
    for option, value, works in (
        ("rollout.merge_lora", rollout.merge_lora is True, "auto"),
        ("pipeline.compile", pipeline.compile, "false"),
        ("rollout.explore.precision", explore is not None and explore.precision != "bf16", "bf16"),
        ("pipeline.precision", pipeline.precision not in (None, "bf16"), "null"),
        ("memory.base_bits", memory.base_bits is not None, "null"),
    ):
        if value:
            raise ValueError(
                f"runtime.shard is {runtime.shard}, and {option} needs the whole network on every "
                f"process: set {option} to {works}, or runtime.shard to null"
            )
