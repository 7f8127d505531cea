"""The name of a recipe's method in papers, for tables, cards and pages."""

from flowrl.config import Config


def method_name(config: Config) -> str:
    """Return the recipe's method as papers call it."""
    explore = config.rollout.explore
    name = config.objective.title or config.rollout.tree.title
    if explore is None:
        return name
    chosen = config.rollout.plan(0, config.run.seed).roots
    text = f"{name} on {chosen} of {explore.candidates} candidates"
    return text if chosen == explore.candidates else f"{text} (Sol-RL)"
