"""The options of exploring: many cheap candidates, of which the telling ones are drawn exactly."""

from typing import Annotated, Literal

from pydantic import Field

from flowrl.utils.fields import Count, Flag, Number, Section, Text, Whole, option

SOL_RL = "Sol-RL, arXiv 2604.06916"
Precision = Literal["auto", "nvfp4", "fp8", "bf16", "nvfp4-emulated"]
PRECISIONS = (
    "nvfp4 (compute capability 10 and above), fp8 (8.9 and above), bf16 (not quantised: the "
    "pipeline's own dtype), nvfp4-emulated (the numbers of nvfp4 anywhere, not its speed), or "
    "auto, the cheapest that this device really has"
)


class Audit(Section):
    """Do the candidates' scores rank as the exact ones do?"""

    every: Whole = option(
        50, "Iterations between audits, the first before the first rollout; 0 is never."
    )
    prompts: Count = option(
        2, "Prompts of the iteration whose candidates are all drawn exactly, of rollout.prompts."
    )
    min_rho: Annotated[Number, Field(ge=-1, le=1)] = option(
        0.8,
        "Spearman's rank correlation of candidates and exact scores within a prompt, averaged over "
        "prompts, that is enough.",
        "published: 0.9 to 0.94 pooled, for CLIPScore, PickScore, HPSv2 and ImageReward",
    )
    on_miss: Literal["degrade", "stop", "warn"] = option(
        "degrade",
        "What happens below it: degrade goes on in the next higher precision (nvfp4, fp8, bf16) "
        "and says so, stop ends the run, warn goes on as it is. Where rollout.tree has noise that "
        "candidates lack, degrade only warns.",
    )


class Explore(Section):
    """The first of two stages of a rollout."""

    candidates: Count = option(
        96, "Trees of each prompt that are drawn cheaply; those of rollout.tree are kept.", SOL_RL
    )
    steps: Count | None = option(
        6,
        "Denoising steps of a candidate, without noise, on a schedule of their own; null grows "
        "rollout.tree itself, with its noise: take it where rollout.tree has any, which candidates "
        "without noise cannot see.",
        "6 of 10 in Sol-RL; 4 of 10 gave most of the gain",
    )
    select: Literal["best_worst", "mean_deviation", "extremes_random", "random"] = option(
        "best_worst",
        "Which candidates are kept: the best and the worst half; those furthest from the mean; the "
        "best, the worst and others at random; or any.",
        SOL_RL,
    )
    precision: Precision = option(
        "auto", f"In which candidates are computed: {PRECISIONS}.", f"nvfp4 in {SOL_RL}"
    )
    lora: Literal["merge", "side"] = option(
        "merge",
        "How the adapter meets quantised weights: merge quantises their sum anew before every "
        "rollout, side keeps the adapter beside them in full precision.",
        f"merge in {SOL_RL}",
    )
    four_over_six: Flag = option(
        False,
        "For nvfp4: map each block's largest value to 6 or to 4, whichever errs less.",
        "arXiv 2512.02010",
    )
    keep_layers: list[Text] | None = option(
        None,
        "Regular expressions of names of layers that stay exact; null is the backbone's list, "
        "which another one replaces.",
        SOL_RL,
    )
    min_dim: Whole | None = option(
        None,
        "Layers stay exact unless the larger of their two sizes is above this; null is the "
        "backbone's.",
        f"1000 for FLUX.1, 2432 for SD3.5-Large, 2240 for SANA in {SOL_RL}",
    )
    audit: Audit = option(Audit(), "How candidates are compared with exact pictures.")
