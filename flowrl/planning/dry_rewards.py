"""Rewards of a rehearsal: the names and properties of the real ones, at no cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from flowrl.config.rewards import HttpExecutor
from flowrl.config.rewards import Reward as RewardSection
from flowrl.errors import UserError
from flowrl.scoring.spec import BUILT_IN, RewardSpec, load_reward
from flowrl.utils.imports import load_callable

STAND_IN = "flowrl.planning.dry_rewards:StandIn"
WAVES = 300.0  # radians from black to white: tiny pictures of one prompt differ by hundredths
KEY = "judged in rehearsal by"  # in a prompt's metadata: names of the rewards that apply to it


class StandIn:
    """A wave over the brightness, between bounds; its mixture of colours depends on the name.

    The wave is short, so that the pictures of a prompt get scores that differ. The same picture
    always gets the same score, and gradients reach it. It applies to a prompt as the real reward
    was found to, which stands in the metadata.
    """

    def __init__(
        self,
        name: str,
        *,
        differentiable: bool = False,
        scope: str = "sample",
        low: float = 0.0,
        high: float = 1.0,
    ):
        self.name, self.differentiable, self.scope = name, differentiable, scope
        self.bounds = low, high
        self.version = f"stand-in of {name}"
        digits = blake2b(name.encode(), digest_size=3).digest()
        shares = torch.tensor([1.0 + digit for digit in digits])
        self.shares = shares / shares.sum()

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """(B, 3, H, W) in [0, 1] -> (B,) fp32 between the bounds."""
        low, high = self.bounds
        bright = (images.float().mean((2, 3)) * self.shares.to(images.device)).sum(1)
        return low + (high - low) * (0.5 + 0.5 * (WAVES * bright).sin())

    def applies(self, prompt: str, metadata: dict) -> bool:
        """As the real reward said of this prompt; to all where nobody asked it."""
        return self.name in metadata.get(KEY, (self.name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What could be learned of a reward without its weights or its server.

    name: in reports. reward: made, but for its weights; or its class or function; None where only
    a server has it.
    """

    name: str
    reward: Any
    entry: RewardSection

    def spec(self) -> RewardSpec | None:
        """The real one as far as it can be asked about prompts; None where it cannot."""
        if self.reward is None or isinstance(self.reward, type):
            return None
        given = {key: tuple(values) for key, values in self.entry.applies_to.items()}
        e = self.entry
        return RewardSpec(
            name=self.name, reward=self.reward, weight=e.weight, held_out=e.held_out,
            applies_to=given,
        )  # fmt: skip

    def applies(self, prompt: str, metadata: dict) -> bool:
        """What the real one says of a prompt, or only the names of the metadata it needs."""
        spec = self.spec()
        if spec is not None:
            return spec.applies(prompt, metadata)
        return all(key in metadata for key in getattr(self.reward, "required_metadata", ()))

    def stand_in(self) -> dict[str, Any]:
        """The recipe's entry with the real scoring replaced; all else stays."""
        low, high = [
            other if bound is None else float(bound)
            for bound, other in zip(
                getattr(self.reward, "bounds", (0.0, 1.0)), (0.0, 1.0), strict=True
            )
        ]
        args = {
            "name": self.name,
            "differentiable": getattr(self.reward, "differentiable", False) is True,
            "scope": getattr(self.reward, "scope", "sample"),
            "low": low,
            "high": high if high > low else low + 1,
        }
        kept = self.entry.model_dump(exclude={"name", "args", "executor", "label"})
        return kept | {"name": STAND_IN, "args": args, "label": self.name}


def tell(entry: RewardSection) -> Told:
    """What a recipe's entry names. Raises UserError for a reward that is not there, or that does
    not take its arguments; weights and servers are not asked for."""
    if isinstance(entry.executor, HttpExecutor):
        return Told(name=entry.label or entry.name, reward=None, entry=entry)
    reward = _made(entry.name, entry.args) if entry.name in BUILT_IN else _found(entry.name)
    name = entry.label or getattr(reward, "name", entry.name)
    # The name of a class may be a property, which only its objects have.
    return Told(name=name if isinstance(name, str) else entry.name, reward=reward, entry=entry)


def _made(name: str, args: Mapping[str, Any]) -> Any:
    """A built-in reward, which loads its weights when it is first asked; or its class, where a
    package that it needs is missing."""
    try:
        return load_reward(name, args)
    except UserError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return _found(BUILT_IN[name])


def _found(target: str) -> Any:
    """One's own reward is not made, which may load weights; only found."""
    if ":" not in target:
        load_reward(target)  # raises the sentence with the known names
    try:
        return load_callable(target)
    except LookupError as error:
        raise UserError(f"cannot load reward {target!r}: {error.args[0]}") from error
