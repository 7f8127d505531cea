"""Two iterations of each objective, run by several processes; `test_processes.py` starts it.

python processes.py FOLDER SHARD DTYPE CASE... writes FOLDER/CASE-WORLD-SHARD-DTYPE: the rewards of
the first iteration and the weights after the second.
"""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
if "double" in sys.argv[1:4]:  # arithmetic that is meant for fp32 is done in float64
    torch.Tensor.float = torch.Tensor.double

from flowrl.api import align  # noqa: E402, F401
from flowrl.backbones.loading import load_pipeline  # noqa: E402
from flowrl.build.learner import ProvidedObjects, build_learner  # noqa: E402
from flowrl.config import parse_config  # noqa: E402
from flowrl.utils.distributed import Runtime  # noqa: E402
from flowrl.utils.files import save_state  # noqa: E402

# Five prompts over 2 or 4 processes are uneven shares; micro-batches are smaller than a group.
ODE = {
    "prompts_per_iteration": 5, "group_size": 4, "num_inference_steps": 3, "batch_size": 6,
    "tree": {"kind": "ode"}, "merge_lora": False,
}  # fmt: skip
CHAINS = ODE | {"tree": {"kind": "flow_grpo"}}
TREE = ODE | {"tree": {"kind": "branch_grpo", "splits": [0]}}
FAN = ODE | {"tree": {"kind": "tree_grpo", "branch": 4, "window": {"kind": "fixed", "size": 1}}}
TWO_STAGE = CHAINS | {
    "explore": {
        "candidates": 6, "num_inference_steps": 2, "precision": "bf16",
        "audit": {"every": 1, "prompts": 1},
    }
}  # fmt: skip
SCORED = {
    "grpo": ({"kind": "grpo"}, CHAINS),
    "tree": ({"kind": "grpo", "kl_coef": 0.1}, TREE),
    "two_stage": ({"kind": "grpo"}, TWO_STAGE),
    "spo": ({"kind": "spo", "min_gap": 0.0}, FAN),
    "nft": ({"kind": "nft", "noising": {"count": 2}}, ODE),
    "dpo": ({"kind": "dpo", "sft_coef": 0.1, "noising": {"count": 2}}, ODE),
    "gdro": ({"kind": "gdro", "noising": {"count": 2}}, ODE),
    "sft": ({"kind": "sft"}, ODE),
    "rwr": ({"kind": "rwr"}, ODE),
    "awm": ({"kind": "awm", "old_kl_coef": 0.1, "noising": {"count": 2}}, ODE),
    "dgpo": ({"kind": "dgpo", "kl_coef": 0.1}, ODE),
    "lair": ({"kind": "lair"}, ODE),
}
FOLLOWED = {
    "refl": {},
    "draft": {"steps": 2, "kl_coef": 0.1},
    "draft_lv": {},
    "align_prop": {"truncation": {"kind": "uniform"}},
    "srpo": {"hinge": 1.0},
    "leap_align": {},
    "flowbp_sparse": {"steps": 2},
    "flowbp_bridge": {"steps": 2},
    "flowbp_lagrange": {"supports": 1, "active": 1},
}
CASES = [*SCORED, *FOLLOWED, "stored", "half"]


def config_of(case: str, folder: Path, shard: str):
    rewards, prompts = [{"name": "brightness"}], "tiny:colors:train"
    more = {}
    if case in FOLLOWED:
        objective, rollout = {"kind": case} | FOLLOWED[case], ODE
        rewards, prompts = [{"name": "tiny_colors"}], "tiny:color_attr:train"
    elif case == "stored":
        objective = {"kind": "gdro", "noising": {"count": 2}}
        rollout = ODE | {"store": {"path": str(folder / "store")}}
    elif case == "half":  # 16 bits, recomputed blocks, a moving average
        objective, rollout = {"kind": "nft", "noising": {"count": 2}}, ODE
        more = {"ema": {"decay": 0.5}, "memory": {"gradient_checkpointing": True}}
    else:
        objective, rollout = SCORED[case]
    half = {"dtype": "bf16"} if case == "half" else {}
    return parse_config(
        {
            "pipeline": {"path": "tiny-sd3", "max_sequence_length": 12, "device": "cpu"} | half,
            "runtime": {"shard": None if shard == "whole" else shard},
            "lora": {"rank": 2, "alpha": 4},
            "prompts": {"train": prompts},
            "rollout": rollout,
            "objective": objective,
            "optim": {"lr": 1e-3, "micro_batch": 6},
            "rewards": rewards,
            "run": {"iterations": 2, "output_dir": str(folder / f"run-{case}")},
            **more,
        }
    )


def dark_first(prompts_of: list[str]):
    """Brightness, but one prompt's images score alike: its process has less to learn from."""

    def reward(images, prompts, metadata):
        scores = images.mean((1, 2, 3)).tolist()
        return [0.5 if p == prompts_of[0] else s for p, s in zip(prompts, scores, strict=True)]

    return reward


def run(case: str, folder: Path, shard: str, dtype: str) -> None:
    config = config_of(case, folder, shard)
    mixed = "bf16" if case == "half" else "no"
    runtime = Runtime(device="cpu", mixed_precision=mixed)
    first: list[str] = []
    rewards = None if case in (*FOLLOWED, "stored") else {"brightness": dark_first(first)}
    pipeline = None
    if dtype == "double":
        pipeline = load_pipeline("tiny-sd3", dtype="fp32", device="cpu").to(torch.float64)
    learner = build_learner(config, runtime, ProvidedObjects(pipeline=pipeline, rewards=rewards))
    if rewards:
        first += [p.text for p in learner.source.prompts.at(0)]
    generator = torch.Generator().manual_seed(0)
    for p in learner.policy.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=generator)
    rollouts = [learner.iterate(i) for i in range(2)]
    seen = {
        "reward": rollouts[0][0].reward.float(),
        "start": rollouts[1][0].reward.float(),
        "weights": torch.cat([p.data.flatten() for p in learner.policy.parameters()]),
        "loss": rollouts[0][1].get("loss", 0.0),
    }
    if runtime.is_main:
        save_state(folder / f"{case}-{runtime.world_size}-{shard}-{dtype}", seen)


if __name__ == "__main__":
    folder, shard, dtype, *cases = sys.argv[1:]
    for case in cases:
        run(case, Path(folder), shard, dtype)
