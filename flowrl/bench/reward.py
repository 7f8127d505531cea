"""What asking a reward costs: in this process, in pools, on a server, and beside learning.

Seconds are wall clock; CPU time is that of this process and of those it started, which other work
on the machine does not stretch much.
"""

import contextlib
import os
import random
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from PIL import Image
from torch import Tensor

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.bench.timing import Seconds, best_parts
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.scoring.executors.base import Executor, InlineExecutor
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.executors.pool import PoolExecutor
from flowrl.scoring.executors.worker import ONE_THREAD
from flowrl.scoring.protocol import CODECS, Codec
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.tiny.draw import draw
from flowrl.training.loop import Learner
from flowrl.utils.distributed import Runtime
from flowrl.utils.imports import load_callable

DIRECT = "direct call"
ENDS = 10.0  # seconds for a server to end
ITERATIONS = 12  # of a run whose reward waits; the wait of the last has nothing to hide behind
GROUP = 8  # images of an iteration
GRAIN = 4.0  # levels, standard deviation: a JPEG of 512 x 512 has about 70 kB then
WAIT = 0.4  # of an iteration's seconds, which its reward waits


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
    codecs: Sequence[Codec] = CODECS,
    micro_batch: int = 16,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Measure a reward where it can be asked, all in turn, each on one thread a process.

    The images show the tiny world's prompts that it applies to, words at each of `sizes` pixels
    a side in turn. Loading is left out. Returns one row a job: the least seconds of `repeats`,
    images per second, and how many times the seconds and the CPU time of a direct call it takes.

    Args:
        workers: numbers of processes, a pool each.
        codecs: how images travel to a server on this machine, a job each.
        micro_batch: most images of one call and of one request.

    Raises:
        UserError: the reward applies to none of these prompts or leaves one without score, or
            there are fewer images than keep every process busy.
    """
    if images < micro_batch * max(workers, default=1):
        most = max(workers)
        raise UserError(
            f"{images} images do not keep {most} processes busy, {micro_batch} at a time: ask for "
            f"{micro_batch * most} or more"
        )
    torch.set_num_threads(1)
    reward = load_reward(name, args)
    questions = _questions(RewardSpec(name=name, reward=reward), images, sizes, micro_batch)
    with contextlib.ExitStack() as closing:
        executors = _executors(name, args, workers, codecs, micro_batch, closing)
        jobs = {DIRECT: lambda: _call(reward, questions)}
        jobs |= {job: _job(executor, questions) for job, executor in executors.items()}
        for job in jobs.values():
            job()  # to load: every process takes a micro-batch before any has answered
        found = best_parts({job: _measured(work) for job, work in jobs.items()}, repeats)
    return [
        {"job": job, "seconds": parts["wall"], "images/s": images / parts["wall"]}
        | _ratios(parts, found[DIRECT])
        for job, parts in found.items()
    ]


def _executors(
    name: str, args: Mapping[str, Any] | None, workers: Sequence[int], codecs: Sequence[Codec],
    micro_batch: int, closing: contextlib.ExitStack,
) -> dict[str, Executor]:  # fmt: skip
    """Return what asks the reward, by job; `closing` ends them, the server last."""
    reward = load_reward(name, args)
    found: dict[str, Executor] = {
        "inline": InlineExecutor(reward, name, micro_batch=micro_batch),
        "background": InlineExecutor(reward, name, micro_batch=micro_batch, background=True),
    }
    for count in workers:
        found[f"pool, {count} process" + "es" * (count > 1)] = PoolExecutor(
            name, args, name, workers=count, timeout=600.0, micro_batch=micro_batch
        )
    if codecs:
        url = closing.enter_context(served(name, args, codecs))
        for codec in codecs:
            found[f"server, {codec}"] = HTTPExecutor(
                name, [url], codec=codec, micro_batch=micro_batch, timeout=300.0, deadline=600.0
            )
    for executor in found.values():
        closing.callback(executor.close)
    return found


@contextlib.contextmanager
def served(name: str, args: Mapping[str, Any] | None, codecs: Sequence[Codec]) -> Iterator[str]:
    """Serve a reward by `flowrl reward-serve` in a process of its own; give its address.

    Raises UserError when it does not start, with what it said.
    """
    command = [sys.executable, "-m", "flowrl", "reward-serve", name, "--port", "0"]
    command += [word for codec in codecs for word in ("--codec", codec)]
    command += ["--args", yaml.safe_dump(dict(args), default_flow_style=True)] if args else []
    places = os.pathsep.join(path or "." for path in sys.path)  # where modules are found here
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": places}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert server.stdout is not None and server.stderr is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        if address is None:
            raise UserError(f"the reward server did not start: {server.stderr.read().strip()}")
        yield address[0]
    finally:
        server.terminate()
        try:
            server.communicate(timeout=ENDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those it started that still run."""
    own = time.process_time()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            own += times.user + times.system
    return own


def _measured(job: Callable[[], None]) -> Callable[[], Seconds]:
    def measure() -> Seconds:
        cpu, began = cpu_seconds(), time.perf_counter()
        job()
        return {"wall": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}

    return measure


def _ratios(parts: Seconds, to: Seconds) -> dict[str, float]:
    return {
        "wall ratio": parts["wall"] / to["wall"],
        "CPU ratio": parts["cpu"] / to["cpu"] if to["cpu"] else float("nan"),
    }


def _call(reward: Callable, questions: Sequence[_Question]) -> None:
    with torch.no_grad():
        for question in questions:
            reward(question.images, question.prompts, question.metadata)


def _job(executor: Executor, questions: Sequence[_Question]) -> Callable[[], None]:
    def ask() -> None:
        futures = [executor.submit(q.images, q.prompts, q.metadata) for q in questions]
        for answer in [future.result() for future in futures]:
            for reason in answer.reasons.values():
                raise UserError(f"an image has no score, so there is no speed to report: {reason}")

    return ask


def _questions(spec: RewardSpec, count: int, sizes: Sequence[int], most: int) -> list[_Question]:
    """Return `count` images with their prompts, up to `most` of one size together."""
    known = [p for p in load_prompts("tiny:all:train") if spec.applies(p.text, p.metadata)]
    if not known:
        raise UserError(
            f"reward {spec.name!r} applies to none of the tiny world's prompts, so there are no "
            "images to measure it with"
        )
    prompts, made = cycle(known), []
    for start, size in enumerate(sizes):
        asked = list(islice(prompts, len(range(start, count, len(sizes)))))
        for first in range(0, len(asked), most):
            part = asked[first : first + most]
            images = torch.stack([_image(prompt, size) for prompt in part])
            texts, metadata = [p.text for p in part], [p.metadata for p in part]
            made.append(_Question(images=images, prompts=texts, metadata=metadata))
    return made


def _image(prompt: PromptRecord, size: int) -> Tensor:
    """Render what the prompt asks for: words at this size, shapes enlarged to it."""
    if prompt.metadata["tag"] == "ocr":
        return load_callable("flowrl_rewards.fixtures:word")(prompt.metadata["ocr_text"], size)
    drawn = Image.fromarray(draw(prompt.metadata, random.Random(prompt.uid)))
    levels = np.array(drawn.resize((size, size), Image.Resampling.NEAREST), np.float32)
    # Generated images have grain; flat ones are smaller and quicker to encode than any of them.
    levels += np.random.default_rng(zlib.crc32(prompt.uid.encode())).normal(0, GRAIN, levels.shape)
    return torch.from_numpy(levels.round().clip(0, 255)).permute(2, 0, 1).contiguous() / 255


# --- overlap across iterations ------------------------------------------------------------------


class Waiting:
    """The images' mean after a time without work, as of a reward on another machine."""

    name = "waiting"

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds  # an image

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        time.sleep(self.seconds * len(images))
        return images.mean((1, 2, 3))


def bench_overlap(*, repeats: int = 3, device: str = "auto") -> list[dict[str, Any]]:
    """Measure how much of a reward that waits `rollout.staleness: 1` hides behind learning.

    Runs of `ITERATIONS` iterations of DiffusionNFT on the tiny pipeline take turns: one whose
    reward does not wait, and two whose reward waits `WAIT` times the seconds of an iteration, with
    staleness 0 and 1. Hidden is the share of what the second takes longer than the first that the
    third does not.
    """
    torch.set_num_threads(1)

    def run(staleness: int, wait: float) -> Callable[[], Seconds]:
        config = _waiting_run(staleness, wait / GROUP, device)
        return lambda: _run_of(config)

    _run_of(_waiting_run(0, 0.0, device))  # to warm up
    wait = WAIT * _run_of(_waiting_run(0, 0.0, device))["wall"] / ITERATIONS
    jobs = {
        "a reward that does not wait": run(0, 0.0),
        f"waits {wait:.2g} s an iteration": run(0, wait),
        "the same, staleness 1": run(1, wait),
    }
    found = best_parts(jobs, repeats)
    none, fresh, late = found.values()
    hidden = (fresh["wall"] - late["wall"]) / (fresh["wall"] - none["wall"])
    return [
        {"run": job, "s an iteration": parts["wall"] / ITERATIONS}
        | _ratios(parts, none)
        | {"hidden": hidden if parts is late else None}
        for job, parts in found.items()
    ]


def _waiting_run(staleness: int, seconds: float, device: str) -> Config:
    return parse_config(
        {
            "pipeline": {"path": "tiny-sd3", "device": device, "max_sequence_length": 12},
            "lora": {"rank": 4, "alpha": 4},
            "prompts": {"train": "tiny:geneval:train"},
            "rollout": {
                "prompts_per_iteration": 1, "group_size": GROUP, "num_inference_steps": 4,
                "batch_size": GROUP, "tree": {"kind": "ode"}, "staleness": staleness,
            },
            "objective": {"kind": "nft", "noising": {"count": 2}},
            "optim": {"micro_batch": GROUP},
            "evaluation": {"prompts": None},
            "rewards": [
                {
                    "name": f"{__name__}:Waiting", "args": {"seconds": seconds},
                    "executor": {"kind": "inline", "background": True},
                }
            ],
            "run": {"iterations": ITERATIONS, "trackers": []},
        }
    )  # fmt: skip


def _run_of(config: Config) -> Seconds:
    """Run all iterations of a recipe; loading is left out."""
    learner = build_learner(config, Runtime(device=config.pipeline.device), ProvidedObjects())
    try:
        return _measured(lambda: _iterate(learner, config.run.iterations))()
    finally:
        for spec in learner.specs:
            spec.close()


def _iterate(learner: Learner, count: int) -> None:
    for iteration in range(count):
        learner.iterate(iteration)
