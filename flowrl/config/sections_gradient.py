"""The options of objectives that follow the gradient of a differentiable reward."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flowrl.utils.fields import Count, Flag, NonNegative, Number, Positive, Section, option

REFL = "ImageReward, arXiv 2304.05977"
DRAFT = "DRaFT, arXiv 2309.17400"
ALIGNPROP = "AlignProp, arXiv 2310.03739"
SRPO = "SRPO, arXiv 2509.06942"
FLOWBP = "FlowBP, arXiv 2606.11075"

Share = Annotated[Positive, Field(le=1)]
UnitInterval = Annotated[NonNegative, Field(le=1)]

ACTIVE = "Steps of each chain that the gradient reaches, a forward each."
BIAS = "Steps are drawn with weights (i + 1)^bias, i = 0 being the noisiest; 0 is all alike."
GAIN = (
    "How far the steps that are reached stand for all others: their gradient is multiplied by 1 + "
    "this * (length of all steps / their length - 1)."
)
NESTED = (
    "How much of the gradient is kept that goes through the input of the second part's first "
    "velocity; 0 drops it, 1 keeps it whole."
)
FLOOR = (
    "A picture's loss is divided by the sum of its two leaps' mean absolute distances from the "
    "states of the rollout; none counts as smaller than this."
)


class Ascending(Section):
    """What objectives have in common that follow the reward's gradient."""

    states: ClassVar[str] = "path"
    hinge: Number | None = option(
        None,
        "Reward beyond which a picture is good enough and has no gradient: the loss is relu(hinge "
        "- reward); null is minus the reward. In units of the weighted reward.",
        "2.0 for ImageReward in ReFL, 0.55 for HPSv2.1 in FlowBP, 0.7 in SRPO",
    )
    kl_coef: NonNegative = option(
        0.0, "Weight of the pull to the base model's velocity, against pictures that cheat."
    )


class Refl(Ascending):
    """ReFL: the reward of what one late step predicts."""

    kind: Literal["refl"] = option("refl", "Reward feedback learning.", REFL)
    window: Share = option(
        0.25,
        "Share of the steps, the last ones, of which one is drawn for each picture.",
        f"the last 10 of 40 in {REFL}; the last 11 of 25 in FlowBP's comparison",
    )


class Draft(Ascending):
    """DRaFT-K: back-propagation through the last steps."""

    kind: Literal["draft"] = option("draft", "Direct reward fine-tuning.", DRAFT)
    steps: Count = option(
        1,
        "The last steps that the gradient goes back through, one after the other; as many as the "
        "rollout has is full back-propagation.",
        f"1 to 10 in {DRAFT}",
    )


class DraftLv(Ascending):
    """DRaFT-LV: the last step, from several noises."""

    kind: Literal["draft_lv"] = option("draft_lv", "DRaFT of low variance.", DRAFT)
    copies: Count = option(2, "Noises for each picture, a forward and a reward each.", DRAFT)


class UniformTruncation(Section):
    kind: Literal["uniform"] = option("uniform", "Any number of steps alike.")


class GaussianTruncation(Section):
    kind: Literal["gaussian"] = option("gaussian", "A normal number, rounded.")
    mean: Share = option(0.16, "Share of the steps.", "8 of 50 in AlignProp's code")
    std: Positive = option(0.1, "The same.", "5 of 50 in AlignProp's code")


Truncation = Annotated[UniformTruncation | GaussianTruncation, Field(discriminator="kind")]


class AlignProp(Ascending):
    """AlignProp: back-propagation through a random number of last steps."""

    kind: Literal["align_prop"] = option("align_prop", "Randomised truncation.", ALIGNPROP)
    truncation: Truncation = option(
        GaussianTruncation(),
        "How many last steps the gradient goes back through, drawn for each picture; kind: "
        "uniform, gaussian.",
        ALIGNPROP,
    )


class Srpo(Ascending):
    """SRPO: one step with known noise, and a reward relative to other words."""

    kind: Literal["srpo"] = option("srpo", "Semantic relative preference optimisation.", SRPO)
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
        "Extra weight of the first reward at the step towards the picture: near noise, near the "
        "picture.",
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
        "initial", "The noise that the picture was drawn from, or another.", "SRPO's code"
    )


class LeapAlign(Ascending):
    """LeapAlign: two leaps between states of the chain."""

    kind: Literal["leap_align"] = option("leap_align", "Two-leap alignment.", FLOWBP)
    nested_coef: UnitInterval = option(0.3, NESTED, f"LeapAlign's in {FLOWBP}")
    distance_floor: Positive = option(0.1, FLOOR, f"LeapAlign's in {FLOWBP}")


class FlowbpSparse(Ascending):
    """FlowBP-Sparse: a few steps, each on its own."""

    kind: Literal["flowbp_sparse"] = option("flowbp_sparse", "Sparse Euler surrogate.", FLOWBP)
    steps: Count = option(4, ACTIVE, f"4 of 25 in {FLOWBP}; 3 in DRTune, arXiv 2405.00760")
    spacing: Literal["late", "even"] = option(
        "late",
        "Drawn by bias, or in even strides from a random start; even and gain_coef 0 is DRTune "
        "without its early stop.",
        FLOWBP,
    )
    bias: NonNegative = option(1.0, BIAS, FLOWBP)
    gain_coef: UnitInterval = option(0.5, GAIN, FLOWBP)


class FlowbpBridge(Ascending):
    """FlowBP-Bridge: a few steps on both sides of a state that connects them."""

    kind: Literal["flowbp_bridge"] = option("flowbp_bridge", "Bridged surrogate.", FLOWBP)
    steps: Annotated[Count, Field(ge=2)] = option(5, ACTIVE, f"5 of 25 in {FLOWBP}")
    bias: NonNegative = option(4.0, BIAS, FLOWBP)
    gain_coef: UnitInterval = option(0.0, GAIN, f"0 in the code of {FLOWBP}")
    nested_coef: UnitInterval = option(0.5, NESTED, FLOWBP)


class FlowbpLagrange(Ascending):
    """FlowBP-Lagrange: two leaps of higher order."""

    kind: Literal["flowbp_lagrange"] = option("flowbp_lagrange", "Lagrange surrogate.", FLOWBP)
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
