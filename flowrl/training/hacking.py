"""Notice that the trained reward is being hacked, by a held-out one or the radar, and decide."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.config.sections import OnHackingOptions
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.spec import RewardSpec, trained
from flowrl.training.evaluate import Evaluation
from flowrl.training.radar import HALF, HackingScore

# A reward is gamed before it shows: weights count as good up to two thirds of the score that acts.
CLEAN = 2 / 3 * HALF


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What decides about the weights of one evaluation. NaN where it was not measured."""

    trained: float
    quality: float  # the highest is the best; NaN too where the images look hacked
    hacking: HackingScore


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingRule:
    """Act after `patience` evaluations in a row that look like hacking.

    By a held-out reward, see `hacked_since`; without, by the score of the radar.
    """

    options: OnHackingOptions
    sign: float = 1.0  # -1 where less of the held-out reward is better

    @property
    def best_by(self) -> str:
        """Return what decides the best checkpoint: scores by anything else do not compare."""
        return self.options.held_out or "hacking/score"

    def quality(self, evaluation: Evaluation, trained: float, hacking: HackingScore) -> float:
        """Return the held-out mean, higher is better; NaN when no image has it.

        Without a held-out reward the trained score, NaN where the images may look hacked already.
        """
        if self.options.held_out is not None:
            return self.sign * evaluation.mean(self.options.held_out)
        return math.nan if hacking.score > CLEAN else trained

    def kl_coef(self, times: int) -> float | None:
        """Return the coefficient of the penalty after hacking was seen so many times.

        None: the recipe's own.
        """
        return self.options.kl_coef * 4.0 ** (times - 1) if times else None

    def reason(self, history: Mapping[int, Judged]) -> str:
        """Return a sentence that says what was seen, or "" where nothing was.

        history: of evaluations by their iteration.
        """
        by_images = self.options.held_out is None
        return self._looks_hacked(history) if by_images else self._falls(history)

    def _looks_hacked(self, history: Mapping[int, Judged]) -> str:
        latest = [history[step].hacking for step in sorted(history)][-self.options.patience :]
        if len(history) <= self.options.patience:  # the base is one of them
            return ""
        return str(latest[-1]) if all(h.score > HALF for h in latest) else ""

    def _falls(self, history: Mapping[int, Judged]) -> str:
        seen = [
            (step, judged.trained, judged.quality)
            for step, judged in sorted(history.items())
            if not any(map(math.isnan, (judged.trained, judged.quality)))
        ]
        best = hacked_since([pair for _, *pair in seen], self.options.patience)
        if best is None:
            return ""
        (step, reward, quality), (_, last, worse) = seen[best], seen[-1]
        return (
            f"since iteration {step} the trained reward went from {reward:.4g} to {last:.4g}, "
            f"while the held-out {self.options.held_out} went from {self.sign * quality:.4g} to "
            f"{self.sign * worse:.4g}."
        )


def hacking_rule(
    options: OnHackingOptions | None, specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]
) -> HackingRule | None:
    """Return the rule of run.on_hacking, None without. prompts: those of evaluation.

    Raises UserError unless `held_out` names a reward that is held out and applies to some of
    them, and every trained reward does, too: without its score nothing could be compared.
    """
    if options is None:
        return None
    # Rewards that compare images are never measured in an evaluation.
    needed = [s for s in trained(specs) if not s.whole_groups and s.asked_in("evaluation")]
    sign = 1.0
    if options.held_out is not None:
        spec = _held_out_spec(options.held_out, specs)
        needed, sign = [spec, *needed], math.copysign(1, spec.weight)
    elif not needed:
        raise UserError(
            "run.on_hacking compares the trained rewards of evaluations, which measure none of "
            "them: name one that looks at single images, or set the rule to null"
        )
    for spec in needed:
        if not any(spec.applies(p.text, p.metadata) for p in prompts):
            raise UserError(
                f"run.on_hacking compares evaluations of the trained rewards, but {spec.name!r} "
                f"applies to none of the {len(prompts)} held-out prompts: give evaluation.prompts "
                "that it can judge, or more evaluation.num_images, or set the rule to null"
            )
    return HackingRule(options=options, sign=sign)


def _held_out_spec(name: str, specs: Sequence[RewardSpec]) -> RewardSpec:
    """Return the held-out reward of a name. Raises UserError unless evaluations measure it."""
    measured = {
        spec.name: spec
        for spec in specs
        if spec.held_out and spec.asked_in("evaluation") and not spec.whole_groups
    }
    if name not in measured:
        raise UserError(
            f"run.on_hacking.held_out is {name!r}, expected a reward of this run with held_out: "
            "true that evaluations ask about single images: "
            f"{', '.join(measured) or 'there is none'}"
        )
    return measured[name]


def hacked_since(scores: Sequence[Sequence[float]], patience: int) -> int | None:
    """Return since when the trained score went on rising while a held-out one fell; None if not.

    Let b be the latest evaluation with the best held-out score: it is returned where each of the
    last `patience` evaluations comes after b, has a trained score above that at b, and a held-out
    score below that at b.

    scores: (trained, held out) of evaluations in order, finite.
    """
    if not scores:
        return None
    best = max(range(len(scores)), key=lambda i: (scores[i][1], i))
    reward, quality = scores[best]
    # Among those `patience` b itself is not above it.
    return best if all(r > reward and q < quality for r, q in scores[-patience:]) else None
