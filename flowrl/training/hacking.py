"""Notice that the trained reward rises while a held-out one falls, and decide what follows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.config.sections import OnHackingOptions
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.spec import RewardSpec, trained
from flowrl.training.evaluate import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingRule:
    """Act after `patience` evaluations in a row that look like hacking, see `is_hacking`."""

    options: OnHackingOptions
    sign: float = 1.0  # -1 where less of the held-out reward is better

    def score(self, evaluation: Evaluation) -> float:
        """Return the held-out mean, higher is better; NaN when no image has it."""
        return self.sign * evaluation.mean(self.options.held_out)

    def kl_coef(self, times: int) -> float | None:
        """Return the coefficient of the penalty after hacking was seen so many times.

        None: the recipe's own.
        """
        return self.options.kl_coef * 4.0 ** (times - 1) if times else None

    def reason(self, history: Mapping[int, tuple[float, float]]) -> str:
        """Return a sentence that says what was seen, or "" where nothing was.

        history: (trained score, `score`) of evaluations by their iteration.
        """
        steps = [step for step in sorted(history) if not any(map(math.isnan, history[step]))]
        scores, held_out = ([history[step][i] for step in steps] for i in (0, 1))
        o = self.options
        if not is_hacking(scores, held_out, o.patience):
            return ""
        best, last = max(steps, key=lambda step: (history[step][1], step)), steps[-1]
        values = [self.sign * history[step][1] for step in (best, last)]
        return (
            f"since iteration {best} the trained reward went from {history[best][0]:.4g} to "
            f"{history[last][0]:.4g}, while the held-out {o.held_out} went from {values[0]:.4g} to "
            f"{values[1]:.4g}."
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
    name = options.held_out
    option = f"run.on_hacking.held_out is {name!r}"
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None:
        names = ", ".join(spec.name for spec in specs)
        raise UserError(f"{option}, expected the name of a reward of this run: {names}")
    if not spec.held_out:
        raise UserError(
            f"{option}, which is trained: name a reward that is only measured, with held_out: true"
        )
    if not spec.asked_in("evaluation"):
        raise UserError(
            f"{option}, whose option when is rollout, so that no evaluation calls it: set that to "
            "both"
        )
    if spec.whole_groups:
        raise UserError(
            f"{option}, which compares the images of a prompt, and evaluation makes one image at a "
            "time: name a reward that looks at single images"
        )
    # Rewards that compare images are never measured in an evaluation.
    for needed in (spec, *(other for other in trained(specs) if not other.whole_groups)):
        if not any(needed.applies(p.text, p.metadata) for p in prompts):
            raise UserError(
                f"run.on_hacking compares {name!r} with the trained rewards, but {needed.name!r} "
                f"applies to none of the {len(prompts)} held-out prompts: give evaluation.prompts "
                "that it can judge, or more evaluation.num_images, or set the rule to null"
            )
    return HackingRule(options=options, sign=-1.0 if spec.weight < 0 else 1.0)


def is_hacking(scores: Sequence[float], held_out: Sequence[float], patience: int) -> bool:
    """Return whether the trained score went on rising while a held-out one fell.

    Both are values at the same evaluations in order; one where either is NaN is left out. Let b
    be the latest evaluation with the best held-out score. True when each of the last `patience`
    evaluations comes after b, has a trained score above that at b, and a held-out score below that
    at b.
    """
    both = zip(scores, held_out, strict=True)
    seen = [pair for pair in both if not any(map(math.isnan, pair))]
    if len(seen) <= patience:
        return False
    best = max(range(len(seen)), key=lambda i: (seen[i][1], i))
    if best >= len(seen) - patience:
        return False
    reward, quality = seen[best]
    return all(r > reward and q < quality for r, q in seen[-patience:])
