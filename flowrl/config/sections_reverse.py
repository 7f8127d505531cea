"""The options of objectives on the reverse process: they learn from denoising steps."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flowrl.config.sections_credit import Credit
from flowrl.trees.plan import TreePlan
from flowrl.utils.fields import NonNegative, Positive, Section, option

FLOW_GRPO = "Flow-GRPO, arXiv 2505.05470"
SPO = "SPO, arXiv 2406.04314"


class Grpo(Section):
    """Group-relative policy optimisation with a clipped ratio."""

    states: ClassVar[str] = "transitions"
    kind: Literal["grpo"] = option("grpo", "The objective.", FLOW_GRPO)
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
    credit: Credit = option(Credit(), "From the rewards of pictures to the advantages of steps.")


class Spo(Section):
    """SPO: at every split, the child that leads to better pictures against the one to worse."""

    states: ClassVar[str] = "transitions"
    kind: Literal["spo"] = option("spo", "Step-aware preference optimisation.", SPO)
    logratio_beta: Positive = option(
        10.0, "Scale of the log-ratio to the base model, averaged over the latent.", f"10 in {SPO}"
    )
    clip: Annotated[Positive, Field(lt=1)] = option(
        0.1,
        "How far the ratio to the base model may be from 1 before a child pulls no further, "
        "either way.",
        f"0.1 in {SPO}",
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
    path_coef: NonNegative = option(
        1.0, "Factor on the log-probabilities that weigh; used unless fusion is uniform."
    )


def check_spo(plan: TreePlan) -> None:
    """Raise ValueError for a tree in which nothing is learned from that has a sibling."""
    if not any(move.train and move.branch > 1 for move in plan.moves):
        raise ValueError(
            "objective.kind is spo, which compares the children of one latent, but no step that "
            "rollout.tree trains has more than one child: use a tree that branches where it "
            "trains, such as branch_grpo, tree_grpo or tempflow, or the objective grpo"
        )
