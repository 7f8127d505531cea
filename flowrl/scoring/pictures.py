"""What a reward is tried on: pairs of pictures of known order, or a few plain pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.executors.base import Reward
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.imports import load_callable

SIZE = (128, 128)  # height and width of the plain pictures where nothing else is drawn
PROMPTS = 4  # of those it applies to, at most
GENERIC = (
    PromptRecord(
        uid="preflight-0",
        text='a photo of a red square and the word "HELLO"',
        metadata={
            "tag": "colors",
            "include": [{"class": "square", "count": 1, "color": "red"}],
            "ocr_text": "HELLO",
        },
    ),
    PromptRecord(
        uid="preflight-1",
        text="a photo of a dog",
        metadata={"tag": "single_object", "include": [{"class": "dog", "count": 1}]},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Pictures (N, 3, H, W) of one prompt; with `says`, the first must score above the second."""

    pictures: Tensor
    prompt: str
    metadata: dict
    says: str = ""


def trials_of(
    spec: RewardSpec,
    reward: Reward,
    prompts: Sequence[PromptRecord],
    size: tuple[int, int] = SIZE,
) -> list[Trial]:
    """The fixtures of `reward`, or plain pictures for prompts that `spec` applies to.

    prompts: the run's own; with none, generic ones. size: of plain pictures, which a reward may be
    made for. Empty when it applies to no prompt. `reward`
    is the one that knows its fixtures: spec.reward, or its like here when that is on a server.
    Raises UserError for fixtures that are not as the contract says.
    """
    fixtures = getattr(reward, "fixtures", None)
    own = [_trial(spec.name, entry) for entry in fixtures()] if fixtures else []
    if own:
        return own
    fits = [p for p in prompts or GENERIC if _judges(spec, p)]
    stride = max(len(fits) // PROMPTS, 1)
    chosen = fits[::stride][:PROMPTS]
    pictures = plain_pictures(*size)
    return [Trial(pictures=pictures, prompt=p.text, metadata=p.metadata) for p in chosen]


def plain_pictures(height: int, width: int) -> Tensor:
    """(4, 3, height, width): a red square, a blue one, noise, and nothing."""
    square = load_callable("rewards.fixtures:square")
    noise = load_callable("rewards.fixtures:noise")
    blank = load_callable("rewards.fixtures:blank")
    side = max(height, width)
    whole = torch.stack([square("red", side), square("blue", side), noise(side), blank(side)])
    return whole[..., :height, :width]


def _judges(spec: RewardSpec, prompt: PromptRecord) -> bool:
    """Whether it has something to say about a prompt, and can."""
    if not spec.applies(prompt.text, prompt.metadata):
        return False
    try:
        getattr(spec.reward, "check", lambda *_: None)(prompt.text, prompt.metadata)
    except ValueError:
        return False
    return True


def _trial(name: str, entry: Mapping[str, Any]) -> Trial:
    try:
        members = [entry["better"], entry["worse"], *entry.get("others", ())]
        pictures = torch.stack([torch.as_tensor(member).float() for member in members])
        prompt, metadata, says = entry["prompt"], entry["metadata"], entry["says"]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"reward {name!r} has a fixture without the right parts ({type(error).__name__}: "
            f"{error}): make it with rewards.fixtures.fixture, of pictures of one size"
        ) from error
    if pictures.shape[1:2] != (3,) or pictures.ndim != 4:
        raise UserError(
            f"reward {name!r} has a fixture with pictures of shape {tuple(pictures.shape[1:])}, "
            "expected (3, height, width)"
        )
    return Trial(pictures=pictures, prompt=prompt, metadata=dict(metadata), says=says)
