"""Time and bytes of one recipe on several processes, replicated and in parts, and with workers.

Each job is a program of its own, as several processes have to be; so they run one after another and
not in turns, and a busy machine disturbs some more than others.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from flowrl.assembly.learner import PRECISION, ProvidedObjects, build_learner
from flowrl.assembly.worker import build_pool
from flowrl.backbones.policy import POLICY
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.functional.batches import ALONE
from flowrl.sampling.rollout import Timer
from flowrl.scoring.spec import closing
from flowrl.training.loop import Learner
from flowrl.trajectory import Transitions
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state, save_state, write_text
from scripts.bench.rollout import training_passes, with_random_rewards
from scripts.bench.timing import best_of

WARM = 1  # iterations before the clock starts, in which workers join
GROUP = 4
MB = 2**20
Row = dict[str, Any]


def bench_scale(
    *,
    model: str,
    processes: Sequence[int],
    prompts: int,
    steps: int,
    iterations: int,
    wait: float,
    threads: int,
    device: str,
) -> list[Row]:
    """Measure a Flow-GRPO iteration on so many processes, and with as many workers.

    Args:
        processes: numbers of processes, replicated and sharded, and of workers of one trainer.
        wait: seconds that a reward waits in an iteration of the last three jobs; 0 leaves them out.

    Returns:
        One row a job: seconds an iteration; over the bare passes of one process that it has inside;
        MB of frozen weights and most MB of the first process, which is the trainer (of its GPU,
        where there is one); the most that a trained weight differs from that of the job named, 0
        where all are equal bit for bit. Raises UserError where a job fails.
    """
    base = _recipe(model, prompts, steps, device)
    made: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="flowrl-bench-") as folder:
        measure = partial(
            _measure, folder=Path(folder), iterations=iterations, threads=threads, device=device
        )
        made["1 process"] = measure(base, 1)
        for count in processes:
            if count > 1:
                made[f"{count} processes"] = measure(base, count)
                in_parts = base | {"runtime": {"shard": "all"}}
                made[f"{count} processes, sharded"] = measure(in_parts, count)
            made[f"{count} workers" if count > 1 else "1 worker"] = measure(_elsewhere(base, count))
        if wait:
            slow = _recipe(model, 2, steps, device, wait)
            late = _elsewhere(slow, 2, staleness=1)
            # Twice as many iterations: the last one's wait has no later iteration to hide behind.
            longer = partial(measure, iterations=2 * iterations)
            made["a reward waits: 1 process"] = longer(slow)
            made["a reward waits: 2 workers"] = longer(_elsewhere(slow, 2))
            made["a reward waits: 2 workers, staleness 1"] = longer(late)
    bare = made["1 process"]["bare"]
    return [_row(name, row, made, bare) for name, row in made.items()]


def _row(name: str, found: Row, made: Mapping[str, Row], bare: float) -> Row:
    """Return a line of the table."""
    waits = name.startswith("a reward waits")
    other = "a reward waits: 1 process" if waits else "1 process"
    if "sharded" in name:
        other = name.removesuffix(", sharded")
    return {
        "job": name,
        "s/iteration": found["seconds"],
        "to bare passes": None if waits else found["seconds"] / bare,
        "to": other,
        "ratio": found["seconds"] / made[other]["seconds"],
        "weights MB": found["weights"] / MB,
        "peak MB": found["peak"] / MB,
        "differs by": max(
            (a - b).abs().max().item()
            for a, b in zip(found["trained"], made[other]["trained"], strict=True)
        ),
    }


def _recipe(model: str, prompts: int, steps: int, device: str, wait: float = 0.0) -> Row:
    """Return a recipe whose batches are as many for 1, 2 and 4 processes, and of one shape."""
    reward: Row = {"name": "brightness"}
    if wait:
        each = wait / (prompts * GROUP)  # all images are one question
        reward = {"name": "scripts.bench.scale:Waiting", "args": {"seconds": each}}
    return {
        "pipeline": {"path": model, "device": device, "max_sequence_length": 12},
        "prompts": {"train": "tiny:geneval:train"},
        "rollout": {
            "prompts_per_iteration": prompts,
            "group_size": GROUP,
            "num_inference_steps": steps,
            "batch_size": 2 * GROUP,
            "merge_lora": False,
        },
        "optim": {"micro_batch": 2 * GROUP},
        "rewards": [reward],
    }


def _elsewhere(recipe: Row, count: int, staleness: int = 0) -> Row:
    rollout = recipe["rollout"] | {"workers": {"count": count}, "staleness": staleness}
    return recipe | {"rollout": rollout}


def _measure(
    recipe: Row, processes: int = 1, *, folder: Path, iterations: int, threads: int, device: str
) -> Row:
    """Run a job in programs of its own; return what the first of them found."""
    if device != "cpu" and processes > max(1, torch.cuda.device_count()):
        raise UserError(
            f"{processes} processes need as many GPUs, and this machine has "
            f"{torch.cuda.device_count()}: lower --processes, or add --device cpu"
        )
    to, weights = folder / "found.json", folder / "weights"
    to.unlink(missing_ok=True)
    asked = json.dumps({"recipe": recipe, "iterations": iterations, "to": str(to)})
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [sys.executable, *(launcher if processes > 1 else []), "-m", "scripts.bench.scale"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([*words, asked], env=environment, capture_output=True, text=True)
    if done.returncode or not to.is_file():
        raise UserError(f"a job on {processes} processes failed: {done.stderr.strip()[-2000:]}")
    return json.loads(to.read_text()) | {"trained": load_state(weights)}


# --- in the programs of a job --------------------------------------------------------------------


def run_job(recipe: Row, iterations: int, to: str) -> None:
    """Train some iterations, and write seconds and bytes."""
    run = {"iterations": WARM + iterations + 1, "output_dir": str(Path(to).parent / "run")}
    config = parse_config(recipe | {"run": run})
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    runtime = Runtime(
        device=config.pipeline.device, mixed_precision=PRECISION[config.pipeline.dtype]
    )
    given = ProvidedObjects()
    pool = build_pool(config, runtime, given)
    learner = build_learner(config, runtime, given, pool=pool)
    with closing(learner.specs), pool or nullcontext():
        for iteration in range(WARM):
            learner.iterate(iteration)
        runtime.wait()
        began = time.perf_counter()
        for iteration in range(WARM, WARM + iterations):
            learner.iterate(iteration)
        runtime.wait()
        seconds = (time.perf_counter() - began) / iterations
        found = {
            "seconds": seconds,
            "weights": _frozen_bytes(learner),
            "peak": _peak(runtime),
        }
        trained = learner.policy.weights(POLICY)
        alone = pool is None and runtime.world_size == 1
        found["bare"] = _bare(learner, WARM + iterations) if alone else 0.0
    if runtime.is_main:
        save_state(Path(to).with_name("weights"), trained)
        write_text(Path(to), json.dumps(found))


def _bare(learner: Learner, iteration: int) -> float:
    """Return the seconds of an iteration's passes of the network, and of nothing else."""
    rollout = with_random_rewards(learner.source.collect(iteration, Timer()))
    batch, rows = learner.objective.prepare(rollout), learner.optim.micro_batch
    assert isinstance(batch, Transitions)
    jobs = {
        "sampling": partial(_forwards, learner, batch, len(rollout.tree.sigmas) - 1, rows),
        "learning": partial(training_passes, learner, batch, rows),
    }
    return sum(best_of(jobs, 2).values())


@torch.no_grad()
def _forwards(learner: Learner, batch: Transitions, steps: int, rows: int) -> None:
    first = batch.take((batch.sigma == batch.sigma[0]).nonzero().squeeze(1))
    for part in ALONE.micro_batches(first, rows):
        cond = part.cond.take(part.prompt)
        for _ in range(steps):
            learner.policy.velocity(part.x, part.sigma, cond)


def _frozen_bytes(learner: Learner) -> int:
    """Return the bytes of the transformer's frozen weights in this process."""
    frozen = (p for p in learner.policy.network.parameters() if not p.requires_grad)
    local = (getattr(p, "_local_tensor", p) for p in frozen)
    return sum(p.numel() * p.element_size() for p in local)


def _peak(runtime: Runtime) -> int:
    """Return the most bytes that this process had: of its GPU, or of the host's memory."""
    if runtime.gpu is not None:
        return torch.cuda.max_memory_allocated(runtime.gpu)
    memory = psutil.Process().memory_info()
    return getattr(memory, "peak_wset", memory.rss)


if __name__ == "__main__":
    run_job(**json.loads(sys.argv[1]))


class Waiting:
    """A reward that waits, as one on another machine does, and returns the mean of each image."""

    name = "waiting"

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds  # per image

    def __call__(
        self, images: torch.Tensor, prompts: list[str], metadata: list[dict]
    ) -> torch.Tensor:
        time.sleep(self.seconds * len(images))
        return images.mean((1, 2, 3))
