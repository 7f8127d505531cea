"""Rewards load when they are first asked: before anyone waits for them."""

from flowrl.errors import UserError
from flowrl.scoring.pictures import trials_of
from flowrl.scoring.spec import RewardSpec


def warm_up(spec: RewardSpec) -> bool:
    """Have a reward load its model, by scoring the first of its fixtures; where these are none,
    plain pictures with a prompt that it applies to. -> whether it was asked: one without
    `fixtures`, or with nothing to say to any prompt tried, loads at the first question.

    Raises UserError when it cannot.
    """
    if not hasattr(spec.reward, "fixtures") or spec.executor is None:
        return False
    trials = trials_of(spec, spec.reward, ())
    if not trials:
        return False
    first, count = trials[0], len(trials[0].pictures)
    asked = [first.prompt] * count, [dict(first.metadata) for _ in range(count)]
    answer = spec.executor.submit(first.pictures, *asked).result()
    for row, reason in answer.reasons.items():
        if first.says:
            raise UserError(f"reward {spec.name!r} cannot score its own fixture {row}: {reason}")
        if len(answer.reasons) == count:
            raise UserError(f"reward {spec.name!r} cannot score a plain picture: {reason}")
    return True
