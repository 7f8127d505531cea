"""The options of objectives on the forward process: they learn from clean pictures."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flowrl.utils.fields import Count, Flag, NonNegative, Number, Positive, Section, Whole, option

UnitInterval = Annotated[NonNegative, Field(le=1)]

NFT = "DiffusionNFT, arXiv 2509.16117"
DPO = "Diffusion-DPO, arXiv 2311.12908"
GDRO = "GDRO, arXiv 2601.02036"
AWM = "AWM, arXiv 2509.25050"
KTO = "Diffusion-KTO, arXiv 2404.04465"
DGPO = "DGPO, arXiv 2510.08425"
LAIR = "Diffusion-LAIR, arXiv 2605.26491"


class UniformTimes(Section):
    kind: Literal["uniform"] = option("uniform", "All noise levels alike.")
    shift: Positive = option(1.0, "Moves them towards noise above 1, as a schedule's shift does.")


class LogitNormalTimes(Section):
    kind: Literal["logit_normal"] = option(
        "logit_normal", "The logistic function of a normal number.", "SD3's pretraining"
    )
    mean: Number = option(0.0, "Of the normal number; above 0 means more noise.")
    std: Positive = option(1.0, "Of the normal number.")


class ScheduleTimes(Section):
    kind: Literal["schedule"] = option("schedule", "The rollout's own noise levels.", NFT)
    fraction: Annotated[Positive, Field(le=1)] = option(
        1.0, "Share of them to choose from, the noisiest first.", "0.9 in AWM's code"
    )
    skip_first: Flag = option(False, "Leave pure noise out.", "AWM's code")


Times = Annotated[UniformTimes | LogitNormalTimes | ScheduleTimes, Field(discriminator="kind")]


class Draws(Section):
    """Where pictures are looked at on their way to noise."""

    count: Count = option(
        1, "Points for each picture, a forward each; averaged before pictures are compared."
    )
    share: Literal["group", "image"] = option(
        "group",
        "Whether pictures of a prompt get the same time and noise, which then cancel when they are "
        "compared, or each picture its own.",
    )
    stratified: Flag = option(
        False, "One point from each of `count` equal parts of the noise levels."
    )
    times: Times = option(UniformTimes(), "Noise levels; kind: uniform, logit_normal, schedule.")


class Advantage(Section):
    """From the rewards of a prompt's pictures to their advantages."""

    rewards: Literal["sum", "gdpo"] = option(
        "sum",
        "Several rewards: their weighted sum, or the weighted sum of each reward's distance from "
        "its mean in the group, in standard deviations (gdpo). A picture that lacks one of its "
        "scores is left out of a sum; under gdpo that reward alone counts 0.",
        "gdpo: GDPO, arXiv 2601.05242, with scale auto, ddof 0 and floor 1e-4",
    )
    center: Literal["mean", "median"] = option("mean", "What is subtracted.")
    scale: Literal["auto", "std", "mad", "none", "global"] = option(
        "auto", "What divides: as under a step's credit.", "global in DiffusionNFT, std in most"
    )
    ddof: Literal[0, 1] = option(0, "0 for the population's standard deviation, 1 the sample's.")
    floor: Positive = option(1e-4, "Added to the divisor.", "1e-4 in Flow-GRPO and DiffusionNFT")
    clip: Positive = option(5.0, "Largest advantage, either sign.", "Flow-GRPO, DiffusionNFT, AWM")


class FixedAnchor(Section):
    kind: Literal["base"] = option("base", "The frozen network, throughout.")


class MovingAnchor(Section):
    kind: Literal["moving"] = option(
        "moving", "The policy of some iterations ago, which then also draws the pictures."
    )
    every: Count = option(
        40, "Iterations after which it is renewed.", "Flow-GRPO's online DPO: about 40"
    )


Anchor = Annotated[FixedAnchor | MovingAnchor, Field(discriminator="kind")]
IMPLICIT_BETA = (
    "Scale of the implicit reward -implicit_beta (error - anchor's error), errors averaged over "
    "the latent."
)


class Compared(Section):
    """What objectives have in common that compare the policy's errors with an anchor's."""

    states: ClassVar[str] = "endpoints"
    weighting: Literal["uniform", "elbo", "eps"] = option(
        "uniform",
        "Weight of a point: uniform, elbo (the one of the likelihood, (1 - t) / t) or eps (the "
        "noise's error, (1 - t)^2).",
    )
    anchor: Anchor = option(
        FixedAnchor(),
        "What errors are compared with; kind: base, moving. With a moving one the change adds up.",
    )
    kl_coef: NonNegative = option(0.0, "Weight of the pull to the base model's velocity.")
    draws: Draws = option(Draws(), "Where pictures are looked at.")


class OldDecay(Section):
    """How slowly the old policy follows: the share of it that stays at each iteration."""

    start: Whole = option(0, "Iterations before the share begins to rise.", "75 for OCR in NFT")
    rate: NonNegative | None = option(
        0.001, "How much it rises an iteration; null is to its limit at once.", f"0.001 in {NFT}"
    )
    limit: UnitInterval = option(
        0.5, "The share at which it stays; 0 is a copy at each iteration.", f"0.5 in {NFT}"
    )


class Nft(Section):
    """DiffusionNFT: towards pictures with a high reward, away from those with a low one."""

    states: ClassVar[str] = "endpoints"
    kind: Literal["nft"] = option("nft", "Negative-aware fine-tuning.", NFT)
    nft_mix: Positive = option(
        1.0, "How far the policy's part of both velocities goes; smaller is bolder.", f"{NFT}"
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
    advantage: Advantage = option(Advantage(scale="global"), "From rewards to advantages.", NFT)
    kl_coef: NonNegative = option(1e-4, "Weight of the pull to the base model's velocity.", NFT)
    draws: Draws = option(
        Draws(share="image", times=ScheduleTimes(), count=4),
        "Where pictures are looked at.",
        "9 of the 10 steps in DiffusionNFT's settings",
    )
    old_decay: OldDecay = option(OldDecay(), "How the policy that draws follows.", NFT)


class Dpo(Compared):
    """Diffusion-DPO: the best picture of a prompt against the worst, or stored pairs."""

    kind: Literal["dpo"] = option("dpo", "Direct preference optimisation.", DPO)
    implicit_beta: Positive = option(
        100.0, IMPLICIT_BETA, "100 in Flow-GRPO's online DPO, 2000 to 5000 for SD1.5"
    )
    sft_coef: NonNegative = option(
        0.0, "Weight of the winner's own error, against both errors rising together."
    )
    draws: Draws = option(
        Draws(times=LogitNormalTimes()), "Where pictures are looked at.", "Flow-GRPO's code"
    )


class Gdro(Compared):
    """GDRO: the ranking of a group's implicit rewards learns that of its rewards."""

    kind: Literal["gdro"] = option("gdro", "Group-level direct reward optimisation.", GDRO)
    implicit_beta: Positive = option(6.0, IMPLICIT_BETA, f"6 for GenEval, 12 for OCR in {GDRO}")
    tau: NonNegative = option(
        0.05, "Temperature of the rewards; 0 counts their order alone.", f"{GDRO}"
    )
    form: Literal["suffixes", "top1"] = option(
        "suffixes",
        "Compare all pictures, then all but the best, and so on; or all pictures once, which does "
        "not depend on the order of ties.",
        "equations 7 and 6",
    )
    top1_coef: NonNegative = option(
        1.0, "Weight of the best picture's own error.", f"1.0 for GenEval, 0.5 for OCR in {GDRO}"
    )


class Sft(Section):
    """Fine-tuning on each prompt's best pictures."""

    states: ClassVar[str] = "endpoints"
    kind: Literal["sft"] = option("sft", "Fine-tuning on the best pictures.")
    winners: Literal["all", "one"] = option(
        "all",
        "All of a prompt's pictures that share the highest reward, or one of them by lot "
        "(best-of-n). A prompt whose pictures are all alike is left out.",
    )
    draws: Draws = option(Draws(share="image", times=LogitNormalTimes()), "Where to look.")


class Rwr(Section):
    """Reward-weighted regression."""

    states: ClassVar[str] = "endpoints"
    kind: Literal["rwr"] = option("rwr", "Reward-weighted regression.", "arXiv 2302.12192")
    rwr_lambda: Positive = option(0.2, "Temperature: a picture's weight is exp(reward / it).")
    normalise: Flag = option(
        True, "Divide by the mean weight of the prompt's pictures: then a constant added to all "
        "rewards changes nothing."
    )  # fmt: skip
    draws: Draws = option(Draws(share="image", times=LogitNormalTimes()), "Where to look.")


class Awm(Section):
    """AWM: flow matching weighted by advantages, with a clipped ratio."""

    states: ClassVar[str] = "endpoints"
    kind: Literal["awm"] = option("awm", "Advantage-weighted matching.", AWM)
    likelihood: Literal["uniform", "t", "t2", "huber", "ghuber"] = option(
        "ghuber", "How a picture's error becomes a log-likelihood.", AWM
    )
    clip: Positive = option(1e-5, "Clip of its ratio to the old policy's.", f"about 1e-5 in {AWM}")
    advantage: Advantage = option(Advantage(), "From rewards to advantages.")
    advantage_max: Positive = option(1.0, "Advantages are scaled to this bound.", AWM)
    kl_coef: NonNegative = option(1e-3, "Weight of the pull to the base model's velocity.", AWM)
    old_kl_coef: NonNegative = option(
        0.0, "Weight of the pull to the old policy's velocity.", f"1.0, to an average, in {AWM}"
    )
    old_decay: OldDecay = option(OldDecay(rate=None, limit=0.0), "How the old policy follows.")
    draws: Draws = option(
        Draws(
            count=4,
            share="image",
            stratified=True,
            times=ScheduleTimes(fraction=0.9, skip_first=True),
        ),
        "Where to look.",
        "6 strata of 14 steps in AWM",
    )


class Kto(Compared):
    """Diffusion-KTO: pictures that are liked or not, without pairs."""

    kind: Literal["kto"] = option("kto", "Kahneman-Tversky optimisation.", KTO)
    implicit_beta: Positive = option(1000.0, IMPLICIT_BETA, KTO)
    like_above: Number | None = option(
        None, "Reward above which a picture is liked; null is the mean of its prompt's pictures."
    )
    dislike_weight: Positive = option(1.0, "Weight of pictures that are not liked, against 1.", KTO)
    utility: Literal["sigmoid", "log_sigmoid", "risk_seeking"] = option(
        "sigmoid", "The shape of what is gained.", KTO
    )
    draws: Draws = option(Draws(share="image"), "Where pictures are looked at.", KTO)


class Dgpo(Compared):
    """DGPO, which is GDPO-SR: a preference between the two halves of a group."""

    kind: Literal["dgpo"] = option("dgpo", "Direct group preference optimisation.", DGPO)
    implicit_beta: Positive = option(
        100.0,
        IMPLICIT_BETA,
        f"10 to 100 with the base model in {DGPO}; 2500 group sizes in GDPO-SR",
    )
    form: Literal["logistic", "linear"] = option(
        "logistic", "The loss of the preference, or its first order.", "linear: GDPO-SR, 2603.16769"
    )
    advantage: Advantage = option(Advantage(), "From rewards to advantages.")


class Lair(Compared):
    """Diffusion-LAIR: regress implicit rewards on advantages."""

    kind: Literal["lair"] = option("lair", "Listwise regression of implicit rewards.", LAIR)
    implicit_beta: Positive = option(100.0, IMPLICIT_BETA, "not published; DPO's")
    kappa: Positive = option(1.0, "The optimum of the implicit reward is advantage / kappa.")
    advantage: Advantage = option(Advantage(), "From rewards to advantages.")


def check_draws(draws: Draws, steps: int, pool: int | None = None) -> None:
    """Raise ValueError when a schedule of `steps` has fewer noise levels than are asked for.

    pool: rollout.store.cache_draws, where errors of the base are kept.
    """
    if draws.times.kind != "schedule":
        return
    left = int(steps * draws.times.fraction + 1e-9) - draws.times.skip_first
    name, count = ("objective.draws.count", draws.count)
    if pool is not None:
        name, count = ("rollout.store.cache_draws", pool)
    if count > left:
        raise ValueError(
            f"{name} is {count}, but objective.draws.times leaves {left} of "
            f"the rollout's {steps} noise levels to choose from: the nearest that works is "
            f"{max(left, 1)}" + (", with a larger fraction" if left < 1 else "")
        )
