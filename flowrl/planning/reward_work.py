"""Where the rewards of a recipe lie, and how often its judges are asked in the whole run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.assembly.work_split import IterationWork
from flowrl.config import Config
from flowrl.config.rewards import HTTPOptions, InlineOptions, PoolOptions, RewardOptions
from flowrl.planning.dry_run import inspect_reward
from flowrl.planning.plan import RunWork, reward_networks, rewards_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWork:
    """One reward of a recipe."""

    name: str
    place: str
    bytes: int | None  # of its networks' weights, all its processes together; None if unknown
    # To its model's server, at most: answers that are kept are not asked again, prompts that it
    # does not apply to are not asked. 0 for other rewards, None where prompts decide.
    requests: int | None
    budget: int | None  # requests after which the run ends, if it has such a limit


def reward_work(config: Config, work: RunWork) -> list[RewardWork]:
    """Return where each reward lies, and what a judge is asked; one that several entries share is
    counted with the first of them."""
    return [_work_of(config, work, number) for number in range(len(config.rewards))]


def total_requests(rewards: Sequence[RewardWork]) -> int:
    """Return the requests of all rewards, as far as they are known."""
    return sum(reward.requests or 0 for reward in rewards)


def _work_of(config: Config, work: RunWork, number: int) -> RewardWork:
    entry, found = config.rewards[number], inspect_reward(config.rewards[number])
    shared = any(entry.same_reward(other) for other in config.rewards[:number])
    known = reward_networks(entry) is not None
    chat = None if isinstance(entry.executor, HTTPOptions) else getattr(found.reward, "chat", None)
    return RewardWork(
        name=found.name,
        place=f"{chat.model} at {', '.join(chat.urls)}" if chat is not None else _place(entry),
        bytes=(0 if shared else rewards_bytes([entry])) if known else None,
        requests=_requests(config, work, entry, found.reward) if chat and not shared else 0,
        budget=getattr(chat, "max_requests", None),
    )


def _place(entry: RewardOptions) -> str:
    executor, networks = entry.executor, reward_networks(entry)
    if isinstance(executor, HTTPOptions):
        return ", ".join(executor.urls)
    if networks is None:
        device = "where it says"
    else:
        device = "GPU" if any(networks.values()) else "CPU"
    if isinstance(executor, PoolOptions):
        if device == "GPU" and executor.gpus is not None:
            device = "GPU " + ", ".join(map(str, executor.gpus))
        return f"{executor.workers} process{'es' * (executor.workers > 1)}, {device}"
    return _inline(executor, device)


def _inline(executor: InlineOptions, device: str) -> str:
    where = "a thread of training" if executor.background else "training"
    away = ", on the CPU in between" if executor.offload and device == "GPU" else ""
    return f"{where}, {device}{away}"


def _requests(config: Config, work: RunWork, entry: RewardOptions, reward: Any) -> int | None:
    """Return the requests of a whole run, at most; None where a prompt's metadata decide."""
    if getattr(reward, "requests_per_image", 0) is None:
        return None
    total, groups = 0, hasattr(reward, "requests_per_group")
    when = entry.when or ("both" if entry.trained or groups else "evaluation")
    if when != "evaluation" and config.rollout.store is None:
        times = sum(work.loads.values())
        for load, count in work.loads.items():
            total += _of_iteration(reward, load) * (count * config.run.iterations // times)
        total += _of_audits(config, reward)
    if when != "rollout" and not groups:
        total += _evaluated(config, work) * reward.requests_per_image
    return total


def _of_iteration(reward: Any, load: IterationWork) -> int:
    images = (load.roots * load.leaves, load.candidates * load.candidate_leaves)
    return load.prompts * sum(_of_group(reward, count) for count in images)


def _of_audits(config: Config, reward: Any) -> int:
    explore = config.rollout.explore
    if explore is None or not explore.audit.every:
        return 0
    times = -(-config.run.iterations // explore.audit.every)
    return times * explore.audit.prompts * _of_group(reward, explore.candidates)


def _of_group(reward: Any, images: int) -> int:
    """Return the requests of one prompt's images."""
    if hasattr(reward, "requests_per_group"):
        return reward.requests_per_group(images)
    return reward.requests_per_image * images


def _evaluated(config: Config, work: RunWork) -> int:
    """Return the images of all evaluations, which draw every prompt by itself."""
    e = config.evaluation
    if not work.evaluations:
        return 0
    images = e.num_images * (1 + e.paraphrases)
    return images * (2 * len(e.step_counts) + work.evaluations - 2)
