"""Two stages against one on a pipeline that is there, by the options that training has."""

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from flowrl.backbones.loading import TINY
from flowrl.backbones.policy import OLD, Policy
from flowrl.bench.bench_costs import Counts, columns_of, own_words
from flowrl.bench.bench_stages import full_batch, measure, move, on_gpu
from flowrl.build.learner import Given, build_learner
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.quantization.precision import capability_of, resolve
from flowrl.sampling.networks import policys_own
from flowrl.sampling.source import Sampler
from flowrl.sampling.stage import Stage
from flowrl.training.loop import Learner
from flowrl.utils.distributed import Runtime

# At the built-in pipeline's width only the image's feed-forward layers stand four bits.
TINY_MIN_DIM = 128


def bench_solrl(
    *,
    model: str,
    counts: Counts,
    prompts: int,
    precision: str,
    min_dim: int | None,
    batch: int,
    compile: bool | None,
    threads: int,
    repeats: int,
    device: str,
) -> dict[str, Any]:
    """24-of-96 and the like as Sol-RL (2604.06916) draws it, trained by NFT, brightness its reward.

    batch: most pictures in one forward; the largest that all batches can be full of is taken.
    min_dim: of layers that are quantised, None for the backbone's or, built in, 128. compile: None
    does on a GPU. -> see `Costs.row`. Raises UserError for a precision that the device lacks, for
    counts that keep one picture, and where no layer is left to be quantised.
    """
    if counts.keep < 2:
        raise UserError(
            f"the counts {counts} keep one picture of a prompt, which is compared with none: keep "
            "2 or more"
        )
    torch.set_num_threads(threads)
    runtime = Runtime(device=device)
    resolved = resolve(precision, capability_of(runtime.device))
    if min_dim is None and model in TINY:
        min_dim = TINY_MIN_DIM
    explore = {
        "candidates": counts.candidates,
        "steps": counts.preview_steps,
        "precision": precision,
        "min_dim": min_dim,
        "audit": {"every": 0},
    }
    rollout = {
        "prompts": prompts,
        "group_size": counts.keep,
        "steps": counts.steps,
        "batch_size": full_batch(batch, prompts * counts.candidates, prompts * counts.keep),
        "merge_lora": True,
        "compile": on_gpu(device) if compile is None else compile,
        "explore": explore,
    }
    with _learner(model, runtime, rollout) as learner:
        source = learner.source
        assert isinstance(source, Sampler)  # a bench never reads a store
        peft = peft_stage(learner, source.stage)
        costs = measure(source, peft, lambda: update(learner.policy), repeats=repeats)
    what = {"model": model, **columns_of(resolved), "compiled": rollout["compile"]}
    return what | costs.row()


def peft_stage(learner: Learner, exact: Stage) -> Stage:
    """The stage that draws with the network as it is trained: the adapter beside the weights."""
    backbone = learner.policy.backbone
    network = functools.partial(
        policys_own, learner.policy, backbone, OLD, merged=False, runtime=exact.runtime
    )
    return replace(exact, backbone=backbone, network=network)


def update(policy: Policy) -> None:
    """A change of the adapter, which the old policy follows."""
    move(policy)
    policy.remember(0.5)


@contextmanager
def _learner(model: str, runtime: Runtime, rollout: dict[str, Any]) -> Iterator[Learner]:
    """Its run folder is gone afterwards; only what a precision became is written there."""
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "pipeline": {
                    "path": model,
                    "device": runtime.device.type,
                    "max_sequence_length": 12,
                },
                "prompts": {"train": "tiny:geneval:train"},
                "rewards": [{"name": "brightness"}],
                "objective": {"kind": "nft", "draws": {"count": 1}},
                "rollout": {"tree": {"kind": "ode"}} | rollout,
                "optim": {"micro_batch": rollout["batch_size"]},
                "run": {"output_dir": folder},
            }
        )
        with own_words():
            learner = build_learner(config, runtime, Given())
        yield learner
