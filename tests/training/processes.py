"""Two iterations of each objective, done by several processes; `test_processes.py` starts it.

python processes.py FOLDER CASE:SHARD:DTYPE... writes FOLDER/CASE-WORLD-SHARD-DTYPE for each:
rewards, metrics, and all adapters after the second iteration. SHARD is whole, node or all; node
divides four processes into two machines. DTYPE is single or double, where what is meant for fp32
is float64.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

torch.set_num_threads(1)

import flowrl.api  # noqa: E402, F401  # first, as everybody does
from flowrl.assembly.learner import (  # noqa: E402
    ProvidedObjects,
    build_evaluator,
    build_learner,
)
from flowrl.backbones.loading import load_pipeline  # noqa: E402
from flowrl.config import parse_config  # noqa: E402
from flowrl.offline import source  # noqa: E402
from flowrl.sampling.rollout import Sampler  # noqa: E402
from flowrl.utils.distributed import Runtime  # noqa: E402
from flowrl.utils.files import save_state  # noqa: E402

# Five prompts over 2 or 4 processes are uneven shares, and micro-batches are smaller than some.
ODE = {
    "prompts_per_iteration": 5, "group_size": 2, "num_inference_steps": 2, "batch_size": 3,
    "tree": {"kind": "ode"}, "merge_lora": False,
}  # fmt: skip
LONG = ODE | {"num_inference_steps": 3}
CHAINS = ODE | {"tree": {"kind": "flow_grpo"}}
TREE = LONG | {"group_size": 4, "tree": {"kind": "branch_grpo", "splits": [0]}}
FAN = LONG | {"tree": {"kind": "tree_grpo", "branch": 2, "window": {"kind": "fixed", "size": 1}}}
TWO_STAGE = CHAINS | {
    "explore": {
        "candidates": 4, "num_inference_steps": 2, "precision": "bf16",
        "audit": {"every": 1},
    }
}  # fmt: skip
PRUNED = TREE | {  # one process has more prompts than another
    "explore": {
        "candidates": 3, "num_inference_steps": None, "stop_at": 1, "precision": "bf16",
        "audit": {"every": 1},
    }
}  # fmt: skip
NFT = {"kind": "nft", "noising": {"count": 2}}
SELECTIVE = {
    "step_share": 0.5, "error_confidence": 1.0, "kl_on": {"reward": "contrast", "share": 0.4},
}  # fmt: skip
BOOK = {"success": 0.89, "largest_group": 4}
FEW = "few.txt"  # prompts, so that some take several places
SCORED = {
    "grpo": ({"kind": "grpo"}, CHAINS),
    "tree": ({"kind": "grpo", "kl_coef": 0.1}, TREE),
    "selective": ({"kind": "grpo", "kl_coef": 0.1} | SELECTIVE, TREE),
    "two_stage": ({"kind": "grpo"}, TWO_STAGE),
    "pruned": ({"kind": "grpo"}, PRUNED),
    "spo": ({"kind": "spo", "tau": 1e-3}, FAN),
    "nft": (NFT, ODE),
    "dpo": ({"kind": "dpo", "kl_coef": 0.1, "noising": {"count": 2}}, ODE),
    "kto": ({"kind": "kto", "noising": {"count": 2}}, ODE),
    "dgpo": ({"kind": "dgpo", "kl_coef": 0.1}, ODE),
    "gdro": ({"kind": "gdro", "noising": {"count": 2}}, ODE),
    "lair": ({"kind": "lair"}, ODE),
    "sft": ({"kind": "sft"}, ODE),
    "rwr": ({"kind": "rwr"}, ODE),
    "awm": ({"kind": "awm", "noising": {"count": 2}}, ODE),
    "book": ({"kind": "grpo", "advantage": {"center": "tracker", "emphasis": 1.0}}, CHAINS),
    "refiner": ({"kind": "grpo"}, CHAINS),
    "reference": ({"kind": "grpo", "kl_coef": 0.1}, CHAINS),
    "all_adapters": (NFT | {"kl_coef": 0.1}, ODE),
    "bf16": (NFT | {"kl_coef": 0.1}, ODE),
}
FOLLOWED = {  # along the reward's gradient
    "refl": {},
    "draft": {"steps": 2, "kl_coef": 0.1},
    "draft_lv": {},
    "align_prop": {},
    "srpo": {},
    "leap_align": {},
    "flowbp_sparse": {"steps": 2},
    "flowbp_bridge": {"steps": 2},
    "flowbp_lagrange": {},
}
EVALUATION = {
    "prompts": "tiny:colors:test", "num_images": 5, "num_inference_steps": 2, "batch_size": 3,
}  # fmt: skip
CASES = [*SCORED, *FOLLOWED, "stored"]
# Policy, old policy, reference and average, over recomputed blocks.
ALL_ADAPTERS = {"ema": {"decay": 0.5}, "memory": {"gradient_checkpointing": True}}


def config_of(case: str, folder: Path, shard: str):
    rewards, prompts = [{"name": "brightness"}], "tiny:colors:train"
    if case in FOLLOWED:
        objective, rollout = {"kind": case} | FOLLOWED[case], LONG
        rewards, prompts = [{"name": "tiny_colors"}], "tiny:color_attr:train"
    elif case == "stored":
        objective = {"kind": "gdro", "noising": {"count": 2}}
        rollout = ODE | {"store": str(folder / "store")}
    else:
        objective, rollout = SCORED[case]
    if case == "book":
        prompts = str(folder / FEW)
    half = {"dtype": "bf16"} if case == "bf16" else {}
    return parse_config(
        {
            "pipeline": {"path": "tiny-sd3", "max_sequence_length": 12, "device": "cpu"} | half,
            "runtime": {"shard": None if shard == "whole" else shard},
            "lora": {"rank": 2, "alpha": 4},
            "prompts": {
                "train": prompts,
                "book": BOOK if case == "book" else None,
                "refiner": {"own_words": 1} if case == "refiner" else None,
            },
            "rollout": rollout,
            "objective": objective,
            "evaluation": EVALUATION,
            "optim": {"lr": 1e-3, "micro_batch": 4},
            "rewards": rewards,
            "run": {"iterations": 2, "output_dir": str(folder / f"run-{case}")},
            "reference": {"every": 1 if case == "reference" else None},
            **(ALL_ADAPTERS if case in ("all_adapters", "bf16") else {}),
        }
    )


def dark_first(prompts_of: list[str]):
    """Brightness, but one prompt's images score alike: its process has less to learn from."""

    def reward(images, prompts, metadata):
        scores = images.mean((1, 2, 3)).tolist()
        return [0.5 if p == prompts_of[0] else s for p, s in zip(prompts, scores, strict=True)]

    return reward


def contrast(images, prompts, metadata):
    return images.flatten(1).std(1).tolist()


@contextmanager
def arithmetic(dtype: str):
    """Do in float64 inside the block what is meant for fp32, if `dtype` is double."""
    single, stored = torch.Tensor.float, source.DTYPES
    if dtype == "double":
        torch.Tensor.float = torch.Tensor.double
        source.DTYPES = stored | {"float32": torch.float64}  # which would else be refused
    try:
        yield
    finally:
        torch.Tensor.float, source.DTYPES = single, stored


def run(case: str, folder: Path, shard: str, dtype: str) -> None:
    config = config_of(case, folder, shard)
    AcceleratorState._reset_state()  # or the first case's precision would be everyone's
    runtime = Runtime(device="cpu", mixed_precision="bf16" if case == "bf16" else "no")
    if shard == "node" and runtime.world_size == 4:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    first: list[str] = []
    rewards = None if case in (*FOLLOWED, "stored") else {"brightness": dark_first(first)}
    if case == "selective":
        rewards = {"brightness": dark_first(first), "contrast": contrast}
    pipeline = None
    if dtype == "double":
        pipeline = load_pipeline("tiny-sd3", dtype="fp32", device="cpu").to(torch.float64)
    learner = build_learner(config, runtime, ProvidedObjects(pipeline=pipeline, rewards=rewards))
    if rewards:
        assert isinstance(learner.source, Sampler)
        first += [p.text for p in learner.source.prompts.at(0)]
    generator = torch.Generator().manual_seed(0)
    for p in learner.policy.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=generator)
    if learner.objective.needs.old is not None:
        learner.policy.update_old()
    rollouts = [learner.iterate(i) for i in range(2)]
    seen = {
        "rewards": torch.stack([rollout.reward for rollout, _ in rollouts]),
        "metrics": [{k: v for k, v in m.items() if not k.startswith("time/")} for _, m in rollouts],
        "adapters": {
            name: torch.cat([t.flatten() for t in tensors])
            for name, tensors in learner.policy.state_dict()["adapters"].items()
        },
    }
    if case == "grpo":
        evaluator = build_evaluator(
            config, learner.policy.backbone.pipeline, learner.specs, ProvidedObjects(),
            runtime=runtime,
        )  # fmt: skip
        assert evaluator is not None
        evaluation = evaluator(evaluator.backbone.velocity, runtime)
        names = ("scores", "statistics", "thumbnails")
        seen["evaluation"] = {name: getattr(evaluation, name) for name in names}
    if runtime.is_main:
        save_state(folder / f"{case}-{runtime.world_size}-{shard}-{dtype}", seen)
        print(case, runtime.world_size, shard, dtype, flush=True)


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    for word in words:
        case, shard, dtype = word.split(":")
        with arithmetic(dtype):
            run(case, Path(folder), shard, dtype)
