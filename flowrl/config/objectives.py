"""The options of objectives, free of torch. An objective takes its options object."""

import importlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from flowrl.errors import UserError
from flowrl.utils.fields import (
    Count,
    NonNegative,
    Options,
    Positive,
    Text,
    Whole,
    option,
)

UnitInterval = Annotated[NonNegative, Field(le=1)]
Share = Annotated[Positive, Field(le=1)]


class ObjectiveOptions(Options):
    """Options of one objective, with its title and its work, which plans need without torch."""

    component: ClassVar[str]  # module:class, imported when it is built
    title: ClassVar[str] = ""  # as papers call it; "": it is called after its tree
    states: ClassVar[str] = "endpoints"  # what the objective learns from, see `Needs.states`
    group_images: ClassVar[int | None] = None  # of a group that are learned from; None is all
    recomputes: ClassVar[bool] = False  # runs the network once more in the backward pass
    passes: ClassVar[int] = 1  # forwards with a gradient, where no option decides

    def forwards(self, steps: int) -> int:
        """Return the forwards with a gradient of one image, chain or step of a loss, at most.

        steps: of a chain.
        """
        return self.passes

    def build(self, kernel: str = "flow_sde") -> Any:
        """Return the objective; kernel: rollout.kernel, for objectives on denoising steps."""
        return self._load()(self)

    def _load(self) -> Any:
        module, _, name = self.component.partition(":")
        return getattr(importlib.import_module(module), name)


# --- Advantages of images, and credit of denoising steps ---------------------------------------


class AdvantageOptions(Options):
    """From the rewards of a prompt's images to their advantages."""

    rewards: Literal["sum", "gdpo"] = option(
        "sum",
        "Several rewards: their weighted sum, or the weighted sum of each reward's z-scores in the "
        "group (gdpo). An image without one of its scores is left out of a sum; under gdpo that "
        "reward alone counts 0.",
        "gdpo: GDPO, arXiv 2601.05242, with scale auto",
    )
    scale: Literal["auto", "std", "none", "global"] = option(
        "auto",
        "Divisor of an advantage: std of the group, or over all images of the iteration "
        "(global), each plus 1e-4; or 1 (none). auto is global with rewards: gdpo, and std with "
        "rewards: sum.",
        "global in DiffusionNFT and in Flow-GRPO's published runs, std in most later ones",
    )
    center: Literal["group", "tracker"] = option(
        "group",
        "What a reward is compared with. group: the mean of its group. tracker: the mean that "
        "prompts.book remembers of its prompt; the differences are then scaled over all images of "
        "the iteration, and rollout.group_size may be 1.",
        "tracker: single-stream policy optimisation, arXiv 2509.13232",
    )
    emphasis: NonNegative = option(
        0.0,
        "With prompts.book: advantages are multiplied by exp(emphasis * share of failures of the "
        "prompt), divided by the mean of that over the iteration's images, and at most 4; 0 weighs "
        "all prompts equally.",
        "Prompt-GDRO, arXiv 2601.19280, with a bin for each prompt",
    )


class CreditOptions(AdvantageOptions):
    """From the rewards of images to the advantages of denoising steps."""

    fusion: Literal["uniform", "path", "local"] = option(
        "uniform",
        "Value of a node: the mean of the images below it, or weighted by the probability of the "
        "path to each of them, over the whole path (path) or child by child (local).",
        "uniform: BranchGRPO's code; path: its equation 3; local: TreeGRPO, arXiv 2512.08153",
    )
    edges: Literal["node", "sibling", "path", "fan"] = option(
        "node",
        "Credit of a step: the advantage of the node it leads to (node), the gain over its parent "
        "(sibling), the sum over the images below (path), or that sum with images compared only "
        "within their own fan (fan).",
        "node: BranchGRPO; fan: TempFlow-GRPO, arXiv 2508.04324",
    )
    scope: Literal["prompt", "leaf", "depth", "sibling", "joint"] = option(
        "prompt",
        "What a value is compared with: the images of its prompt, those of its tree (leaf), the "
        "nodes of its tree at the same step (depth), its siblings, or all stochastic steps of its "
        "prompt (joint).",
        "prompt: TreeGRPO; depth: BranchGRPO; joint: Stepwise-Flow-GRPO, arXiv 2603.28718",
    )
    keep: Literal["all", "parent_top1", "extreme", "b2_pairs"] = option(
        "all",
        "Images to learn from: all, the best below each last split (parent_top1), a prompt's two "
        "best and two worst (extreme), or the best and worst child of a split where they are far "
        "apart (b2_pairs). The rest still counts in every comparison.",
        "BranchGRPO, arXiv 2509.06040; b2_pairs: B2-DiffuRL, arXiv 2503.11240",
    )


# --- The pull to the base model, by image ------------------------------------------------------


class KLOnOptions(Options):
    """Which images pay the KL penalty: those that another reward ranks differently."""

    reward: Text = option(
        ...,
        "Name of the other reward, trained or held out, which is asked in rollouts (when: both); "
        "more of it must be better.",
    )
    share: Share = option(
        0.2,
        "Share of an iteration's images that pay: those whose ranks in their group, by the trained "
        "reward and by this one, are furthest apart.",
        "0.02 to 0.2, adapted during training, in Astrolabe, arXiv 2603.17051",
    )


class PullOptions(ObjectiveOptions):
    """Options of objectives whose KL penalty is paid image by image."""

    kl_on: KLOnOptions | None = option(
        None,
        "Which images pay the penalty of kl_coef: the share on which another reward disagrees most "
        "with the trained one, as {reward: NAME, share: 0.2}; null is all.",
        "selective KL of Astrolabe, arXiv 2603.17051",
    )


# --- Objectives on the reverse process: they learn from denoising steps -----------------------

FLOW_GRPO = "Flow-GRPO, arXiv 2505.05470"
SPO = "SPO, arXiv 2406.04314"


class StepObjectiveOptions(ObjectiveOptions):
    states: ClassVar[str] = "transitions"

    def build(self, kernel: str = "flow_sde") -> Any:
        from flowrl.functional.sde import KERNELS

        return self._load()(self, KERNELS[kernel])


class GRPOOptions(PullOptions, StepObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.grpo:GRPO"
    kind: Literal["grpo"] = option("grpo", "Policy optimisation with a clipped ratio.", FLOW_GRPO)
    ratio: Literal["gaussian", "normalised"] = option(
        "gaussian",
        "The clipped ratio: of the two Gaussians, whose mean sinks below 1 as the policy moves and "
        "whose gradient is largest at steps with little noise; or normalised against both.",
        "normalised: GRPO-Guard, arXiv 2510.22319, in a form that also holds for cps",
    )
    clip_nats: Positive = option(
        6.5,
        "Clip of one step's log-ratio, summed over the latent, in nats; it does not depend on the "
        "latent's size. Papers that average the log-ratio over the latent publish this value "
        "divided by the number of latent elements.",
        "1e-4 times the 65,536 latent elements of an image of 512 px, Flow-GRPO's published clip",
    )
    trust_nats: Positive | None = option(
        None,
        "Drop a step where the exact KL divergence from the sampling policy exceeds this and its "
        "update would increase it, in place of clipping the ratio; nats, summed over the latent. "
        "null clips. It acts from the second update of a rollout on.",
        "Flow-DPPO, arXiv 2606.11025: 1e-7 (flow_sde) and 1e-6 (cps) per latent element, 0.007 and "
        "0.07 nats for 512 px",
    )
    step_weight: Literal["none", "noise", "equal"] = option(
        "none",
        "Weight of a step's loss, 1 on average over the trained steps: constant; the standard "
        "deviation of its noise, which ratio: normalised contains already; or the weight that "
        "gives all steps equal gradients.",
        "noise: TempFlow-GRPO, arXiv 2508.04324; equal: GRPO-Guard, which divides by the step's "
        "length, the same for flow_sde after its first step",
    )
    step_share: Share = option(
        1.0,
        "Share of an iteration's trained steps to learn from, chosen among all prompts: those with "
        "the largest |advantage| times the velocity's effect on the step. The rest costs no "
        "forward, and no KL penalty holds it.",
        "D3S, arXiv 2509.22115, which multiplies with a token's entropy; that of a step's noise is "
        "the same for all images",
    )
    error_confidence: NonNegative = option(
        0.0,
        "Weigh a step of negative advantage by 1 + this times the nats, 0 to 5, by which the "
        "sampling policy makes it likelier than the base model does; above 0 the base model takes "
        "a forward. It acts once the policy has moved by nats.",
        "ACE, arXiv 2602.21420; 0.5 to 2 elsewhere",
    )
    kl_coef: NonNegative = option(
        0.0, "Weight of the KL penalty to the base model; 0 is none.", "published: 0.01 to 0.04"
    )
    kl_form: Literal["velocity", "latent_dt", "latent_no_dt"] = option(
        "velocity",
        "Form of the KL penalty: squared velocity difference, the exact Gaussian KL per latent "
        "element, or the published code's form without the step length.",
        "velocity: UniGRPO, arXiv 2603.23500; latent_no_dt: Flow-GRPO's code",
    )
    advantage: CreditOptions = option(
        CreditOptions(), "From the rewards of images to the advantages of steps."
    )


class SPOOptions(StepObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.spo:SPO"
    title: ClassVar[str] = "SPO"
    kind: Literal["spo"] = option("spo", "Prefer the best to the worst child of a split.", SPO)
    tau: Positive = option(
        0.1,
        "Temperature of the rewards. A pair counts if softmax([best, worst] / tau) differ by more "
        "than 0.3: if the rewards differ by more than 0.62 tau.",
        f"1 in {SPO}, whose scores are logits of preferences; rewards in [0, 1] need less",
    )


# --- Objectives on the forward process: they learn from clean images ---------------------------

NFT = "DiffusionNFT, arXiv 2509.16117"
DPO = "Diffusion-DPO, arXiv 2311.12908"
GDRO = "GDRO, arXiv 2601.02036"
AWM = "AWM, arXiv 2509.25050"
KTO = "Diffusion-KTO, arXiv 2404.04465"
DGPO = "DGPO, arXiv 2510.08425"
LAIR = "Diffusion-LAIR, arXiv 2605.26491"
ADVANTAGE = "From rewards to advantages."
KL = "Weight of the squared distance from the base model's velocity."
OPD = "OPD, as verl-omni's distill_kl"
NOISING = "How images are noised for the loss."


class UniformTimesOptions(Options):
    kind: Literal["uniform"] = option("uniform", "All noise levels are equally likely.")


class LogitNormalTimesOptions(Options):
    kind: Literal["logit_normal"] = option(
        "logit_normal",
        "The logistic function of a standard normal number.",
        "pretraining of flow models, 2403.03206",
    )


class ScheduleTimesOptions(Options):
    kind: Literal["schedule"] = option("schedule", "The rollout's own noise levels.", NFT)
    fraction: Share = option(1.0, "Share of them to choose from, the noisiest first.")


class StrataTimesOptions(Options):
    kind: Literal["strata"] = option(
        "strata",
        "One noise level from each of `count` equal parts of the schedule, without pure noise.",
        AWM,
    )
    fraction: Share = option(0.9, "Share of the schedule that is used, the noisiest first.", AWM)


Times = Annotated[
    UniformTimesOptions | LogitNormalTimesOptions | ScheduleTimesOptions | StrataTimesOptions,
    Field(discriminator="kind"),
]


class NoisingOptions(Options):
    """How clean images are noised for the loss."""

    count: Count = option(
        1, "Noised versions of each image, a forward each; their errors are averaged."
    )
    share: Literal["group", "image"] = option(
        "group",
        "group: the images of a prompt share times and noise, which cancel when they are compared. "
        "image: each image has its own.",
    )
    times: Times = option(
        UniformTimesOptions(), "Noise levels; kind: uniform, logit_normal, schedule, strata."
    )


PER_IMAGE = NoisingOptions(share="image", times=LogitNormalTimesOptions())


class NoisedOptions(ObjectiveOptions):
    """Options of objectives on clean images, which are noised for the loss."""

    noising: NoisingOptions = option(PER_IMAGE, NOISING)

    def forwards(self, steps: int) -> int:
        return self.noising.count


class OldDecayOptions(Options):
    """The old policy: old <- decay * old + (1 - decay) * policy after each iteration."""

    start: Whole = option(
        0,
        "Iterations before the decay begins to rise.",
        "75 updates, 37.5 iterations, for OCR in NFT",
    )
    rate: NonNegative | None = option(
        0.001, "Rise of the decay an iteration; null is at its limit at once.", f"0.001 in {NFT}"
    )
    limit: UnitInterval = option(
        0.5, "Largest decay; 0 copies the policy after each iteration.", f"0.5 in {NFT}"
    )


class NFTOptions(PullOptions, NoisedOptions):
    component: ClassVar[str] = "flowrl.objectives.nft:NFT"
    title: ClassVar[str] = "DiffusionNFT"
    kind: Literal["nft"] = option(
        "nft", "Moves the policy towards images with high rewards, away from the rest.", NFT
    )
    nft_mix: Positive = option(
        1.0, "Share of the policy in the positive and negative velocity; smaller is bolder.", NFT
    )
    advantage: AdvantageOptions = option(AdvantageOptions(scale="global"), ADVANTAGE, NFT)
    kl_coef: NonNegative = option(1e-4, KL, NFT)
    noising: NoisingOptions = option(
        NoisingOptions(share="image", times=ScheduleTimesOptions(), count=4),
        NOISING,
        "9 of the 10 steps in DiffusionNFT's settings",
    )
    old_decay: OldDecayOptions = option(
        OldDecayOptions(), "Decay of the old policy, which samples the rollouts.", NFT
    )


class AWMOptions(PullOptions, NoisedOptions):
    component: ClassVar[str] = "flowrl.objectives.awm:AWM"
    title: ClassVar[str] = "AWM"
    kind: Literal["awm"] = option("awm", "Flow matching weighted by advantages.", AWM)
    clip: Positive = option(1e-5, "Clip of the ratio to the old policy.", f"about 1e-5 in {AWM}")
    advantage: AdvantageOptions = option(AdvantageOptions(), ADVANTAGE)
    kl_coef: NonNegative = option(1e-3, KL, AWM)
    noising: NoisingOptions = option(
        NoisingOptions(count=4, share="image", times=StrataTimesOptions()),
        NOISING,
        "6 strata of 14 steps in AWM",
    )


class SFTOptions(NoisedOptions):
    component: ClassVar[str] = "flowrl.objectives.sft:SFT"
    title: ClassVar[str] = "SFT on the best images"
    kind: Literal["sft"] = option("sft", "Fine-tuning on each prompt's best images.")


class RWROptions(NoisedOptions):
    component: ClassVar[str] = "flowrl.objectives.sft:RWR"
    title: ClassVar[str] = "RWR"
    kind: Literal["rwr"] = option("rwr", "Reward-weighted regression.", "arXiv 2302.12192")
    tau: Positive = option(
        0.2, "Temperature: an image's weight is exp(reward / tau), over its group's mean."
    )


class TeacherOptions(Options):
    """A teacher, and the prompts that it teaches."""

    lora: Text | None = option(
        ...,
        "The teacher's LoRA: a file, a folder or a name on the Hub; null is the base model, and "
        "keeps the student at it.",
    )
    where: dict[str, str | int | float | bool] = option(
        {}, "Metadata of the prompts that it teaches, such as {tag: counting}; {} is all of them."
    )


class DistillOptions(NoisedOptions):
    component: ClassVar[str] = "flowrl.objectives.distill:Distill"
    title: ClassVar[str] = "on-policy distillation"
    kind: Literal["distill"] = option(
        "distill", "Learns from other LoRAs at its own images: several become one.", OPD
    )
    teachers: Annotated[list[TeacherOptions], Field(min_length=1)] = option(
        ..., "The teachers. A prompt's is the first whose `where` matches its metadata."
    )
    noising: NoisingOptions = option(
        NoisingOptions(share="image", times=ScheduleTimesOptions(), count=4), NOISING
    )


IMPLICIT_BETA = (
    "Scale of the implicit reward -implicit_beta (error - anchor's error), errors averaged over "
    "the latent."
)


class ComparedOptions(PullOptions, NoisedOptions):
    """Options of objectives that compare the policy's errors with an anchor's."""

    anchor_every: Count | None = option(
        None,
        "Iterations after which the anchor, which also samples, is replaced by the policy, so that "
        "changes add up; null compares with the base model throughout.",
        "Flow-GRPO's online DPO: about 40",
    )
    kl_coef: NonNegative = option(0.0, KL)
    noising: NoisingOptions = option(NoisingOptions(), NOISING)


class DPOOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.dpo:DPO"
    title: ClassVar[str] = "Diffusion-DPO"
    group_images: ClassVar[int | None] = 2  # the best and the worst
    kind: Literal["dpo"] = option("dpo", "A prompt's best image against its worst, or pairs.", DPO)
    implicit_beta: Positive = option(
        100.0, IMPLICIT_BETA, "100 in Flow-GRPO's online DPO, 2000 to 5000 for SD1.5"
    )
    noising: NoisingOptions = option(
        NoisingOptions(times=LogitNormalTimesOptions()), NOISING, "Flow-GRPO's code"
    )


class KTOOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.dpo:KTO"
    title: ClassVar[str] = "Diffusion-KTO"
    kind: Literal["kto"] = option(
        "kto", "Images above their prompt's mean are liked, the others disliked.", KTO
    )
    implicit_beta: Positive = option(1000.0, IMPLICIT_BETA, KTO)
    noising: NoisingOptions = option(NoisingOptions(share="image"), NOISING, KTO)


class DGPOOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.dpo:DGPO"
    title: ClassVar[str] = "DGPO"
    kind: Literal["dgpo"] = option("dgpo", "A preference between the halves of a group.", DGPO)
    implicit_beta: Positive = option(
        100.0, IMPLICIT_BETA, f"10 to 100 with the base model in {DGPO}"
    )
    advantage: AdvantageOptions = option(AdvantageOptions(), ADVANTAGE)


class GDROOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.gdro:GDRO"
    title: ClassVar[str] = "GDRO"
    kind: Literal["gdro"] = option("gdro", "Implicit rewards learn the rewards' ranking.", GDRO)
    implicit_beta: Positive = option(6.0, IMPLICIT_BETA, f"6 for GenEval, 12 for OCR in {GDRO}")
    tau: NonNegative = option(0.05, "Temperature of the rewards; 0 counts their order alone.", GDRO)
    form: Literal["suffixes", "top1"] = option(
        "suffixes",
        "Compare all images, then all but the best, and so on; or all images once, which does "
        "not depend on the order of ties.",
        "equations 7 and 6",
    )
    top1_coef: NonNegative = option(
        1.0, "Weight of the best image's own error.", f"1.0 for GenEval, 0.5 for OCR in {GDRO}"
    )


class LAIROptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.gdro:LAIR"
    title: ClassVar[str] = "LAIR"
    kind: Literal["lair"] = option("lair", "Regress implicit rewards on advantages.", LAIR)
    implicit_beta: Positive = option(100.0, IMPLICIT_BETA, "not published; DPO's")
    advantage: AdvantageOptions = option(AdvantageOptions(), ADVANTAGE)


# --- Objectives that follow the gradient of a differentiable reward ----------------------------

REFL = "ImageReward, arXiv 2304.05977"
DRAFT = "DRaFT, arXiv 2309.17400"
ALIGNPROP = "AlignProp, arXiv 2310.03739"
SRPO = "SRPO, arXiv 2509.06942"
FLOWBP = "FlowBP, arXiv 2606.11075"
ACTIVE = "Steps of each chain with a gradient, a forward each."


class RewardBackpropOptions(ObjectiveOptions):
    """Options of all objectives that follow the reward's gradient."""

    states: ClassVar[str] = "path"
    kl_coef: NonNegative = option(0.0, f"{KL} Works against reward hacking.")

    def forwards(self, steps: int) -> int:
        chosen: int | None = getattr(self, "steps", None)  # an option of some
        return self.passes if chosen is None else min(chosen, steps)


class ReFLOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.refl:ReFL"
    title: ClassVar[str] = "ReFL"
    recomputes: ClassVar[bool] = True
    kind: Literal["refl"] = option(
        "refl", "The reward of the image predicted at one of the last quarter of the steps.", REFL
    )


class DRaFTOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.draft:DRaFT"
    title: ClassVar[str] = "DRaFT"
    kind: Literal["draft"] = option("draft", "Back-propagation through the last steps.", DRAFT)
    steps: Count = option(
        1, "Number of last steps with a gradient; all steps are full back-propagation.",
        f"1 to 10 in {DRAFT}",
    )  # fmt: skip


class DRaFTLVOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.refl:DRaFTLV"
    title: ClassVar[str] = "DRaFT-LV"
    passes: ClassVar[int] = 2
    recomputes: ClassVar[bool] = True
    kind: Literal["draft_lv"] = option("draft_lv", "The last step, from two noises.", DRAFT)


class AlignPropOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.draft:AlignProp"
    title: ClassVar[str] = "AlignProp"
    kind: Literal["align_prop"] = option("align_prop", "A random number of last steps.", ALIGNPROP)

    def forwards(self, steps: int) -> int:
        return steps


class SRPOOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.srpo:SRPO"
    title: ClassVar[str] = "SRPO"
    passes: ClassVar[int] = 2
    recomputes: ClassVar[bool] = True
    kind: Literal["srpo"] = option("srpo", "One step with known noise, a relative reward.", SRPO)
    prefixes: tuple[Text, Text] | None = option(
        None,
        "Prefixes of the prompt for a better and for a worse image, such as [Realistic photo, CG "
        "render], for rewards that read prompts. null raises the reward itself, which invites "
        "reward hacking.",
        SRPO,
    )


class LeapAlignOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.leap_align:LeapAlign"
    title: ClassVar[str] = "LeapAlign"
    passes: ClassVar[int] = 2
    kind: Literal["leap_align"] = option("leap_align", "Two leaps between states.", FLOWBP)


class FlowBPSparseOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.flowbp:FlowBPSparse"
    title: ClassVar[str] = "FlowBP-Sparse"
    kind: Literal["flowbp_sparse"] = option("flowbp_sparse", "A few steps, each alone.", FLOWBP)
    steps: Count = option(4, ACTIVE, f"4 of 25 in {FLOWBP}; 3 in DRTune, arXiv 2405.00760")


class FlowBPBridgeOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.flowbp:FlowBPBridge"
    title: ClassVar[str] = "FlowBP-Bridge"
    kind: Literal["flowbp_bridge"] = option("flowbp_bridge", "A few steps around a state.", FLOWBP)
    steps: Annotated[Count, Field(ge=2)] = option(5, ACTIVE, f"5 of 25 in {FLOWBP}")


class FlowBPLagrangeOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.leap_align:FlowBPLagrange"
    title: ClassVar[str] = "FlowBP-Lagrange"
    kind: Literal["flowbp_lagrange"] = option("flowbp_lagrange", "Leaps of higher order.", FLOWBP)

    def forwards(self, steps: int) -> int:
        return min(4, steps)  # two velocities of each leap


class CustomObjectiveOptions(ObjectiveOptions):
    title: ClassVar[str] = "a custom objective"
    states: ClassVar[str] = "any"
    kind: Literal["custom"] = option("custom", "An objective of your own.")
    target: Text = option(
        ..., "Its class or function, as module:attribute: called with `args`, it returns it."
    )
    args: dict[str, Any] = option({}, "Arguments of that call, by name.")

    def build(self, kernel: str = "flow_sde") -> Any:
        from flowrl.objectives.base import check_objective
        from flowrl.utils.imports import load_callable

        try:
            make = load_callable(self.target)
        except LookupError as error:
            raise UserError(f"objective.target cannot be loaded: {error.args[0]}") from error
        try:
            objective = make(**self.args)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"objective.target {self.target} does not accept {self.args}: {error}"
            ) from error
        check_objective(objective, self.target)
        return objective


def _grpo_unless_named(value: Any) -> Any:
    # A change such as objective.kl_coef=0.01 alone is meant for the default objective.
    return {"kind": "grpo"} | value if isinstance(value, dict) else value


Objective = Annotated[
    GRPOOptions | SPOOptions | NFTOptions | DPOOptions | GDROOptions | LAIROptions | DGPOOptions
    | KTOOptions | AWMOptions | RWROptions | SFTOptions | DistillOptions | ReFLOptions
    | DRaFTOptions
    | DRaFTLVOptions | AlignPropOptions | SRPOOptions | LeapAlignOptions | FlowBPSparseOptions
    | FlowBPBridgeOptions | FlowBPLagrangeOptions | CustomObjectiveOptions,
    Field(discriminator="kind"),
    BeforeValidator(_grpo_unless_named),
]  # fmt: skip
