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
from flowrl.config.rollout import OptimOptions, ReferenceOptions, SamplingOptions
from flowrl.config.sections import (
    HeldOutOptions,
    LoRAOptions,
    MemoryOptions,
    PipelineOptions,
    PromptOptions,
    RunOptions,
    RuntimeOptions,
)
from flowrl.trees.plan import TreePlan, count

Plans = Mapping[TreePlan, int]  # each with the first iteration that samples it
Conflict = tuple[str, object, str]  # an option, whether it cannot stay, and what works


def refuse(why: str, *conflicts: Conflict) -> None:
    """Raise ValueError for the first option that cannot stay as it is, with a value that can."""
    for option, conflict, works in conflicts:
        if conflict:
            raise ValueError(f"{why}: {option} must be {works}")


def check_rollout(rollout: SamplingOptions, optim: OptimOptions, objective: Objective) -> None:
    """Check the kernel's noise, and that updates take whole groups of as many images as needed."""
    center = getattr(getattr(objective, "advantage", None), "center", "group")
    refuse(
        "the last step of a rollout has no noise",
        ("rollout.num_inference_steps", rollout.num_inference_steps < 2, "at least 2"),
    )
    too_strong = rollout.kernel == "cps" and rollout.noise_level > 1
    refuse(
        "rollout.kernel is cps, which has replaced all noise at a level of 1",
        ("rollout.noise_level", too_strong, "at most 1"),
    )
    refuse(
        "an image is compared with the others of its prompt, unless "
        "objective.advantage.center is tracker",
        ("rollout.group_size", rollout.group_size < 2 and center != "tracker", "at least 2"),
    )
    prompts = rollout.prompts_per_iteration
    refuse(
        f"an update takes whole groups, and rollout.prompts_per_iteration is {prompts}",
        ("optim.updates_per_rollout", prompts % optim.updates_per_rollout, "a divisor of that"),
    )


def check_plans(plans: Plans, rollout: SamplingOptions, objective: Objective) -> None:
    """Check that every tree of the run suits the objective and the kernel."""
    if rollout.store is None:
        check_states(objective.states, plans, rollout)
    for plan in plans:
        if isinstance(objective, GRPOOptions):
            check_credit(objective.advantage, plan)
        if isinstance(objective, SPOOptions):
            check_spo(plan)
        alone = rollout.store is not None or all(move.branch == 1 for move in plan.moves)
        refuse(
            "rollout.look_ahead compares siblings, and the images of rollout.store, or of this "
            "rollout.tree, have none",
            ("rollout.look_ahead", alone and rollout.look_ahead, "null"),
        )


def check_states(states: str, plans: Plans, rollout: SamplingOptions) -> None:
    """Check that the trees hold what the objective learns from; clean images are in all of them."""
    for plan, iteration in plans.items():
        if states == "transitions" and not count(plan).trained_edges:
            raise ValueError(
                f"in iteration {iteration} rollout.tree has no step to learn from: give it one "
                "with noise and training that rollout.depth_pruning leaves"
            )
        forks = plan.fans or any(move.noise or move.branch > 1 for move in plan.moves)
        refuse(
            "this objective goes back along chains without noise and branches",
            ("rollout.tree", states == "path" and forks, "{kind: ode}"),
        )
    other = rollout.training_guidance_scale not in (None, rollout.guidance_scale)
    refuse(
        "this objective learns from the rollout's own steps, with their guidance",
        ("rollout.training_guidance_scale", states in ("transitions", "path") and other, "null"),
    )


def check_explore(plans: Plans, rollout: SamplingOptions, seed: int) -> None:
    """Check that there are candidates to choose among, each with a noise of its own."""
    explore = rollout.explore
    if explore is None:
        return
    refuse(
        "rollout.store names groups that were sampled before",
        ("rollout.explore", rollout.store is not None, "null"),
    )
    most = max(plan.roots for plan in plans)
    refuse(
        f"{most} trees of a prompt are selected among rollout.explore.candidates",
        ("rollout.explore.candidates", explore.candidates < most, f"at least {most}"),
    )
    steps, whole = explore.num_inference_steps, rollout.num_inference_steps
    cheap = steps is None or 2 <= steps <= whole
    refuse(
        f"rollout.num_inference_steps is {whole}, and candidates take no more",
        ("rollout.explore.num_inference_steps", not cheap, f"2 to {whole}"),
    )
    stops = explore.stop_at is not None
    refuse(
        "rollout.explore.stop_at stops candidates that grow as rollout.tree does",
        ("rollout.explore.num_inference_steps", stops and steps is not None, "null"),
        ("rollout.explore.stop_at", (explore.stop_at or 0) >= whole, f"below {whole}"),
    )
    one_noise = any(plan.same_noise or plan.roots == 1 for plan in plans)
    refuse(
        f"rollout.explore chooses among noises, and {rollout.tree.kind} has one noise a prompt",
        ("rollout.tree", one_noise, "one with several roots, such as {kind: flow_grpo}"),
    )
    candidates = (rollout.candidates(iteration, seed) for iteration in plans.values())
    mixed = explore.select == "most_mixed" and any(count(c).leaves == c.roots for c in candidates)
    refuse(
        "rollout.explore.select is most_mixed, which compares the images of one candidate, and "
        f"with {rollout.tree.kind} it has one",
        ("rollout.tree", mixed, "one that splits before rollout.explore.stop_at"),
    )


def check_precision(pipeline: PipelineOptions, rollout: SamplingOptions) -> None:
    """Check that rollouts can be sampled in the precision of training."""
    exact = pipeline.precision in (None, "bf16")
    refuse(
        f"pipeline.precision is {pipeline.precision or 'null'}, which quantises no layer",
        ("pipeline.quantize_gradients", exact and pipeline.quantize_gradients, "false"),
    )
    refuse(
        f"pipeline.precision is {pipeline.precision}, which keeps the adapter beside the packed "
        "weights in training, and rollouts that fold it in would be another policy's",
        ("rollout.merge_lora", pipeline.precision and rollout.merge_lora is True, "auto or false"),
    )


def check_graphs(
    pipeline: PipelineOptions,
    memory: MemoryOptions,
    rollout: SamplingOptions,
    objective: Objective,
) -> None:
    """Check that CUDA graphs find the tensors that they hold, and nothing that was not tried."""
    if pipeline.compile != "graphs":
        return
    refuse(
        "pipeline.compile is graphs, which hold the addresses of the weights",
        ("rollout.merge_lora", rollout.merge_lora is True, "auto or false"),
    )
    refuse(
        "pipeline.compile is graphs, which were not tried with activations computed again",
        ("memory.gradient_checkpointing", memory.gradient_checkpointing, "false"),
        ("objective.kind", objective.recomputes, "one that computes each network once"),
    )


def check_frozen_weights(
    runtime: RuntimeOptions,
    pipeline: PipelineOptions,
    memory: MemoryOptions,
    rollout: SamplingOptions,
) -> None:
    """Check that nothing copies or changes frozen weights that are in parts or in few bits."""
    in_parts, bits, explore = runtime.shard is not None, memory.base_bits, rollout.explore
    if not in_parts and bits is None:
        return
    why = f"memory.base_bits is {bits}, which leaves no exact weights to work on"
    if in_parts:
        why = f"runtime.shard is {runtime.shard}, so that no process has the whole network"
    refuse(
        why,
        ("rollout.merge_lora", rollout.merge_lora is True, "auto or false"),
        ("pipeline.compile", pipeline.compile, "false"),
        ("rollout.explore.precision", explore and explore.precision != "bf16", "bf16"),
        ("pipeline.precision", pipeline.precision not in (None, "bf16"), "null"),
        ("memory.base_bits", in_parts and bits, "null"),
    )


def check_objective(
    objective: Objective, rollout: SamplingOptions, optim: OptimOptions, *, gates: bool
) -> None:
    """Check that the objective's options agree with each other and with those of other sections.

    gates: whether a reward has one.
    """
    gdpo = getattr(getattr(objective, "advantage", None), "rewards", "sum") == "gdpo"
    refuse(
        "a reward has a gate, which counts scores and not z-scores",
        ("objective.advantage.rewards", gates and gdpo, "sum"),
    )
    no_dt = isinstance(objective, GRPOOptions) and objective.kl_form == "latent_no_dt"
    refuse(
        "rollout.kernel is cps, which has no step length of an SDE to leave out",
        ("objective.kl_form", no_dt and rollout.kernel == "cps", "latent_dt"),
    )
    noising = getattr(objective, "noising", None)
    if noising is not None and rollout.store is None:
        check_noising(noising, rollout.num_inference_steps)


def sampled_before_scores(rollout: SamplingOptions) -> tuple[Conflict, ...]:
    """Return the options by which an iteration does not wait for the scores of the one before."""
    return (
        ("rollout.staleness", rollout.staleness, "0"),
        ("rollout.explore", rollout.explore, "null"),
        ("rollout.store", rollout.store, "null"),
    )


def check_book(
    prompts: PromptOptions, rollout: SamplingOptions, optim: OptimOptions, objective: Objective
) -> None:
    """Check that the book of prompts sees each iteration's scores in time, and all that read it."""
    advantage: AdvantageOptions | None = getattr(objective, "advantage", None)
    if prompts.book is not None:
        refuse(
            "prompts.book counts the successes of all images of an iteration before it chooses the "
            "next prompts",
            *sampled_before_scores(rollout),
        )
        least, largest = 2 * rollout.group_size, prompts.book.largest_group
        inside_trees = getattr(advantage, "scope", "prompt") not in ("prompt", "joint")
        refuse(
            "prompts.book.largest_group makes groups of rollout.group_size images and of more",
            ("prompts.book.largest_group", largest and largest < least, f"at least {least}"),
            ("prompts.refiner", largest and prompts.refiner, "null"),
            ("optim.updates_per_rollout", largest and optim.updates_per_rollout > 1, "1"),
            ("objective.advantage.scope", largest and inside_trees, "prompt or joint"),
        )
        refuse(
            "prompts.book.sizes are those of prompts.book.largest_group, which is null",
            ("prompts.book.sizes", not largest and prompts.book.sizes != "success", "success"),
        )
    if advantage is None:
        return
    reads = advantage.center == "tracker" or advantage.emphasis
    refuse(
        "objective.advantage.center: tracker and emphasis read what is remembered of prompts",
        ("prompts.book", reads and prompts.book is None, "set, for example to {choose: uniform}"),
    )
    if advantage.center == "group":
        return
    refuse(
        "objective.advantage.center is tracker, which compares all images of an iteration by their "
        "rewards",
        ("objective.kind", isinstance(objective, ComparedOptions), "one that compares no images"),
        ("objective.advantage.rewards", advantage.rewards == "gdpo", "sum"),
        ("objective.advantage.scope", getattr(advantage, "scope", "prompt") != "prompt", "prompt"),
    )


def check_refiner(
    prompts: PromptOptions, rollout: SamplingOptions, memory: MemoryOptions, plans: Plans
) -> None:
    """Check that new texts can be encoded in each iteration, and learned from before the next."""
    if prompts.refiner is None:
        return
    refuse(
        "prompts.refiner draws new texts for each iteration and learns from all their images "
        "before the next",
        *sampled_before_scores(rollout),
        ("memory.text_encoders", memory.text_encoders != "keep", "keep"),
        ("memory.prompt_cache", memory.prompt_cache, "null"),
    )
    roots = min(plan.roots for plan in plans)
    refuse(
        f"prompts.refiner compares trees of different words, and a prompt has {roots}",
        ("rollout.tree", roots < 2, "one with several roots, such as {kind: flow_grpo}"),
        ("prompts.refiner.own_words", prompts.refiner.own_words > roots, f"at most {roots}"),
    )


def check_reference(reference: ReferenceOptions, objective: Objective, run: RunOptions) -> None:
    """Check that there is a pull where the reference moves or only some images are pulled."""
    raised = run.on_hacking is not None and run.on_hacking.action == "raise_kl"
    pulls = raised or getattr(objective, "kl_coef", 0)
    moves, selective = reference != ReferenceOptions(), getattr(objective, "kl_on", None)
    refuse(
        f"objective.kind {objective.kind} has no KL penalty",
        ("reference", moves and not hasattr(objective, "kl_coef"), "left out"),
    )
    refuse(
        "objective.kl_on and reference are about the KL penalty, which is 0",
        ("objective.kl_coef", (moves or selective) and not pulls, "above 0"),
    )
    refuse(
        f"objective.kind {objective.kind} compares with the reference itself, which moves by "
        "objective.anchor_every",
        ("reference", moves and "anchor_every" in type(objective).model_fields, "left out"),
    )


def check_hacking(
    run: RunOptions, evaluation: HeldOutOptions, objective: Objective, lora: LoRAOptions
) -> None:
    """Check that `run.on_hacking` has evaluations during training, and what to compare with."""
    if run.on_hacking is None:
        return
    by_images = run.on_hacking.held_out is None
    refuse(
        "run.on_hacking.held_out is null, which compares images with the base's",
        ("lora.init_from", by_images and lora.init_from, "null"),
    )
    refuse(
        "run.on_hacking compares evaluations during training",
        ("evaluation.every", not evaluation.every, "a number of iterations, for example 10"),
    )
    if run.on_hacking.action != "raise_kl":
        return
    kl_coef = getattr(objective, "kl_coef", None)
    refuse(
        f"objective.kind {objective.kind} has no kl_coef to raise",
        ("run.on_hacking.action", kl_coef is None, "stop, rollback or warn"),
    )
    refuse(
        f"objective.kl_coef is {kl_coef} from the start",
        ("run.on_hacking.kl_coef", run.on_hacking.kl_coef <= (kl_coef or 0), "above that"),
    )


def check_credit(credit: CreditOptions, plan: TreePlan) -> None:
    """Raise ValueError for a comparison that the trees do not have, or that means nothing."""
    scope, siblings = "objective.advantage.scope", credit.edges == "sibling"
    alone = count(plan).leaves == plan.roots
    refuse(
        "each tree of rollout.tree has one image, so that no two images share a tree",
        (scope, alone and credit.scope in ("leaf", "depth", "sibling"), "prompt"),
        ("objective.advantage.edges", alone and siblings, "node"),
        ("objective.advantage.keep", alone and credit.keep == "parent_top1", "extreme"),
    )
    refuse(
        "objective.advantage.edges: sibling compares a node and its parent with the same nodes",
        (scope, siblings and credit.scope in ("depth", "sibling"), "prompt, leaf or joint"),
    )
    refuse(
        "objective.advantage.edges: fan compares images of one tree or of one prompt",
        (scope, credit.edges == "fan" and credit.scope not in ("leaf", "prompt"), "leaf or prompt"),
    )


def check_spo(plan: TreePlan) -> None:
    """Raise ValueError for a tree without trained siblings."""
    alone = not any(move.train and move.branch > 1 for move in plan.moves)
    refuse(
        "objective.kind is spo, which compares the children of one latent",
        ("rollout.tree", alone, "one that branches where it trains, such as {kind: branch_grpo}"),
    )


def check_noising(noising: NoisingOptions, steps: int) -> None:
    """Raise ValueError when a schedule of `steps` has fewer noise levels than `noising` takes."""
    times = noising.times
    if times.kind != "schedule" and times.kind != "strata":
        return
    left = max(0, int(steps * times.fraction + 1e-9) - (times.kind == "strata"))
    refuse(
        f"objective.noising.times leaves {left} of the rollout's {steps} noise levels",
        ("objective.noising.times.fraction", left < 1, "larger"),
        ("objective.noising.count", noising.count > left, f"at most {left}"),
    )
