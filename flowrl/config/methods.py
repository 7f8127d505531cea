"""The name of a recipe's method in papers, for tables, cards and pages."""

from flowrl.config import Config


def method_name(config: Config) -> str:
    """Return the recipe's method as papers call it."""
    explore = config.rollout.explore
    name = config.objective.title or config.rollout.tree.title
    if explore is None:
        return name
    chosen = config.rollout.plan(0, config.run.seed).roots
    how = "Sol-RL" if explore.select == "best_worst" else explore.select
    if explore.stop_at is not None:
        how = "TRACE" if explore.select == "most_mixed" else "pruned by preview"
    return f"{name} on {chosen} of {explore.candidates} candidates ({how})"
