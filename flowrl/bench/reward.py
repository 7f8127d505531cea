"""Images per second of a reward: in this process and in pools of processes, in one run."""

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.bench.timing import best_of
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.scoring.executors.base import Executor, InlineExecutor
from flowrl.scoring.executors.pool import PoolExecutor
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.tiny.draw import draw
from flowrl.utils.imports import load_callable

HERE = "this process"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    images: Tensor  # (B, 3, S, S) float32, multiples of 1/255
    prompts: list[str]
    metadata: list[dict]


def bench_reward(
    *,
    name: str,
    args: Mapping[str, Any] | None = None,
    images: int = 48,
    sizes: Sequence[int] = (64, 128, 256),
    workers: Sequence[int] = (1, 2),
    micro_batch: int = 4,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure a reward in this process on one thread, and in pools of `workers` processes.

    The images show the tiny world's prompts that it applies to, words at each of `sizes` pixels
    a side in turn. Loading is left out. Returns one row a job: best seconds, images per second,
    and their ratio to those of the job it is compared with.

    Raises:
        UserError: the reward applies to none of these prompts or leaves one without score, or
            there are fewer images than keep every process busy.
    """
    if images < micro_batch * max(workers):
        raise UserError(
            f"{images} images do not keep {max(workers)} processes busy, {micro_batch} at a "
            f"time: ask for {micro_batch * max(workers)} or more"
        )
    torch.set_num_threads(1)
    reward = load_reward(name, args)
    spec = RewardSpec(name=name, reward=reward)
    questions = _questions(spec, images, sizes)
    executors: dict[str, Executor] = {HERE: InlineExecutor(reward, name, micro_batch=micro_batch)}
    with contextlib.ExitStack() as closing:
        for count in workers:
            pool = executors[_pool(count)] = PoolExecutor(
                name, args, name, workers=count, timeout=600.0, micro_batch=micro_batch
            )
            closing.callback(pool.close)
        jobs = {job: _job(executor, questions) for job, executor in executors.items()}
        for job in jobs.values():
            job()  # to load: every process takes a micro-batch before any has answered
        seconds = best_of(jobs, repeats)
    against = dict.fromkeys(executors, _pool(min(workers))) | {_pool(min(workers)): HERE}
    return [
        {
            "job": job,
            "seconds": seconds[job],
            "images/s": images / seconds[job],
            "ratio": seconds[other] / seconds[job],
            "to": other,
        }
        for job, other in (against | {HERE: HERE}).items()
    ]


def _pool(count: int) -> str:
    return f"{count} process" + "es" * (count > 1)


def _job(executor: Executor, questions: Sequence[_Question]) -> Callable[[], None]:
    def ask() -> None:
        futures = [executor.submit(q.images, q.prompts, q.metadata) for q in questions]
        for answer in [future.result() for future in futures]:
            for reason in answer.reasons.values():
                raise UserError(f"an image has no score, so there is no speed to report: {reason}")

    return ask


def _questions(spec: RewardSpec, count: int, sizes: Sequence[int]) -> list[_Question]:
    """Return `count` images with their prompts, those of one size together."""
    known = [p for p in load_prompts("tiny:all:train") if spec.applies(p.text, p.metadata)]
    if not known:
        raise UserError(
            f"reward {spec.name!r} applies to none of the tiny world's prompts, so there are no "
            "images to measure it with"
        )
    prompts, made = cycle(known), []
    for start, size in enumerate(sizes):
        if asked := list(islice(prompts, len(range(start, count, len(sizes))))):
            images = torch.stack([_image(prompt, size) for prompt in asked])
            texts, metadata = [p.text for p in asked], [p.metadata for p in asked]
            made.append(_Question(images=images, prompts=texts, metadata=metadata))
    return made


def _image(prompt: PromptRecord, size: int) -> Tensor:
    """Render what the prompt asks for: words at this size, shapes enlarged to it."""
    if prompt.metadata["tag"] == "ocr":
        return load_callable("flowrl_rewards.fixtures:word")(prompt.metadata["ocr_text"], size)
    drawn = Image.fromarray(draw(prompt.metadata, random.Random(prompt.uid)))
    levels = np.array(drawn.resize((size, size), Image.Resampling.NEAREST))
    return torch.from_numpy(levels).permute(2, 0, 1).float() / 255
