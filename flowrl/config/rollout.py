"""The options of rollouts and optimiser, each with its meaning and source."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from flowrl.trees.plan import LookAhead, PlanError, Step, TreePlan
from flowrl.trees.presets import FlowGRPOOptions, Tree, chains
from flowrl.trees.windows import DepthPruning
from flowrl.utils.fields import (
    Count,
    Flag,
    NonNegative,
    Number,
    Options,
    Positive,
    Several,
    Text,
    Whole,
    option,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import AdamW


DenoisingSteps = Annotated[Count, Field(le=1000)]  # noise levels that networks are trained on
SOL_RL = "Sol-RL, arXiv 2604.06916"
Precision = Literal["auto", "nvfp4", "fp8", "bf16", "nvfp4-emulated"]
PRECISIONS = (
    "nvfp4 (compute capability 10 and above), fp8 (8.9 and above), bf16 (not quantised: the "
    "pipeline's own dtype), nvfp4-emulated (the numbers of nvfp4 anywhere, not its speed), or "
    "auto, the cheapest that this device really has"
)


class AuditOptions(Options):
    """Comparison of the candidates' ranking with that of exact images."""

    every: Whole = option(
        50, "Iterations between two audits, the first before any rollout; 0 is never."
    )


SelectRule = Literal[
    "best_worst", "max_variance", "mean_deviation", "extremes_random", "most_mixed", "random"
]


class ExploreOptions(Options):
    """The first of two stages of a rollout."""

    candidates: Several = option(
        96,
        "Trees per prompt that are sampled cheaply; as many as rollout.tree has are selected.",
        SOL_RL,
    )
    num_inference_steps: DenoisingSteps | None = option(
        6,
        "Denoising steps of a candidate, without noise, on a schedule of their own. null samples "
        "candidates with rollout.tree itself, noise included; use it if rollout.tree has noise, "
        "because candidates without noise do not predict its images.",
        "6 of 10 in Sol-RL; 4 of 10 gave most of the gain",
    )
    stop_at: Count | None = option(
        None,
        "Stop candidates, which grow as rollout.tree does, after this many steps and score their "
        "estimated clean images; null samples them to the end. Needs num_inference_steps: null. "
        "With precision: bf16 those selected go on from there, else from their noise. Noise after "
        "these steps is not foreseen.",
        "ARRoL, arXiv 2603.24840, prunes texts so; for flows the estimate is x - sigma v",
    )
    select: SelectRule = option(
        "best_worst",
        "Which candidates are selected: the best and the worst half; the subset with the largest "
        "variance of scores; those furthest from the mean; the best, the worst and random ones; "
        "trees whose own images differ most in their scores (TRACE, arXiv 2606.11119); or random "
        "ones alone.",
        SOL_RL,
    )
    precision: Precision = option(
        "auto",
        f"Precision of candidates: {PRECISIONS}. pipeline.min_dim keeps small layers exact.",
        f"nvfp4 in {SOL_RL}",
    )
    audit: AuditOptions = option(
        AuditOptions(), "How candidates are compared with exact images; rho below 0.8 is a warning."
    )

    def forwards(self, steps: int) -> int:
        """Return the forwards of a candidate without branches; steps: of the rollout."""
        if self.stop_at is not None:
            return self.stop_at + 1  # the last one estimates the clean image
        return self.num_inference_steps or steps


class WorkerOptions(Options):
    """Processes elsewhere that sample rollouts and score them."""

    count: Annotated[Count, Field(le=10_000)] = option(
        2,
        "Number of workers, each on its own GPU if there are GPUs; workers without a place wait "
        "until a machine joins.",
    )
    address: Text | None = option(
        None,
        "Address of a running Ray cluster, such as head:6379; auto is the one of this machine; "
        "null starts Ray on this machine, and stops it with the run.",
    )


FLOW_GRPO = "Flow-GRPO, arXiv 2505.05470"
FLOW_GRPO_CODE = "Flow-GRPO's published settings"


class SamplingOptions(Options):
    """How images to learn from are sampled."""

    prompts_per_iteration: Several = option(
        8, "Prompts, hence groups, in one iteration.", "published: 16 to 48"
    )
    group_size: Several = option(
        12,
        "Images of one prompt, the leaves of its trees, which are compared with each other.",
        "published: 8 to 24",
    )
    tree: Tree = option(
        FlowGRPOOptions(),
        "Which steps branch, are stochastic and are trained; a preset by its kind, shown by "
        "`flowrl tree KIND`.",
    )
    depth_pruning: DepthPruning | None = option(
        None, "Steps that are sampled but not learned from, moving as training goes; null is none."
    )
    look_ahead: LookAhead | None = option(
        None,
        "Drop siblings that lead to alike images a step after they part: one goes on for all of "
        "them, and counts as often. null drops none.",
        "LATR, arXiv 2510.24302, for texts",
    )
    num_inference_steps: DenoisingSteps = option(
        8, "Denoising steps of a rollout.", "published: 10"
    )
    guidance_scale: NonNegative = option(
        1.0,
        "Classifier-free guidance in rollouts and training; 1 is none, and half the work.",
        "4.5 in Flow-GRPO's base recipe; none in its fast recipe, which its authors now advise",
    )
    training_guidance_scale: NonNegative | None = option(
        None,
        "Guidance in training, where it differs from that of rollouts; null is the same. "
        "Objectives on denoising steps require the value of rollouts.",
        "1 in DGPO and in Flow-GRPO's online DPO, whose rollouts are guided",
    )
    negative_prompt: str = option(
        "", "Negative prompt for prompts without their own; used if guidance > 1."
    )
    kernel: Literal["flow_sde", "dance_sde", "cps", "overshoot"] = option(
        "flow_sde",
        "The stochastic step: flow_sde (noise a*sqrt(s/(1-s))), dance_sde (constant noise), "
        "cps (keeps the coefficients, no excess noise) or overshoot (flow_sde's noise for few "
        "steps: denoises too far and adds noise back).",
        "arXiv 2505.05470, 2505.07818, 2509.05952",
    )
    noise_level: Positive = option(
        0.7,
        "Strength of the noise: a for flow_sde and overshoot, eta for dance_sde, a in (0, 1] for "
        "cps.",
        "published: 0.7 for flow_sde, 0.3 for dance_sde, 0.8 for cps",
    )
    staleness: Literal[0, 1] = option(
        0,
        "1 samples the next iteration's images before learning from the current one, so that "
        "workers and rewards run during learning. Ratios and old policies use the weights that "
        "sampled. Objectives on the reward's gradient need 0.",
    )
    workers: WorkerOptions | None = option(
        None,
        "Sample and score in other processes, here or on other machines, through Ray: the weights "
        "are the same bit for bit, whichever of them work. null samples in this process.",
    )
    batch_size: Count = option(96, "Most images that go through the network at once.")
    merge_lora: Literal["auto"] | Flag = option(
        "auto",
        "Fold the adapter into the weights while sampling, which is faster; auto folds where that "
        "is exact enough for the log-probabilities.",
    )
    explore: ExploreOptions | None = option(
        None,
        "Sample many more candidates first, cheaply, and only the selected ones as above, from the "
        "same noise; null samples no more than are learned from.",
        "Sol-RL, arXiv 2604.06916",
    )
    store: Text | None = option(
        None,
        "Folder of an offline data set to learn from, as flowrl collect makes it; null samples new "
        "groups in each iteration.",
    )

    @property
    def learning_guidance_scale(self) -> float:
        """The guidance of training."""
        scale = self.training_guidance_scale
        return self.guidance_scale if scale is None else scale

    @property
    def fixed(self) -> bool:
        """Whether all iterations have the same plan."""
        return self.tree.static and self.depth_pruning is None

    @property
    def prunes_in_place(self) -> bool:
        """Whether one network samples candidates and, from where they stopped, selected ones.

        Those go on unless the tree has fans before the stop, see `TreePlan.goes_on_from`.
        """
        e = self.explore
        return e is not None and e.stop_at is not None and e.precision == "bf16"

    def plans(self, seed: int) -> TreePlan | Callable[[int], TreePlan]:
        """Return the plan of all iterations, or what makes each one's where they differ."""
        return self.plan(0, seed) if self.fixed else partial(self.plan, seed=seed)

    def plan(self, iteration: int, seed: int) -> TreePlan:
        """Return the plan of an iteration. Raises PlanError for what cannot work."""
        steps, leaves, pruned = self.num_inference_steps, self.group_size, self.depth_pruning
        try:
            whole = self.tree.plan(iteration=iteration, steps=steps, leaves=leaves, seed=seed)
        except PlanError as error:
            if "rollout." in str(error):
                raise
            raise PlanError(
                f"rollout.tree {self.tree.kind}: {error}", leaves=error.leaves
            ) from error
        if self.look_ahead is not None:
            whole = replace(whole, look_ahead=self.look_ahead)
        return whole if pruned is None else whole.without_training(pruned.steps(iteration, steps))

    def candidates(self, iteration: int, seed: int) -> TreePlan:
        """Return the plan of an iteration's candidates; needs `explore`."""
        e = self.explore
        assert e is not None
        if e.stop_at is not None:
            whole, rest = self.plan(iteration, seed), self.num_inference_steps - e.stop_at
            steps = whole.steps[: e.stop_at] + (Step(),) * rest
            stopped = replace(whole, roots=e.candidates, steps=steps, fans=(), stop_at=e.stop_at)
            if self.prunes_in_place and whole.goes_on_from(stopped):
                return replace(stopped, continuation=whole)
            return stopped
        if e.num_inference_steps is not None:
            return chains(e.num_inference_steps, e.candidates, noisy=())
        return replace(self.plan(iteration, seed), roots=e.candidates)


class OptimOptions(Options):
    """AdamW and the size of its steps."""

    lr: Positive = option(3e-4, "Learning rate.", FLOW_GRPO_CODE)
    schedule: Literal["constant", "linear"] = option(
        "constant",
        "What becomes of the learning rate: it stays, or falls linearly to 0 at run.iterations.",
        "constant in the published recipes; short runs end calmer when it falls",
    )
    warmup: Whole = option(
        0,
        "Iterations of a linear rise at the start; 0 is none. Where the rate falls, too, both "
        "count. AdamW's first step moves every weight by about the rate, however small its "
        "gradient.",
    )
    weight_decay: NonNegative = option(1e-4, "AdamW's weight decay.", FLOW_GRPO_CODE)
    max_grad_norm: Positive = option(
        1.0, "Gradients longer than this are shortened.", FLOW_GRPO_CODE
    )
    updates_per_rollout: Count = option(
        1,
        "Optimiser steps for one rollout. With 1 the policy is its own old policy: the ratio is 1 "
        "and the clip cannot bind.",
        "2 in Flow-GRPO's published settings",
    )
    micro_batch: Count = option(
        96, "Most forwards in one backward pass; smaller needs less memory, same gradient."
    )

    def build(self, parameters: "Iterable[Tensor]") -> "AdamW":
        from torch.optim import AdamW

        return AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)


class ReferenceOptions(Options):
    """When the reference of the KL penalty moves from the base to the policy of that moment.

    Without either the penalty pulls to the base for the whole run.
    """

    every: Count | None = option(None, "Iterations between moves; null is never.")
    above_kl: Positive | None = option(
        None,
        "Moves after an iteration whose mean policy/kl exceeds this; null is never. Its unit is "
        "that of objective.kl_form, where there is one.",
        "Astrolabe: at most 15 iterations, or a bound of 0.15 that it adapts",
    )


class EMAOptions(Options):
    """A moving average of the adapter."""

    decay: Annotated[Number, Field(gt=0, lt=1)] | None = option(
        None,
        "Share kept at every update; the average is then what is evaluated and saved. null is off.",
        "0.9, warmed up, every 8 updates, in Flow-GRPO; 0.995 in DanceGRPO",
    )
