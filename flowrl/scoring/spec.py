"""Load rewards, and describe their part in a run and the prompts they apply to.

A reward is a callable (images, prompts, metadata) -> scores, as `flowrl_rewards` specifies.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from flowrl.config.rewards import GateOptions
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.executors.base import Executor, InlineExecutor, Reward
from flowrl.scoring.executors.user_code import contained_settings
from flowrl.utils.imports import load_callable

BUILT_IN = {
    "geneval": "flowrl_rewards.geneval:GenEval",
    "ocr": "flowrl_rewards.ocr:OCR",
    "compressibility": "flowrl_rewards.jpeg:Compressibility",
    "incompressibility": "flowrl_rewards.jpeg:Incompressibility",
    "brightness": "flowrl_rewards.brightness:Brightness",
    "pickscore": "flowrl_rewards.pickscore:PickScore",
    "clipscore": "flowrl_rewards.clipscore:CLIPScore",
    "hpsv2": "flowrl_rewards.hpsv2:HPSv2",
    "aesthetic": "flowrl_rewards.aesthetic:Aesthetic",
    "hpsv3": "flowrl_rewards.hpsv3:HPSv3",
    "vlm_judge": "flowrl_rewards.vlm_judge:VLMJudge",
    "vlm_questions": "flowrl_rewards.vlm_questions:VLMQuestions",
    "pairwise": "flowrl_rewards.pairwise:PairwiseWinRate",
    "diversity": "flowrl_rewards.diversity:SetDiversity",
    "agreement": "flowrl_rewards.agreement:WordingAgreement",
    "preference": "flowrl_rewards.preference:Preference",
    "taste": "flowrl_rewards.taste:Taste",
    "tiny_colors": "flowrl_rewards.tiny_colors:TinyColors",
    "tiny_judge": "flowrl_rewards.tiny_judge:TinyJudge",
    "tiny_proxy": "flowrl_rewards.tiny_proxy:TinyProxy",
    "tiny_quality": "flowrl_rewards.tiny_quality:TinyQuality",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward and its part in a run."""

    name: str
    reward: Reward
    weight: float = 1.0
    held_out: bool = False  # reported, never trained on
    executor: Executor | None = None  # None calls it in this process
    # Metadata keys and the values that a prompt must have, for example {"tag": ("ocr",)}.
    applies_to: Mapping[str, Collection[Any]] = field(default_factory=dict)
    when: Literal["rollout", "evaluation", "both"] | None = None  # it is asked, see `asked_in`
    gate: GateOptions | None = None  # of the trained reward that an image must pass

    def applies(self, prompt: str, metadata: dict) -> bool:
        """Return whether a prompt is scored: by `applies_to`, required metadata and `applies`.

        Where the reward's own `applies` fails, raises UserError if it is trained; else it warns and
        returns False.
        """
        return self.applicable([prompt], [metadata])[0]

    def applicable(self, prompts: Sequence[str], metadata: Sequence[dict]) -> list[bool]:
        """Return `applies` of each prompt. Settings are contained once, which takes 0.1 ms."""
        with contained_settings(self.name):
            return [self._applies(*pair) for pair in zip(prompts, metadata, strict=True)]

    def _applies(self, prompt: str, metadata: dict) -> bool:
        if any(metadata.get(key) not in values for key, values in self.applies_to.items()):
            return False
        try:
            test = getattr(self.reward, "applies", None)
            present = all(key in metadata for key in getattr(self.reward, "required_metadata", ()))
            if test is None or not present:
                return present
            return bool(test(prompt, metadata))
        except Exception as error:
            message = f"reward {self.name!r}, prompt {prompt!r}: {_one_line(error)}"
            if self.trained:
                raise UserError(message) from error
            warnings.warn(message, stacklevel=2)  # each text once
            return False

    def misfit(self, prompt: str, metadata: dict) -> str | None:
        """Return why the reward cannot score a prompt; None if it can. It may read files."""
        needed = getattr(self.reward, "required_metadata", ())
        if absent := [key for key in needed if key not in metadata]:
            return f"the metadata lack {', '.join(absent)}"
        try:
            if not self.applies(prompt, metadata):
                return "the reward does not apply to this prompt"
        except UserError as error:
            return str(error)
        with contained_settings(self.name):
            return self.refusal(prompt, metadata)

    def refusal(self, prompt: str, metadata: dict) -> str | None:
        """Return why the reward's method `check` refuses a prompt; None if it does not."""
        try:
            getattr(self.reward, "check", lambda *_: None)(prompt, metadata)
        except (UserError, ValueError) as error:
            return str(error)
        except Exception as error:  # a user's reward may raise anything
            return f"{type(error).__name__}: {error}"
        return None

    def asked_in(self, phase: Literal["rollout", "evaluation"] | None) -> bool:
        """Return whether it is asked in a phase; None is outside of both.

        A reward that is only measured is by default asked in evaluations alone, unless it compares
        the images of a prompt, which evaluations do not have.
        """
        default = "both" if self.trained or self.whole_groups else "evaluation"
        return phase is None or (self.when or default) in (phase, "both")

    @property
    def trained(self) -> bool:
        """Return whether it is trained on; other rewards never stop a run."""
        return bool(self.weight) and not self.held_out

    @property
    def whole_groups(self) -> bool:
        """Return whether it compares all images of a prompt, and so needs them in one call."""
        try:
            return getattr(self.reward, "scope", "sample") == "group"
        except UserError:  # a server that does not answer
            if self.trained:
                raise
            return False

    def get_executor(self) -> Executor:
        return self.executor or InlineExecutor(self.reward, self.name)

    def close(self) -> None:
        """End the processes and threads of its executor."""
        if self.executor is not None:
            self.executor.close()


@contextmanager
def closing(specs: Sequence[RewardSpec]) -> Iterator[None]:
    """End the processes and threads of their executors when the block ends."""
    try:
        yield
    finally:
        for spec in specs:
            spec.close()


def trained(specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """Return the rewards that are trained on."""
    return [spec for spec in specs if spec.trained]


def check_gates(specs: Sequence[RewardSpec]) -> None:
    """Check that every gate names a trained reward without one, and that scores begin at 0.

    Raises UserError otherwise: an image that fails has 0 of the gated reward, which must be least.
    """
    names = {spec.name for spec in specs if spec.trained and spec.gate is None}
    for spec in specs:
        if spec.gate is None:
            continue
        if spec.gate.reward not in names:
            raise UserError(
                f"the gate of reward {spec.name!r} names {spec.gate.reward!r}, expected a trained "
                f"reward without a gate: {', '.join(sorted(names))}"
            )
        low = getattr(spec.reward, "bounds", (0.0,))[0]  # a server is asked for them
        if low < 0:
            raise UserError(
                f"reward {spec.name!r} has a gate and scores from {low:g}, expected scores from 0: "
                "an image that fails the gate counts 0, which would be better than a low score"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Scores of L images by R rewards."""

    scores: Tensor  # (L, R) float32, NaN = missing
    valid: Tensor  # (L, R) bool, the score exists
    applicable: Tensor  # (L, R) bool, the reward applies to this prompt
    names: tuple[str, ...]
    errors: dict[str, str] = field(default_factory=dict)  # reward name -> why scores are missing
    seconds: dict[str, float] = field(default_factory=dict)  # reward name -> time it took

    @staticmethod
    def cat(parts: Sequence["RewardResult"]) -> "RewardResult":
        """Join one or more results of the same rewards, image after image."""
        joined = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("scores", "valid", "applicable")
        }
        names = {name for part in parts for name in part.seconds}
        return RewardResult(
            **joined,
            names=parts[0].names,
            errors={name: text for part in reversed(parts) for name, text in part.errors.items()},
            seconds={name: sum(part.seconds.get(name, 0.0) for part in parts) for name in names},
        )


# --- loading --------------------------------------------------------------------------------------


class ArgumentsRefused(UserError):
    """A reward does not take its arguments, or lacks some; the cause is what it raised."""


def load_reward(name: str, args: Mapping[str, Any] | None = None) -> Reward:
    """Return the reward of that name in BUILT_IN, or of "module:attribute".

    Classes are called with args. Modules are searched for last in the working directory.

    Raises:
        UserError: when there is none, and for any error of its module or class.
        ArgumentsRefused: when args do not fit.
    """
    target = BUILT_IN.get(name, name)
    if ":" not in target:
        near = difflib.get_close_matches(name, BUILT_IN, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(BUILT_IN)}."
        raise UserError(f"unknown reward {name!r}: {hint} Your own is written 'module:attribute'.")
    try:
        with contained_settings(name):
            attribute = load_callable(target)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"cannot load reward {name!r} from {target}: {_one_line(error)}") from error
    if not inspect.isclass(attribute):
        return cast(Reward, functools.partial(attribute, **args) if args else attribute)
    try:
        with contained_settings(name):
            return cast(Reward, attribute(**(args or {})))
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentsRefused(f"reward {name!r} does not accept its arguments: {error}") from error
    except Exception as error:
        raise UserError(f"reward {name!r} cannot be made: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """Return the class and text of an exception; of one that is a sentence already the text."""
    text = " ".join(str(error).split())
    plain = text and (type(error) is LookupError or isinstance(error, UserError))
    return text if plain else ": ".join(filter(None, (type(error).__name__, text)))


# --- do rewards and prompts fit? ------------------------------------------------------------------


def check_prompts(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]) -> None:
    """Check before training that rewards and prompts fit.

    Raises UserError when a reward applies to no prompt or cannot judge one, or when a prompt has
    no reward to train on.
    """
    check_judges(specs, prompts)
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    fits = [spec.applicable(texts, metadata) for spec in specs if spec.trained]
    for spec, applies in zip([s for s in specs if s.trained], fits, strict=True):
        if not any(applies):
            needs = ", ".join(getattr(spec.reward, "required_metadata", ())) or "something else"
            raise UserError(
                f"reward {spec.name!r} applies to none of the prompts: "
                f"it needs {needs} in their metadata"
            )
    for prompt, *applies in zip(prompts, *fits, strict=True):
        if fits and not any(applies):
            raise UserError(
                f"no reward applies to the prompt {prompt.text!r}: remove it or add a reward for it"
            )


def check_evaluation(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]) -> None:
    """Raise UserError when there are held-out prompts and no reward applies to any of them."""
    check_judges(specs, prompts)
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    if prompts and not any(any(spec.applicable(texts, metadata)) for spec in specs):
        raise UserError(
            f"no reward applies to any of the {len(prompts)} evaluation.prompts, the first is "
            f"{prompts[0].text!r}: give prompts with the metadata that the rewards need"
        )


def check_judges(specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]) -> None:
    """Raise UserError for the first prompt that a reward applies to and cannot score.

    Rewards with a method `check(prompt, metadata)` say so, for example of malformed metadata.
    """
    for spec in (spec for spec in specs if hasattr(spec.reward, "check")):
        with contained_settings(spec.name):
            for p in prompts:
                reason = (
                    spec.refusal(p.text, p.metadata) if spec._applies(p.text, p.metadata) else ""
                )
                if reason:
                    raise UserError(f"reward {spec.name!r}, prompt {p.text!r}: {reason}")
