"""What needs two GPUs, in one command: NCCL, networks in parts, and what the links cost.

    python scripts/two_gpus.py                       # two GPUs, tiny SD3
    python scripts/two_gpus.py --gpus 8 --model black-forest-labs/FLUX.1-dev --dtype bf16

A few iterations of Flow-GRPO by one process and by one a GPU, with the network whole on each and in
parts. The record says whether the adapters are equal bit for bit between whole networks and parts,
how far they are from one process's, and the time and memory of each; its file is to be kept. The
exit code is 1 where bits differ. `--device cpu` shows that it works, and says nothing of speed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flowrl.utils.files import load_state, save_state, write_text
from flowrl.utils.launching import count_processes, run_processes
from scripts.bench.rollout import bench_learner
from scripts.bench.timing import device_name

ROLLOUT = {"prompts_per_iteration": 5, "group_size": 4, "num_inference_steps": 4}
SHARDS = ("null", "node", "all")


def measure(folder: Path, words: argparse.Namespace) -> None:
    """Run the iterations with each way of sharding; write adapters, seconds and bytes."""
    world = int(os.environ["WORLD_SIZE"])
    for shard in SHARDS[: 1 if world == 1 else None]:
        dtype = {"dtype": words.dtype, "path": words.model, "device": words.device}
        learner = bench_learner(
            words.model, words.device, words.batch, ROLLOUT,
            pipeline=dtype | {"max_sequence_length": 12 if "tiny" in words.model else 256},
            runtime={"shard": None if shard == "null" else shard},
        )  # fmt: skip
        device = learner.runtime.device
        seconds = []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for iteration in range(words.iterations + 1):  # the first one warms up
            learner.runtime.wait()
            began = time.perf_counter()
            learner.iterate(iteration)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        held = sum(
            (p.to_local() if hasattr(p, "to_local") else p).nbytes  # type: ignore[operator]
            for p in learner.policy.network.parameters()
        )
        found = {
            "weights": torch.cat([p.data.flatten().cpu() for p in learner.policy.parameters()]),
            "seconds": min(seconds[1:]), "peak_gb": peak / 1e9, "weights_gb": held / 1e9,
            "device": device_name(device),
        }  # fmt: skip
        if learner.runtime.is_main:
            save_state(folder / f"{world}-{shard}", found)


def record(folder: Path, world: int) -> dict[str, Any]:
    """Return what was measured, and what follows from it."""
    one = load_state(folder / "1-null")
    runs = {shard: load_state(folder / f"{world}-{shard}") for shard in SHARDS}
    whole = runs["null"]
    return {
        "device": one["device"],
        "processes": world,
        "torch": torch.__version__,
        "bits_equal": {s: torch.equal(runs[s]["weights"], whole["weights"]) for s in SHARDS},
        "from_one_process": (whole["weights"] - one["weights"]).abs().max().item(),
        "seconds": {"one process": one["seconds"]} | {s: r["seconds"] for s, r in runs.items()},
        "of_whole": {s: r["seconds"] / whole["seconds"] for s, r in runs.items()},
        "speedup": one["seconds"] / whole["seconds"],
        "peak_gb": {s: r["peak_gb"] for s, r in runs.items()},
        "weights_gb": {s: r["weights_gb"] for s, r in runs.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", default="auto", help="auto or a number; 2 or more")
    parser.add_argument("--model", default="tiny-sd3")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--batch", type=int, default=8, help="most rows in a call")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=Path("two-gpus.json"))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        measure(words.measure, words)
        return 0
    world, cpu = count_processes(words.gpus, device=words.device)
    if world < 2:
        print("Two GPUs are needed; --device cpu --gpus 2 shows that this works.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--measure", folder]
        for count in (1, world):
            if code := run_processes(command, count, cpu=cpu):
                return code
        found = record(Path(folder), world)
    write_text(words.output, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if all(found["bits_equal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
