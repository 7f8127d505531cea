"""The rewards of a run: the caller's own, or those that the recipe names."""

from collections.abc import Mapping

from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor, Reward
from flowrl.scoring.spec import RewardSpec


def build_rewards(config: Config, given: Mapping[str, Reward] | None = None) -> list[RewardSpec]:
    """Return the rewards in `given`, by name, or those of the recipe.

    Raises UserError when one cannot be made, or when two have one name.
    """
    if given:
        return [
            RewardSpec(name=name, reward=reward, executor=InlineExecutor(reward, name))
            for name, reward in given.items()
        ]
    specs: list[RewardSpec] = []
    try:
        for entry in config.rewards:
            specs.append(entry.build())
            if [spec.name for spec in specs].count(specs[-1].name) > 1:
                raise UserError(
                    f"two rewards are called {specs[-1].name!r}, and scores are kept by name: keep "
                    "one, or give it a label"
                )
    except UserError:
        for spec in specs:
            spec.close()
        raise
    return specs
