"""From the configured rewards to rewards at work: who computes them, and what becomes of scores."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.config import Config
from flowrl.config.rewards import (
    AffineOptions,
    ClipOptions,
    HTTPOptions,
    PoolOptions,
    RankOptions,
    SigmoidOptions,
)
from flowrl.config.rewards import RewardOptions as RewardSection
from flowrl.errors import UserError
from flowrl.scoring import combine as transforms
from flowrl.scoring.combine import FailureLimit
from flowrl.scoring.executors.base import Executor, InlineExecutor, Reward
from flowrl.scoring.spec import BUILT_IN, RewardSpec, Transform, load_reward


def build_rewards(config: Config, given: Mapping[str, Reward] | None = None) -> list[RewardSpec]:
    """The caller's own rewards by name, else the configured ones under the names they give
    themselves. Raises UserError when one cannot be had, or when two have one name."""
    if given:
        return [
            RewardSpec(name=name, reward=reward, executor=InlineExecutor(reward, name))
            for name, reward in given.items()
        ]
    specs: list[RewardSpec] = []
    try:
        for entry in config.rewards:
            specs.append(_build(entry))
        _check_names([spec.name for spec in specs])
    except UserError:
        for spec in specs:
            if spec.executor is not None:
                spec.executor.close()
        raise
    return specs


def build_limit(config: Config) -> FailureLimit:
    f = config.failures
    return FailureLimit(max_fraction=f.max_invalid_fraction, max_streak=f.max_streak)


def _build(entry: RewardSection) -> RewardSpec:
    reward, executor = _make(entry)
    return RewardSpec(
        name=entry.label or getattr(reward, "name", entry.name),
        reward=reward,
        weight=entry.weight,
        held_out=entry.held_out,
        executor=executor,
        transform=_transform(entry.transform),
        applies_to={key: tuple(values) for key, values in entry.applies_to.items()},
        on_failure=entry.on_failure,
    )


def _make(entry: RewardSection) -> tuple[Reward, Executor]:
    """The reward, for what it says of itself, and who is asked. Servers are both."""
    how = entry.executor
    if how.kind == "http":
        remote = _remote(entry.name, how)
        return remote, remote
    reward = load_reward(entry.name, entry.args)
    name = entry.label or getattr(reward, "name", entry.name)
    whole = getattr(reward, "scope", "sample") == "group"
    if how.kind == "inline":
        size = None if whole else how.micro_batch
        return reward, InlineExecutor(reward, name, micro_batch=size, background=how.background)
    return reward, _pool(entry, how, name, whole)


def _pool(entry: RewardSection, how: PoolOptions, name: str, whole: bool) -> Executor:
    """whole: the reward compares whole groups, which are never split."""
    from flowrl.scoring.executors.pool import PoolExecutor

    return PoolExecutor(
        BUILT_IN.get(entry.name, entry.name),
        entry.args,
        name,
        workers=how.workers,
        timeout=how.timeout,
        micro_batch=None if whole else how.micro_batch,
        max_tasks=how.max_tasks,
    )


def _remote(name: str, how: HTTPOptions) -> Any:
    """A reward and its executor at once. It knows itself whether groups may be split."""
    from flowrl.scoring.executors.http import HTTPExecutor

    return HTTPExecutor(
        name,
        how.urls,
        timeout=how.timeout,
        deadline=how.deadline,
        micro_batch=how.micro_batch,
        in_flight=how.in_flight,
        codec=how.codec,
        token=_token(how.token_env),
    )


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(
            f"executor.token_env is {variable!r}, but the environment has no such variable, or an "
            "empty one: set it to the servers' token, or token_env to null"
        )
    return os.environ[variable]


def _transform(
    section: AffineOptions | ClipOptions | SigmoidOptions | RankOptions | None,
) -> Transform | None:
    if section is None:
        return None
    if section.kind == "affine":
        return functools.partial(transforms.affine, scale=section.scale, shift=section.shift)
    if section.kind == "clip":
        return functools.partial(transforms.clip, low=section.low, high=section.high)
    if section.kind == "sigmoid":
        return functools.partial(transforms.sigmoid, center=section.center, scale=section.scale)
    return transforms.rank


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two rewards are called {name!r}, and scores are kept by name: keep one, or give "
                "it a label"
            )
