"""The options of objectives. `build()` of each makes the object it describes."""

import functools
import importlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from flowrl.errors import UserError
from flowrl.utils.fields import (
    Choice,
    Count,
    Flag,
    NonNegative,
    Number,
    Options,
    Positive,
    Text,
    Whole,
    option,
)

UnitInterval = Annotated[NonNegative, Field(le=1)]
Share = Annotated[Positive, Field(le=1)]


class ComponentOptions(Options):
    """Options whose names are the arguments of a component, which is imported when it is built."""

    component: ClassVar[str]  # module:attribute, a class or a function

    def build(self) -> Any:
        return self._load()(**self.arguments())

    def _load(self) -> Any:
        module, _, name = self.component.partition(":")
        return getattr(importlib.import_module(module), name)


class FunctionOptions(ComponentOptions):
    """Options of a function that is called later, with further arguments."""

    def build(self) -> Any:
        return functools.partial(self._load(), **self.arguments())


class ObjectiveOptions(ComponentOptions):
    states: ClassVar[str] = "endpoints"  # what the objective learns from, see `Needs.states`

    def build(self, kernel: str = "flow_sde") -> Any:
        """Return the objective; kernel: rollout.kernel, for objectives on denoising steps."""
        return super().build()


# --- Advantages of images, and credit of denoising steps ---------------------------------------

BRANCH_GRPO = "BranchGRPO, arXiv 2509.06040"
PATH_COEF = "Factor on the log-probabilities that weigh; used unless fusion is uniform."
D3S = "D3S, arXiv 2509.22115"
B2_PAIRS = "B2-DiffuRL, arXiv 2503.11240"


class AdvantageOptions(ComponentOptions):
    """From the rewards of a prompt's images to their advantages."""

    component: ClassVar[str] = "flowrl.objectives.advantage:Advantages"
    rewards: Literal["sum", "gdpo"] = option(
        "sum",
        "Several rewards: their weighted sum, or the weighted sum of each reward's distance from "
        "its mean in the group, in standard deviations (gdpo). An image that lacks one of its "
        "scores is left out of a sum; under gdpo that reward alone counts 0.",
        "gdpo: GDPO, arXiv 2601.05242, with scale auto, ddof 0 and floor 1e-4",
    )
    center: Literal["mean", "median"] = option(
        "mean", "What is subtracted.", "median: MC-GRPO, arXiv 2601.22582, with odd groups"
    )
    scale: Literal["auto", "std", "mad", "none", "global"] = option(
        "auto",
        "What divides: the standard deviation, the median absolute deviation, nothing, or the "
        "standard deviation over all images of the iteration (global). auto is global for gdpo, "
        "whose last step it is, and std for a sum.",
        "global in DiffusionNFT and Flow-GRPO's SD3 settings, std in most later ones; mad: MC-GRPO",
    )
    ddof: Annotated[Literal[0, 1], Choice] = option(
        0, "0 for the population's standard deviation, 1 for the sample's.", "1 in DanceGRPO"
    )
    floor: Positive = option(
        1e-4, "Added to the divisor.", "1e-4 in Flow-GRPO, 1e-8 in BranchGRPO, 1e-3 in MC-GRPO"
    )
    clip: Positive = option(5.0, "Largest advantage, either sign.", "Flow-GRPO, DiffusionNFT, AWM")


class KeepAllOptions(FunctionOptions):
    component: ClassVar[str] = "flowrl.objectives.tree_credit:keep_all"
    kind: Literal["all"] = option("all", "Learn from every image.")


class ParentTop1Options(FunctionOptions):
    component: ClassVar[str] = "flowrl.objectives.tree_credit:keep_parent_top1"
    kind: Literal["parent_top1"] = option(
        "parent_top1", "The best below each last split.", BRANCH_GRPO
    )


class ExtremeOptions(FunctionOptions):
    component: ClassVar[str] = "flowrl.objectives.tree_credit:keep_extreme"
    kind: Literal["extreme"] = option("extreme", "A prompt's best and worst images.", BRANCH_GRPO)
    count: Count = option(2, "How many of the best, and as many of the worst.")


class MaxVarianceOptions(FunctionOptions):
    component: ClassVar[str] = "flowrl.objectives.tree_credit:keep_max_variance"
    kind: Literal["max_variance"] = option("max_variance", "Those that differ most.", D3S)
    count: Count = option(..., "How many images of a prompt are kept.")


class B2PairsOptions(FunctionOptions):
    component: ClassVar[str] = "flowrl.objectives.tree_credit:keep_b2_pairs"
    kind: Literal["b2_pairs"] = option("b2_pairs", "Best and worst child, if far apart.", B2_PAIRS)
    threshold: NonNegative = option(
        0.5, "Advantage that a best child needs, and a worst one below 0.", "B2-DiffuRL's code"
    )


Keep = Annotated[
    KeepAllOptions | ParentTop1Options | ExtremeOptions | MaxVarianceOptions | B2PairsOptions,
    Field(discriminator="kind"),
]


class CreditOptions(AdvantageOptions):
    """From the rewards of images to the advantages of denoising steps."""

    component: ClassVar[str] = "flowrl.objectives.tree_credit:TreeCredit"
    fusion: Literal["uniform", "path", "local"] = option(
        "uniform",
        "A node's value: the mean of the images below it, or weighted by how probable the way to "
        "each of them was, all the way down (path) or child by child (local).",
        "uniform: BranchGRPO's code; path: its equation 3; local: TreeGRPO, arXiv 2512.08153",
    )
    path_coef: NonNegative = option(1.0, PATH_COEF)
    edges: Literal["node", "sibling", "path", "fan"] = option(
        "node",
        "What a step gets: the advantage of the node it leads to (node), the gain over the node it "
        "comes from (sibling), the sum over the images below (path), or that sum with images "
        "compared only within their own fan (fan).",
        "node: BranchGRPO; fan: TempFlow-GRPO, arXiv 2508.04324",
    )
    scope: Literal["prompt", "leaf", "depth", "sibling", "joint"] = option(
        "prompt",
        "What a value is compared with: the images of its prompt, those of its own tree (leaf), "
        "the nodes of its tree at the same step (depth), its siblings, or all stochastic steps of "
        "its prompt (joint).",
        "prompt: TreeGRPO; depth: BranchGRPO; joint: Stepwise-Flow-GRPO, arXiv 2603.28718",
    )
    keep: Keep = option(
        KeepAllOptions(),
        "Which images are learned from; kind: all, parent_top1, extreme, max_variance, b2_pairs. "
        "What is left out still counts in every comparison.",
    )


# --- Objectives on the reverse process: they learn from denoising steps -----------------------

FLOW_GRPO = "Flow-GRPO, arXiv 2505.05470"
SPO = "SPO, arXiv 2406.04314"


class StepObjectiveOptions(ObjectiveOptions):
    states: ClassVar[str] = "transitions"

    def build(self, kernel: str = "flow_sde") -> Any:
        from flowrl.functional.sde import KERNELS

        return self._load()(**self.arguments(), kernel=KERNELS[kernel])


class GRPOOptions(StepObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.grpo:GRPO"
    kind: Literal["grpo"] = option("grpo", "Policy optimisation with a clipped ratio.", FLOW_GRPO)
    ratio: Literal["gaussian", "normalised"] = option(
        "gaussian",
        "The ratio that is clipped: of the two Gaussians, whose mean sinks below 1 as the policy "
        "moves and whose gradient is largest where a step has little noise, or freed of both.",
        "normalised: GRPO-Guard, arXiv 2510.22319, in a form that also holds for cps",
    )
    clip_nats: Positive | None = option(
        6.5,
        "How far one step's log-probability, summed over the latent, may move before its gradient "
        "is cut, in nats; does not depend on the latent's size.",
        "1e-4 times the 65,536 latent elements of SD3.5 at 512 px, Flow-GRPO's published clip",
    )
    clip_eps: Positive | None = option(
        None,
        "The clip as papers give it, on the ratio of latent-mean log-probabilities; set clip_nats "
        "to null to use it.",
        "published: 1e-4 or 1e-5, and 2e-6 or 4e-6 with ratio: normalised, which mean something "
        "else at another resolution",
    )
    step_weight: Literal["none", "noise", "equal"] = option(
        "none",
        "What a step's loss is multiplied by, 1 on average over the trained steps: nothing; the "
        "standard deviation of its noise, which ratio: normalised contains already; or what makes "
        "all steps pull the velocity alike.",
        "noise: TempFlow-GRPO, arXiv 2508.04324; equal: GRPO-Guard, which divides by the step's "
        "length, the same for flow_sde after its first step",
    )
    kl_coef: NonNegative = option(
        0.0, "Weight of the pull to the base model; 0 is none.", "published: 0.01 to 0.04, or 0"
    )
    kl_form: Literal["velocity", "latent_dt", "latent_no_dt"] = option(
        "velocity",
        "What that pull measures: squared velocity difference, the exact Gaussian KL per latent "
        "element, or the published code's form without the step length.",
        "velocity: UniGRPO, arXiv 2603.23500; latent_no_dt: Flow-GRPO's code",
    )
    credit: CreditOptions = option(
        CreditOptions(), "From the rewards of images to the advantages of steps."
    )


class SPOOptions(StepObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.spo:SPO"
    kind: Literal["spo"] = option("spo", "The best against the worst child of each split.", SPO)
    logratio_beta: Positive = option(10.0, "Scale of the mean log-ratio to the base model.", SPO)
    clip: Annotated[Positive, Field(lt=1)] = option(
        0.1, "How far the ratio to the base model may be from 1 before its gradient is cut.", SPO
    )
    min_gap: Annotated[NonNegative, Field(lt=1)] = option(
        0.3,
        "How clearly the best child must be preferred to the worst: tanh((best - worst) / "
        "(2 tau)), the difference of the softmax of the two.",
        f"0.3 in {SPO}",
    )
    tau: Positive = option(
        0.1,
        "What rewards are divided by before that softmax.",
        f"1 in {SPO}, whose scores are logits of preferences; rewards in [0, 1] need less",
    )
    fusion: Literal["uniform", "path", "local"] = option(
        "uniform",
        "A child's value: as under a step's credit.",
        f"{SPO} has a preference model that reads noisy latents",
    )
    path_coef: NonNegative = option(1.0, PATH_COEF)


# --- Objectives on the forward process: they learn from clean images ---------------------------

NFT = "DiffusionNFT, arXiv 2509.16117"
DPO = "Diffusion-DPO, arXiv 2311.12908"
GDRO = "GDRO, arXiv 2601.02036"
AWM = "AWM, arXiv 2509.25050"
KTO = "Diffusion-KTO, arXiv 2404.04465"
DGPO = "DGPO, arXiv 2510.08425"
LAIR = "Diffusion-LAIR, arXiv 2605.26491"
ADVANTAGE = "From rewards to advantages."
KL = "Weight of the pull to the base model's velocity."
NOISING = "How images are noised for the loss."


class UniformTimesOptions(ComponentOptions):
    component: ClassVar[str] = "flowrl.objectives.noising:UniformTimes"
    kind: Literal["uniform"] = option("uniform", "All noise levels alike.")
    shift: Positive = option(1.0, "Moves them towards noise above 1, as a schedule's shift does.")


class LogitNormalTimesOptions(ComponentOptions):
    component: ClassVar[str] = "flowrl.objectives.noising:LogitNormalTimes"
    kind: Literal["logit_normal"] = option(
        "logit_normal", "The logistic function of a normal number.", "SD3's pretraining"
    )
    mean: Number = option(0.0, "Of the normal number; above 0 means more noise.")
    std: Positive = option(1.0, "Of the normal number.")


class ScheduleTimesOptions(ComponentOptions):
    component: ClassVar[str] = "flowrl.objectives.noising:ScheduleTimes"
    kind: Literal["schedule"] = option("schedule", "The rollout's own noise levels.", NFT)
    fraction: Annotated[Positive, Field(le=1)] = option(
        1.0, "Share of them to choose from, the noisiest first.", "0.9 in AWM's code"
    )
    skip_first: Flag = option(False, "Leave pure noise out.", "AWM's code")


Times = Annotated[
    UniformTimesOptions | LogitNormalTimesOptions | ScheduleTimesOptions,
    Field(discriminator="kind"),
]


class NoisingOptions(ComponentOptions):
    """How clean images are noised to learn from them."""

    component: ClassVar[str] = "flowrl.objectives.noising:Noising"
    count: Count = option(
        1, "Noised versions of each image, a forward each; their errors are averaged."
    )
    share: Literal["group", "image"] = option(
        "group",
        "Whether images of a prompt get the same time and noise, which then cancel when they are "
        "compared, or each image its own.",
    )
    stratified: Flag = option(False, "One level from each of `count` equal parts.")
    times: Times = option(
        UniformTimesOptions(), "Noise levels; kind: uniform, logit_normal, schedule."
    )


class FixedAnchorOptions(Options):
    kind: Literal["base"] = option("base", "The frozen network, throughout.")

    def build(self) -> Any:
        return None


class MovingAnchorOptions(Options):
    kind: Literal["moving"] = option("moving", "The policy some iterations ago; it also samples.")
    every: Count = option(
        40, "Iterations after which it is renewed.", "Flow-GRPO's online DPO: about 40"
    )

    def build(self) -> Any:
        from flowrl.objectives.base import OldPolicy
        from flowrl.objectives.nft import renewed

        return OldPolicy(decay=renewed(self.every), samples=True)


Anchor = Annotated[FixedAnchorOptions | MovingAnchorOptions, Field(discriminator="kind")]
IMPLICIT_BETA = (
    "Scale of the implicit reward -implicit_beta (error - anchor's error), errors averaged over "
    "the latent."
)


class ComparedOptions(ObjectiveOptions):
    """What objectives have in common that compare the policy's errors with an anchor's."""

    weighting: Literal["uniform", "elbo", "eps"] = option(
        "uniform",
        "Weight of an error: uniform, elbo (the one of the likelihood, (1 - t) / t) or eps (the "
        "noise's error, (1 - t)^2).",
    )
    anchor: Anchor = option(
        FixedAnchorOptions(),
        "What errors are compared with; kind: base, moving. With a moving one the change adds up.",
    )
    kl_coef: NonNegative = option(0.0, KL)
    noising: NoisingOptions = option(NoisingOptions(), NOISING)


class OldDecayOptions(ComponentOptions):
    """How slowly the old policy follows: the share of it that stays at each iteration."""

    component: ClassVar[str] = "flowrl.objectives.nft:old_decay"
    start: Whole = option(
        0, "Iterations before the share begins to rise.",
        "75 updates, 37.5 iterations, for OCR in NFT",
    )  # fmt: skip
    rate: NonNegative | None = option(
        0.001, "How much it rises an iteration; null is to its limit at once.", f"0.001 in {NFT}"
    )
    limit: UnitInterval = option(
        0.5, "The share at which it stays; 0 is a copy at each iteration.", f"0.5 in {NFT}"
    )


class NFTOptions(ObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.nft:NFT"
    kind: Literal["nft"] = option("nft", "Towards images with high rewards, away from others.", NFT)
    nft_mix: Positive = option(
        1.0, "How far the policy's part of both velocities goes; smaller is bolder.", NFT
    )
    pred_space: Literal["x0", "velocity"] = option(
        "x0", "Where errors are measured.", "x0 in DiffusionNFT's code, velocity in its paper"
    )
    adaptive_weight: Flag = option(
        True, "Divide each error by its mean absolute value.", "DiffusionNFT's code"
    )
    r_map: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = option(
        "all", "Which advantages count, and how they become a number in [0, 1].", NFT
    )
    advantage: AdvantageOptions = option(AdvantageOptions(scale="global"), ADVANTAGE, NFT)
    kl_coef: NonNegative = option(1e-4, KL, NFT)
    noising: NoisingOptions = option(
        NoisingOptions(share="image", times=ScheduleTimesOptions(), count=4),
        NOISING,
        "9 of the 10 steps in DiffusionNFT's settings",
    )
    old_decay: OldDecayOptions = option(OldDecayOptions(), "How the sampling policy follows.", NFT)


class DPOOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.dpo:DPO"
    kind: Literal["dpo"] = option("dpo", "A prompt's best image against its worst, or pairs.", DPO)
    implicit_beta: Positive = option(
        100.0, IMPLICIT_BETA, "100 in Flow-GRPO's online DPO, 2000 to 5000 for SD1.5"
    )
    sft_coef: NonNegative = option(
        0.0, "Weight of the winner's own error, against both errors rising together."
    )
    noising: NoisingOptions = option(
        NoisingOptions(times=LogitNormalTimesOptions()),
        NOISING,
        "Flow-GRPO's code",
    )


class GDROOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.gdro:GDRO"
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


class SFTOptions(ObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.sft:SFT"
    kind: Literal["sft"] = option("sft", "Fine-tuning on each prompt's best images.")
    winners: Literal["all", "one"] = option(
        "all",
        "All of a prompt's images that share the highest reward, or a random one "
        "(best-of-n). A prompt whose images are all alike is left out.",
    )
    noising: NoisingOptions = option(
        NoisingOptions(share="image", times=LogitNormalTimesOptions()), NOISING
    )


class RWROptions(ObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.sft:RWR"
    kind: Literal["rwr"] = option("rwr", "Reward-weighted regression.", "arXiv 2302.12192")
    rwr_lambda: Positive = option(0.2, "Temperature: an image's weight is exp(reward / it).")
    normalise: Flag = option(
        True, "Divide by the mean weight of the prompt's images: then a constant added to all "
        "rewards changes nothing."
    )  # fmt: skip
    noising: NoisingOptions = option(
        NoisingOptions(share="image", times=LogitNormalTimesOptions()), NOISING
    )


class AWMOptions(ObjectiveOptions):
    component: ClassVar[str] = "flowrl.objectives.awm:AWM"
    kind: Literal["awm"] = option("awm", "Flow matching weighted by advantages.", AWM)
    likelihood: Literal["uniform", "t", "t2", "huber", "ghuber"] = option(
        "ghuber", "How an image's error becomes a log-likelihood.", AWM
    )
    clip: Positive = option(1e-5, "Clip of its ratio to the old policy's.", f"about 1e-5 in {AWM}")
    advantage: AdvantageOptions = option(AdvantageOptions(), ADVANTAGE)
    advantage_max: Positive = option(1.0, "Advantages are scaled to this bound.", AWM)
    kl_coef: NonNegative = option(1e-3, KL, AWM)
    old_kl_coef: NonNegative = option(
        0.0, "Weight of the pull to the old policy's velocity.", f"1.0, to an average, in {AWM}"
    )
    old_decay: OldDecayOptions = option(
        OldDecayOptions(rate=None, limit=0.0), "How the old policy follows."
    )
    noising: NoisingOptions = option(
        NoisingOptions(
            count=4,
            share="image",
            stratified=True,
            times=ScheduleTimesOptions(fraction=0.9, skip_first=True),
        ),
        NOISING,
        "6 strata of 14 steps in AWM",
    )


class KTOOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.dpo:KTO"
    kind: Literal["kto"] = option("kto", "Images that are liked or not, without pairs.", KTO)
    implicit_beta: Positive = option(1000.0, IMPLICIT_BETA, KTO)
    like_above: Number | None = option(
        None, "Reward above which an image is liked; null is the mean of its prompt's images."
    )
    dislike_weight: Positive = option(1.0, "Weight of images that are not liked, against 1.", KTO)
    utility: Literal["sigmoid", "log_sigmoid", "risk_seeking"] = option(
        "sigmoid", "The shape of what is gained.", KTO
    )
    noising: NoisingOptions = option(NoisingOptions(share="image"), NOISING, KTO)


class DGPOOptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.dpo:DGPO"
    kind: Literal["dgpo"] = option("dgpo", "A preference between the halves of a group.", DGPO)
    implicit_beta: Positive = option(
        100.0,
        IMPLICIT_BETA,
        f"10 to 100 with the base model in {DGPO}; 2500 group sizes in GDPO-SR",
    )
    form: Literal["logistic", "linear"] = option(
        "logistic", "The loss of the preference, or its first order.", "linear: GDPO-SR, 2603.16769"
    )
    advantage: AdvantageOptions = option(AdvantageOptions(), ADVANTAGE)


class LAIROptions(ComparedOptions):
    component: ClassVar[str] = "flowrl.objectives.gdro:LAIR"
    kind: Literal["lair"] = option("lair", "Regress implicit rewards on advantages.", LAIR)
    implicit_beta: Positive = option(100.0, IMPLICIT_BETA, "not published; DPO's")
    kappa: Positive = option(1.0, "The optimum of the implicit reward is advantage / kappa.")
    advantage: AdvantageOptions = option(AdvantageOptions(), ADVANTAGE)


# --- Objectives that follow the gradient of a differentiable reward ----------------------------

REFL = "ImageReward, arXiv 2304.05977"
DRAFT = "DRaFT, arXiv 2309.17400"
ALIGNPROP = "AlignProp, arXiv 2310.03739"
SRPO = "SRPO, arXiv 2509.06942"
FLOWBP = "FlowBP, arXiv 2606.11075"

ACTIVE = "Steps of each chain that the gradient reaches, a forward each."
BIAS = "Steps are chosen with weights (i + 1)^bias, i = 0 being the noisiest; 0 is all alike."
GAIN = (
    "How far the steps that are reached stand for all others: their gradient is multiplied by 1 + "
    "this * (length of all steps / their length - 1)."
)
NESTED = (
    "How much of the gradient is kept that goes through the input of the second part's first "
    "velocity; 0 drops it, 1 keeps it whole."
)
FLOOR = (
    "An image's loss is divided by the sum of its two leaps' mean absolute distances from the "
    "states of the rollout; none counts as smaller than this."
)


class RewardBackpropOptions(ObjectiveOptions):
    """What objectives have in common that follow the reward's gradient."""

    states: ClassVar[str] = "path"
    hinge: Number | None = option(
        None,
        "Reward beyond which an image is good enough and has no gradient: the loss is relu(hinge "
        "- reward); null is minus the reward. In units of the weighted reward.",
        "2.0 for ImageReward in ReFL, 0.55 for HPSv2.1 in FlowBP, 0.7 in SRPO",
    )
    kl_coef: NonNegative = option(
        0.0, "Weight of the pull to the base model's velocity, against images that cheat."
    )


class ReFLOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.refl:ReFL"
    kind: Literal["refl"] = option("refl", "The reward of what one late step predicts.", REFL)
    window: Share = option(
        0.25,
        "Share of the steps, the last ones, from which each image takes a random one.",
        f"the last 10 of 40 in {REFL}; the last 11 of 25 in FlowBP's comparison",
    )


class DRaFTOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.draft:DRaFT"
    kind: Literal["draft"] = option("draft", "Back-propagation through the last steps.", DRAFT)
    steps: Count = option(
        1,
        "The last steps that the gradient goes back through, one after the other; as many as the "
        "rollout has is full back-propagation.",
        f"1 to 10 in {DRAFT}",
    )


class DRaFTLVOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.refl:DRaFTLV"
    kind: Literal["draft_lv"] = option("draft_lv", "The last step, from several noises.", DRAFT)
    copies: Count = option(2, "Noises for each image, a forward and a reward each.", DRAFT)


class UniformTruncationOptions(FunctionOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.draft:uniform_truncation"
    kind: Literal["uniform"] = option("uniform", "Any number of steps alike.")


class GaussianTruncationOptions(FunctionOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.draft:gaussian_truncation"
    kind: Literal["gaussian"] = option("gaussian", "A normal share of the steps, rounded.")
    mean: Share = option(0.16, "Share of the steps.", "8 of 50 in AlignProp's code")
    std: Positive = option(0.1, "The same.", "5 of 50 in AlignProp's code")


Truncation = Annotated[
    UniformTruncationOptions | GaussianTruncationOptions, Field(discriminator="kind")
]


class AlignPropOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.draft:AlignProp"
    kind: Literal["align_prop"] = option("align_prop", "A random number of last steps.", ALIGNPROP)
    truncation: Truncation = option(
        GaussianTruncationOptions(),
        "How many last steps the gradient goes back through, random for each image; kind: "
        "uniform, gaussian.",
        ALIGNPROP,
    )


class SRPOOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.srpo:SRPO"
    kind: Literal["srpo"] = option("srpo", "One step with known noise, a relative reward.", SRPO)
    positive_words: str = option(
        "",
        "Put before the prompt for the better of two rewards, such as Realistic photo. Give both "
        "or neither: without words the reward itself is raised, which invites cheating. Only for "
        "rewards that read prompts, and each likes other words.",
        SRPO,
    )
    negative_words: str = option("", "Put before the prompt for the worse, such as CG render.")
    denoise_k: tuple[NonNegative, NonNegative] = option(
        (0.1, 0.25),
        "Extra weight of the first reward at the step towards the image: near noise, near the "
        "image.",
        "SRPO's code",
    )
    inversion_k: tuple[NonNegative, NonNegative] = option(
        (0.3, 0.01), "The same at the step towards noise.", "SRPO's code"
    )
    gap: Share = option(0.1, "How far a step goes, in sigma.", "about 0.1 in SRPO's code")
    lowest: Share = option(0.1, "Least of the step's noisier sigmas; at least gap.")
    highest: Share = option(
        0.99, "Largest of them; towards 1 the error of the step to noise grows without bound."
    )
    inversion: Flag = option(
        True, "Also learn from the step towards noise, with the roles of the words exchanged.", SRPO
    )
    noise: Literal["initial", "fresh"] = option(
        "initial", "The image's own initial noise, or another.", "SRPO's code"
    )


class LeapAlignOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.leap_align:LeapAlign"
    kind: Literal["leap_align"] = option("leap_align", "Two leaps between states.", FLOWBP)
    nested_coef: UnitInterval = option(0.3, NESTED, f"LeapAlign's in {FLOWBP}")
    distance_floor: Positive = option(0.1, FLOOR, f"LeapAlign's in {FLOWBP}")


class FlowBPSparseOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.flowbp:FlowBPSparse"
    kind: Literal["flowbp_sparse"] = option("flowbp_sparse", "A few steps, each alone.", FLOWBP)
    steps: Count = option(4, ACTIVE, f"4 of 25 in {FLOWBP}; 3 in DRTune, arXiv 2405.00760")
    spacing: Literal["late", "even"] = option(
        "late",
        "Chosen by bias, or in even strides from a random start; even and gain_coef 0 is DRTune "
        "without its early stop.",
        FLOWBP,
    )
    bias: NonNegative = option(1.0, BIAS, FLOWBP)
    gain_coef: UnitInterval = option(0.5, GAIN, FLOWBP)


class FlowBPBridgeOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.flowbp:FlowBPBridge"
    kind: Literal["flowbp_bridge"] = option("flowbp_bridge", "A few steps around a state.", FLOWBP)
    steps: Annotated[Count, Field(ge=2)] = option(5, ACTIVE, f"5 of 25 in {FLOWBP}")
    bias: NonNegative = option(4.0, BIAS, FLOWBP)
    gain_coef: UnitInterval = option(0.0, GAIN, f"0 in the code of {FLOWBP}")
    nested_coef: UnitInterval = option(0.5, NESTED, FLOWBP)


class FlowBPLagrangeOptions(RewardBackpropOptions):
    component: ClassVar[str] = "flowrl.objectives.reward_backprop.leap_align:FlowBPLagrange"
    kind: Literal["flowbp_lagrange"] = option("flowbp_lagrange", "Leaps of higher order.", FLOWBP)
    supports: Annotated[Count, Field(le=6)] = option(
        3,
        "Velocities of the chain, at most, that a leap is integrated from; with fewer than about "
        "10 steps take 1.",
        FLOWBP,
    )
    active: Count = option(2, "How many of them, from the leap's start, get a gradient.", FLOWBP)
    support_coef: UnitInterval = option(
        0.25, "How much of the gradient those after the first keep.", FLOWBP
    )
    nested_coef: UnitInterval = option(0.1, NESTED, FLOWBP)
    distance_floor: Positive = option(0.2, FLOOR, FLOWBP)
    concentration: tuple[Positive, Positive, Positive] = option(
        (2.0, 6.0, 2.5),
        "Of the Dirichlet law that cuts a chain into the steps before, between and after the two "
        "states that leaps begin at.",
        "SD3.5's settings in the code of FlowBP",
    )
    latest: Share = option(
        0.4, "Largest share of the steps that the last leap spans.", "10 of 25 in FlowBP's code"
    )


class CustomObjectiveOptions(ObjectiveOptions):
    states: ClassVar[str] = "any"
    kind: Literal["custom"] = option("custom", "An objective of your own.")
    target: Text = option(
        ..., "What makes it, as module:attribute: called with `args`, it returns an objective."
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
    | KTOOptions | AWMOptions | RWROptions | SFTOptions | ReFLOptions | DRaFTOptions
    | DRaFTLVOptions | AlignPropOptions | SRPOOptions | LeapAlignOptions | FlowBPSparseOptions
    | FlowBPBridgeOptions | FlowBPLagrangeOptions | CustomObjectiveOptions,
    Field(discriminator="kind"),
    BeforeValidator(_grpo_unless_named),
]  # fmt: skip
