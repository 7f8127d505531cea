"""One iteration of Flow-GRPO against the bare passes that the usual loop makes for it.

The usual loop samples with the LoRA beside the weights, decodes, and learns from every noisy step:
so many forwards, decodes, and forwards with backwards of the same network at the same shapes.
"""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.assembly.learner import PRECISION, ProvidedObjects, build_learner
from flowrl.backbones.loading import DTYPES
from flowrl.backbones.text_cache import TextCache
from flowrl.bench.iteration import RandomTexts
from flowrl.bench.random_model import move
from flowrl.bench.rollout import sampler, with_random_rewards
from flowrl.bench.timing import TimedTurn, TimedTurns, compare_turns, device_name, time_turns
from flowrl.config import Config, parse_config
from flowrl.planning.model_specs import build_pipeline, model_spec
from flowrl.sampling.rollout import Timer, decode
from flowrl.training.loop import Learner
from flowrl.trajectory import Rollout, Transitions
from flowrl.utils.distributed import Runtime

IMAGES, GROUP, STEPS, RANK = 32, 8, 10, 32
TOKENS, CLIP = 142, 14  # of the text, and of the tiny SD3's CLIP among them
TINY = "tiny-sd3"


def bench_loop(
    *,
    size: str | None = None,
    layers: int | None = None,
    pixels: int = 64,
    images: int = IMAGES,
    steps: int = STEPS,
    dtype: str = "fp32",
    threads: int = 1,
    repeats: int = 5,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Measure sampling, learning and the whole iteration; return a row for each.

    Args:
        size: a published SD3 with random weights, None for the tiny one.
        layers: blocks of the published one, None for all.
        dtype: bf16 on a CPU is autocast there, as on a GPU; the rows then also have the ratio to
            the bare passes in fp32, "of fp32".
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        config = _config(size, pixels, images, steps, dtype, device, folder)
        runtime = Runtime(device=device, mixed_precision=PRECISION[dtype])
        learner = _learner(config, runtime, size, layers)
        bare = {"bare": _BarePasses(learner, images, steps)}
        if dtype != "fp32" and runtime.device.type == "cpu":
            exact = _config(size, pixels, images, steps, "fp32", device, folder)
            other = _learner(exact, runtime, size, layers)
            bare["fp32"] = _BarePasses(other, images, steps, autocast=False)
        rollouts: list[Rollout] = []

        def sample() -> None:
            rollouts[:] = [with_random_rewards(learner.source.collect(0, Timer()))]

        sample()
        jobs: dict[str, Callable[[], object]] = {
            "sampling": sample,
            "learning": lambda: learner.learn(rollouts[0], 0),
        }
        for name, passes in bare.items():
            jobs |= {f"{name} sampling": passes.sample, f"{name} learning": passes.learn}
        turns = time_turns(jobs, repeats, learner.runtime.device)
    for prefix in ("", *(f"{name} " for name in bare)):
        turns[f"{prefix}iteration"] = _sum(turns[f"{prefix}sampling"], turns[f"{prefix}learning"])
    about = {
        "network": size or TINY, "layers": layers or "all", "images": images, "dtype": dtype,
        "device": device_name(learner.runtime.device),
    }  # fmt: skip
    rows = []
    for part in ("sampling", "learning", "iteration"):
        row = {**about, "part": part, **compare_turns(turns[part], turns[f"bare {part}"])}
        if "fp32" in bare:
            row["of fp32"] = compare_turns(turns[part], turns[f"fp32 {part}"])["ratio"]
        rows.append(row)
    return rows


def _sum(one: TimedTurns, other: TimedTurns) -> TimedTurns:
    pairs = zip(one.turns, other.turns, strict=True)
    summed = tuple(TimedTurn(wall=a.wall + b.wall, cpu=a.cpu + b.cpu) for a, b in pairs)
    return replace(one, turns=summed)


class _BarePasses:
    """The passes of the usual loop: steps forwards, steps - 1 forwards and backwards, decodes.

    PEFT's and torch's own layers compute them.
    """

    def __init__(self, learner: Learner, images: int, steps: int, *, autocast: bool = True):
        self.learner, self.images, self.steps = learner, images, steps
        self.autocast = learner.runtime.autocast if autocast else _no_autocast
        rollout = with_random_rewards(learner.source.collect(0, Timer()))
        found: Any = learner.objective.prepare(rollout)
        assert isinstance(found, Transitions)
        self.x0: Tensor = rollout.tree.leaves()
        self.rows = found.take((found.sigma == found.sigma[0]).nonzero().squeeze(1))
        self.cond = self.rows.cond.take(self.rows.prompt)

    def _velocity(self) -> Tensor:
        with self.autocast():
            return self.learner.policy.velocity(self.rows.x, self.rows.sigma, self.cond)

    @torch.no_grad()
    def sample(self) -> None:
        for _ in range(self.steps):
            self._velocity()
        generator = sampler(self.learner).generator
        with self.autocast():
            for _ in decode(generator.backbone, self.x0, generator.decode_batch):
                pass

    def learn(self) -> None:
        for _ in range(self.steps - 1):
            self._velocity().float().square().mean().backward()
        self.learner.optimizer.zero_grad()


def _no_autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", enabled=False)  # type: ignore[return-value]


def _config(
    size: str | None, pixels: int, images: int, steps: int, dtype: str, device: str, folder: str
) -> Config:
    return parse_config(
        {
            "pipeline": {
                "path": size and model_spec(size).checkpoint or TINY,
                "dtype": dtype, "device": device, "height": pixels, "width": pixels,
                "max_sequence_length": TOKENS - 14,
            },
            "lora": {"rank": RANK, "alpha": 2 * RANK},
            "prompts": {"train": "tiny:geneval:train"},
            "rewards": [{"name": "brightness"}],
            "rollout": {
                "prompts_per_iteration": images // GROUP, "group_size": GROUP,
                "num_inference_steps": steps, "batch_size": images,
                "tree": {"kind": "flow_grpo"},
            },
            "objective": {"kind": "grpo", "kl_coef": 0.0},
            "optim": {"micro_batch": images, "updates_per_rollout": 1},
            "run": {"output_dir": folder},
        }
    )  # fmt: skip


def _learner(config: Config, runtime: Runtime, size: str | None, layers: int | None) -> Learner:
    """Build training's own; any ratio is taken, since a rollout is learned from again."""
    pipeline = None
    if size is not None:
        pipeline = build_pipeline(
            size, device=runtime.device, dtype=DTYPES[config.pipeline.dtype], layers=layers,
            encoder=True,
        )  # fmt: skip
    learner = build_learner(config, runtime, ProvidedObjects(pipeline=pipeline))
    move(learner.policy)  # as after some training: factors of 0 would be no test
    loose = learner.optim.model_copy(update={"ratio_tolerance": float("inf")})
    learner = replace(learner, optim=loose)
    if size is None:
        return learner
    own = sampler(learner)
    texts: TextCache = RandomTexts(
        replace(model_spec(size), text_tokens=TOKENS), own.generator.backbone, guided=False
    )
    return replace(learner, source=replace(own, generator=replace(own.generator, text_cache=texts)))
