"""When to stop: the trained reward still rises, and one that is only measured falls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.spec import RewardSpec, trained
from flowrl.training.evaluate import Evaluation, measured
from flowrl.training.hacking import is_hacking


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Stop after `patience` evaluations in a row that look like hacking, see `is_hacking`.

    held_out: name of the reward that is only measured; sign: -1 where less of it is better.
    margin: how far it must have fallen, in its own units.
    """

    held_out: str
    patience: int
    margin: float = 0.0
    sign: float = 1.0

    def score(self, evaluation: Evaluation) -> float:
        """The held-out mean, higher is better; NaN when no picture has it."""
        return self.sign * evaluation.mean(self.held_out)

    def reason(self, history: Mapping[int, tuple[float, float]]) -> str:
        """Why to stop, for people, or "" to go on.

        history: (trained score, `score`) of evaluations by their iteration.
        """
        steps = [step for step in sorted(history) if not any(map(math.isnan, history[step]))]
        scores, held_out = ([history[step][i] for step in steps] for i in (0, 1))
        if not is_hacking(scores, held_out, self.patience, margin=self.margin):
            return ""
        best, last = max(steps, key=lambda step: (history[step][1], step)), steps[-1]
        values = [self.sign * history[step][1] for step in (best, last)]
        return (
            f"Stopped at iteration {last} by run.stop_when_hacking: since iteration {best} the "
            f"trained reward went from {history[best][0]:.4g} to {history[last][0]:.4g}, while the "
            f"held-out {self.held_out} went from {values[0]:.4g} to {values[1]:.4g}."
        )


def stop_rule(
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    *,
    held_out: str,
    patience: int,
    margin: float,
) -> StopRule:
    """The rule of run.stop_when_hacking. prompts: those of evaluation.

    Raises UserError unless `held_out` names a reward that is held out and applies to some of
    them, and every trained reward does, too: without its score nothing could be compared.
    """
    option = "run.stop_when_hacking.held_out"
    spec = measured(specs, prompts, held_out, option)
    if not spec.held_out:
        raise UserError(
            f"{option} is {held_out!r}, which is trained: name a reward that is only measured, "
            "with held_out: true"
        )
    for other in trained(specs):
        if other.whole_groups:  # never measured there
            continue
        if not any(other.applies(p.text, p.metadata) for p in prompts):
            raise UserError(
                f"run.stop_when_hacking compares the trained rewards, but {other.name!r} applies "
                f"to none of the {len(prompts)} held-out prompts: give evaluation.prompts that it "
                "can judge, or more evaluation.images, or set the rule to null"
            )
    sign = -1.0 if spec.weight < 0 else 1.0
    return StopRule(held_out=held_out, patience=patience, margin=margin, sign=sign)
