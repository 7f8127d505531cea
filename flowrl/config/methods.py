"""The names of methods in papers, for tables, cards and pages."""

from flowrl.config import Config

# Names of the trees in papers.
TREES = {
    "ode": "GRPO",
    "flow_grpo": "Flow-GRPO",
    "flow_grpo_fast": "Flow-GRPO-Fast",
    "dance_grpo": "DanceGRPO",
    "mix_grpo": "MixGRPO",
    "branch_grpo": "BranchGRPO",
    "branch_grpo_mix": "BranchGRPO-Mix",
    "tree_grpo": "TreeGRPO",
    "b2_diffurl": "B2-DiffuRL",
    "tempflow": "TempFlow-GRPO",
    "g2rpo": "G2RPO",
    "e_grpo": "E-GRPO",
    "custom": "GRPO",
}
# Names of the objectives that are not named after their tree.
OBJECTIVES = {
    "spo": "SPO",
    "nft": "DiffusionNFT",
    "dpo": "Diffusion-DPO",
    "gdro": "GDRO",
    "sft": "SFT on the best images",
    "rwr": "RWR",
    "awm": "AWM",
    "kto": "Diffusion-KTO",
    "dgpo": "DGPO",
    "lair": "LAIR",
    "refl": "ReFL",
    "draft": "DRaFT",
    "draft_lv": "DRaFT-LV",
    "align_prop": "AlignProp",
    "srpo": "SRPO",
    "leap_align": "LeapAlign",
    "flowbp_sparse": "FlowBP-Sparse",
    "flowbp_bridge": "FlowBP-Bridge",
    "flowbp_lagrange": "FlowBP-Lagrange",
    "custom": "an objective of its own",
}
# How candidates are chosen, except Sol-RL's best and worst.
SELECTIONS = {
    "mean_deviation": "those furthest from the mean",
    "extremes_random": "the best, the worst and random ones",
    "random": "chosen at random",
}


def method_name(config: Config) -> str:
    """Return the recipe's method as papers call it."""
    kind, explore = config.objective.kind, config.rollout.explore
    name = TREES[config.rollout.tree.kind] if kind == "grpo" else OBJECTIVES[kind]
    if explore is None:
        return name
    chosen = config.rollout.plan(0, config.run.seed).roots
    text = f"{name} on {chosen} of {explore.candidates} candidates"
    if chosen == explore.candidates:
        return text
    if explore.select == "best_worst":
        return f"{text} (Sol-RL)"
    return f"{text}, {SELECTIONS[explore.select]}"
