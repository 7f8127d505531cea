"""Checks of rewards by name: built-in, one's own, or on a server."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.errors import UserError
from flowrl.findings import Finding
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.check import Checked, check_reward
from flowrl.scoring.executors.base import Reward
from flowrl.scoring.findings import failure, line
from flowrl.scoring.spec import BUILT_IN, ArgumentsRefused, RewardSpec, load_reward

CALLS = 5  # with one picture, for the median
DEADLINE = 60.0  # seconds: a server that loads its model first takes a while


def check_named(
    name: str,
    args: Mapping[str, Any] | None = None,
    *,
    urls: Sequence[str] = (),
    token: str | None = None,
    deadline: float = DEADLINE,
    prompts: Sequence[PromptRecord] = (),
) -> Checked:
    """Check the reward of that name, here or as the servers at `urls` have it; raises nothing.

    Of a server's reward the version and the required metadata must also be those of the one here,
    if that can be made here. deadline: seconds for each answer of the servers.
    """
    try:
        here = load_reward(name, args)
    except UserError as error:
        if not urls:
            return Checked(findings=(_unmade(name, args, error),))
        here = None
    if urls or here is None:
        return _on_server(name, here, urls, token, deadline, prompts)
    return check_reward(RewardSpec(name=name, reward=here), prompts, calls=CALLS)


def _on_server(
    name: str,
    here: Reward | None,
    urls: Sequence[str],
    token: str | None,
    deadline: float,
    prompts: Sequence[PromptRecord],
) -> Checked:
    from flowrl.scoring.executors.http import Remote

    try:
        remote = Remote(name, urls, token=token, deadline=deadline)
    except UserError as error:
        return Checked(findings=(failure(name, error),))
    try:
        spec = RewardSpec(name=name, reward=remote, executor=remote)
        return check_reward(spec, prompts, like=here, calls=CALLS)
    finally:
        remote.close()


def _unmade(name: str, args: Mapping[str, Any] | None, error: UserError) -> Finding:
    """Why there is no such reward: it lacks a package or arguments, or it is not there at all."""
    found, cause = failure(name, error), error.__cause__
    if found.state == "missing" and (name in BUILT_IN or _lacks_package(name, cause)):
        return found
    if not args and isinstance(error, ArgumentsRefused):
        return Finding(
            topic=name,
            state="missing",
            detail=f"needs arguments: {line(str(cause))}",
            remedy=f"flowrl reward-check {name} --args '{{{_wanted(str(cause))}}}'",
        )
    by_hand = isinstance(error, ArgumentsRefused) or cause is None or type(cause) is LookupError
    remedy = "Correct its name or its arguments." if by_hand else "Correct its code."
    return Finding(topic=name, state="problem", detail=line(str(error)), remedy=remedy)


def _lacks_package(name: str, cause: BaseException | None) -> bool:
    """Whether one's own module is there, and a package that it needs is not."""
    while cause is not None and not isinstance(cause, ImportError):
        cause = cause.__cause__
    if cause is None or cause.name is None:  # raised by hand: "needs the package ..."
        return cause is not None
    here = f"{name.partition(':')[0]}.".startswith(f"{cause.name}.")
    return isinstance(cause, ModuleNotFoundError) and not here


def _wanted(reason: str) -> str:
    """The arguments that a reason names, as YAML: `server: {model: NAME}`, or 'model'."""
    shown = re.search(r"\w+: \{[^{}]*\}", reason)
    if shown:
        return shown[0]
    names = re.findall(r"'(\w+)'", reason.partition("missing")[2]) or ["NAME"]
    return ", ".join(f"{name}: VALUE" for name in names)
