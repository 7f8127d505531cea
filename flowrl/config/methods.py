"""The name of a recipe's method in papers, for tables, cards and pages."""

from flowrl.config import Config

# How candidates are chosen, except Sol-RL's best and worst.
SELECTIONS = {
    "mean_deviation": "those furthest from the mean",
    "extremes_random": "the best, the worst and random ones",
    "random": "chosen at random",
}


def method_name(config: Config) -> str:
    """Return the recipe's method as papers call it."""
    explore = config.rollout.explore
    name = config.objective.title or config.rollout.tree.title
    if explore is None:
        return name
    chosen = config.rollout.plan(0, config.run.seed).roots
    text = f"{name} on {chosen} of {explore.candidates} candidates"
    if chosen == explore.candidates:
        return text
    if explore.select == "best_worst":
        return f"{text} (Sol-RL)"
    return f"{text}, {SELECTIONS[explore.select]}"
