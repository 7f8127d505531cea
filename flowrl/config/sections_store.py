"""The options of stored groups."""

from pydantic import model_validator

from flowrl.utils.fields import Count, Section, Text, option


class Store(Section):
    """Groups that were drawn before, by flowrl collect."""

    path: Text | None = option(
        None, "Folder of the store to learn from; null draws the groups of each iteration anew."
    )
    refresh_every: Count | None = option(
        None,
        "Iterations after which the policy draws as many groups again, and training goes on from "
        "those; null keeps the store. The reference stays the base.",
    )
    cache_draws: Count | None = option(
        None,
        "Points on the way to noise that each picture is looked at, over and over: the reference's "
        "errors there are computed once and kept. null draws new points each time.",
    )

    @model_validator(mode="after")
    def _check(self) -> "Store":
        for name in ("refresh_every", "cache_draws"):
            if self.path is None and getattr(self, name) is not None:
                raise ValueError(
                    f"rollout.store.{name} is set without rollout.store.path: name the folder of a "
                    "store, as flowrl collect makes it, or set it to null"
                )
        return self
