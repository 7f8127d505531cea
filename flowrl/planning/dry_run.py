"""Run a recipe on a small random pipeline of its own class: nothing real is loaded.

Tree, objective, kernel, credit, exploration and the rewards' names, weights and transforms are
those of the recipe, and so are prompts where they can be read. Every replacement is listed.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.families import family_of
from flowrl.backbones.loading import check_pipeline, diffusers_class
from flowrl.backbones.small import small_folder
from flowrl.config import Config, parse_config
from flowrl.config.load import differences, merge
from flowrl.config.objectives import DistillOptions
from flowrl.config.rewards import HTTPOptions, RewardOptions
from flowrl.errors import UserError
from flowrl.planning.model_specs import pipeline_class
from flowrl.prompts.overlap import check_overlap
from flowrl.prompts.records import PromptRecord, PromptSampler, load_prompts
from flowrl.prompts.sources import HUB, TINY
from flowrl.scoring.spec import BUILT_IN, RewardSpec, check_evaluation, check_prompts, load_reward
from flowrl.utils.files import write_text
from flowrl.utils.imports import load_callable

SIDE = 64  # pixels of an image of other classes' small pipelines
ITERATIONS, PROMPTS, ROWS, RANK, TOKENS, IMAGES = 2, 2, 16, 4, 16, 4
STEPS, GROUP = 6, 4  # or as few more as the tree has to have


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A small recipe, and what differs from the real one."""

    config: Config
    replaced: Mapping[str, tuple[Any, Any]]  # values of the real recipe and here, by option


def rehearse(config: Config, folder: str | Path) -> Rehearsal:
    """Make a recipe of the same kind for a CPU, whose prompts and run lie under `folder`.

    Raises:
        UserError: the real recipe is wrong: prompts that cannot be read or that rewards do not
            fit, rewards and objectives that do not exist or refuse their arguments.
    """
    folder = Path(folder)
    config.objective.build(config.rollout.kernel)
    rewards = [inspect_reward(entry) for entry in config.rewards]
    real = config.model_dump(mode="json")
    changes = [
        _small_pipeline(config, folder),
        _small_rollout(config),
        _small_training(config, folder),
        _few_prompts(config, rewards, folder),
        {"rewards": [reward.stand_in() for reward in rewards]},
    ]
    small = _smallest(reduce(merge, changes, real), config)
    replaced = differences(real, small.model_dump(mode="json"))
    replaced = {name: values for name, values in replaced.items() if "rewards" not in name}
    names = ", ".join(reward.name for reward in rewards)
    replaced["rewards"] = names, "stand-ins of the same names and bounds"
    return Rehearsal(config=small, replaced=replaced)


def _small_pipeline(config: Config, folder: Path) -> dict[str, Any]:
    p = config.pipeline
    check_pipeline(p.path, p.revision)
    kind = pipeline_class(p.path, p.revision)
    tiny = family_of(kind).built_in
    side = None if tiny else SIDE
    small: dict[str, Any] = {
        "path": tiny or str(small_folder(diffusers_class(kind), folder / "pipeline")),
        "revision": None, "attention": None, "compile": False, "height": side, "width": side,
        "device": "cpu", "dtype": "fp32", "decode_batch": min(p.decode_batch, ROWS),
        "max_sequence_length": min(p.max_sequence_length, TOKENS),
    }  # fmt: skip
    if p.precision is not None:
        small["precision"] = "bf16" if p.precision == "bf16" else "nvfp4-emulated"
    if p.precision is not None or config.rollout.explore is not None:
        small["min_dim"] = 0  # the layers of a tiny network are all small
    memory: dict[str, Any] = {"base_bits": None}
    if config.memory.prompt_cache is not None:
        memory["prompt_cache"] = str(folder / "prompt-cache")
    return {"pipeline": small, "memory": memory}


def _small_rollout(config: Config) -> dict[str, Any]:
    r = config.rollout
    small: dict[str, Any] = {
        "prompts_per_iteration": PROMPTS, "batch_size": min(r.batch_size, ROWS), "workers": None,
        "store": None,
    }  # fmt: skip
    if r.explore is not None:
        precision = "bf16" if r.explore.precision == "bf16" else "nvfp4-emulated"
        small["explore"] = {"precision": precision}
    return {"rollout": small}


def _small_training(config: Config, folder: Path) -> dict[str, Any]:
    lora, optim, e, run = config.lora, config.optim, config.evaluation, config.run
    objective = config.objective
    # No LoRA of the real network fits the tiny one, and made-up prompts have other metadata.
    taught: dict[str, Any] = {}
    if isinstance(objective, DistillOptions):
        teachers = [{"lora": None} for _ in objective.teachers]
        taught = {"objective": {"kind": objective.kind, "teachers": teachers}}
    rank, counts = min(lora.rank, RANK), e.step_counts
    # As many numbers of steps as the recipe evaluates at, each once and small.
    steps = min(counts[0], 4) if len(counts) == 1 else [2 + i for i in range(len(counts))]
    return {
        "prompts": {"refiner": config.prompts.refiner and {"model": None, "lr": None}},
        "lora": {
            "rank": rank, "alpha": lora.alpha / lora.rank * rank, "init_from": None,
            "targets": None,
        },
        **taught,
        "optim": {
            "updates_per_rollout": min(optim.updates_per_rollout, PROMPTS),
            "micro_batch": min(optim.micro_batch, ROWS),
        },
        "evaluation": {
            "num_images": min(e.num_images, IMAGES), "every": min(e.every, 1),
            "num_inference_steps": steps, "batch_size": min(e.batch_size, ROWS),
        },
        "run": {
            "output_dir": str(folder / "run"), "iterations": min(run.iterations, ITERATIONS),
            "checkpoint_every": 1, "sample_every": min(run.sample_every, 1), "max_minutes": None,
            "trackers": [], "push_to_hub": False,
        },
    }  # fmt: skip


def _smallest(data: dict[str, Any], config: Config) -> Config:
    """Take the fewest steps, group and candidates that everything else allows."""
    r, error = config.rollout, None
    counts = range(min(STEPS, r.num_inference_steps), r.num_inference_steps + 1)
    sizes = range(min(GROUP, r.group_size), r.group_size + 1)
    for steps, size in itertools.product(counts, sizes):
        rollout: dict[str, Any] = {"num_inference_steps": steps, "group_size": size}
        try:
            if (explore := r.explore) is not None:  # twice as many as are kept
                plain = parse_config(merge(data, {"rollout": rollout | {"explore": None}}))
                roots = max(plan.roots for plan in plain.plans())
                rollout["explore"] = {"candidates": min(explore.candidates, 2 * roots)}
            return parse_config(merge(data, {"rollout": rollout}))
        except UserError as refused:
            error = refused
    assert error is not None  # the recipe's own numbers are the last that are tried
    raise error


# --- rewards: the names and properties of the real ones, at no cost -----------------------------

STAND_IN = "flowrl.planning.dry_run:StandIn"
WAVES = 300.0  # radians from black to white: tiny images of one prompt differ by hundredths


class StandIn:
    """A wave over the brightness, between bounds; its mixture of colours depends on the name.

    The wave is short, so that the images of a prompt get scores that differ. The same image
    always gets the same score, gradients reach it, and it applies to every prompt.
    """

    def __init__(
        self,
        name: str,
        *,
        differentiable: bool = False,
        scope: str = "sample",
        low: float = 0.0,
        high: float = 1.0,
    ):
        self.name, self.differentiable, self.scope = name, differentiable, scope
        self.bounds = low, high
        self.version = f"stand-in of {name}"
        digits = blake2b(name.encode(), digest_size=3).digest()
        shares = torch.tensor([1.0 + digit for digit in digits])
        self.shares = shares / shares.sum()

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """Score images (B, 3, H, W) in [0, 1]: (B,) fp32 between the bounds."""
        low, high = self.bounds
        bright = (images.float().mean((2, 3)) * self.shares.to(images.device)).sum(1)
        return low + (high - low) * (0.5 + 0.5 * (WAVES * bright).sin())


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedReward:
    """What is known of a reward without its weights or its server."""

    name: str  # in reports
    reward: Any  # object without weights, or its class or function; None on a server
    entry: RewardOptions

    def spec(self) -> RewardSpec | None:
        """Return the real one as far as it can be asked about prompts; None where it cannot."""
        if self.reward is None or isinstance(self.reward, type):
            return None
        e = self.entry
        return RewardSpec(
            name=self.name, reward=self.reward, weight=e.weight, held_out=e.held_out,
            applies_to={key: tuple(values) for key, values in e.applies_to.items()},
        )  # fmt: skip

    def stand_in(self) -> dict[str, Any]:
        """Return the recipe's entry with the scoring replaced, for all prompts."""
        low, high = getattr(self.reward, "bounds", (0.0, 1.0))
        low, high = 0.0 if low is None else float(low), 1.0 if high is None else float(high)
        args = {
            "name": self.name,
            "differentiable": getattr(self.reward, "differentiable", False) is True,
            "scope": getattr(self.reward, "scope", "sample"),
            "low": low,
            "high": high if high > low else low + 1,
        }
        fields = self.entry.model_dump(exclude={"name", "args", "executor", "label", "applies_to"})
        return fields | {"name": STAND_IN, "args": args, "label": self.name}


def inspect_reward(entry: RewardOptions) -> InspectedReward:
    """Find an entry's reward without weights. Raises UserError for a wrong name or arguments."""
    if isinstance(entry.executor, HTTPOptions):
        return InspectedReward(name=entry.full_name(None), reward=None, entry=entry)
    reward = _built_in(entry.name, entry.args) if entry.name in BUILT_IN else _find(entry.name)
    return InspectedReward(name=entry.full_name(reward), reward=reward, entry=entry)


def _built_in(name: str, args: Mapping[str, Any]) -> Any:
    """Make a reward, which loads weights when first asked; its class if a package is missing."""
    try:
        return load_reward(name, args)
    except UserError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return _find(BUILT_IN[name])


def _find(target: str) -> Any:
    """Import one's own reward without making it, which may load weights."""
    if ":" not in target:
        load_reward(target)  # raises the sentence with the known names
    try:
        return load_callable(target)
    except LookupError as error:
        raise UserError(f"cannot load reward {target!r}: {error.args[0]}") from error


# --- prompts ------------------------------------------------------------------------------------

COUNT = 12  # enough to hold some out
FALLBACK = "tiny:geneval"


def _few_prompts(
    config: Config, rewards: Sequence[InspectedReward], folder: Path
) -> dict[str, Any]:
    """Check all prompts that are on this machine as training does; take the first of them."""
    p, e = config.prompts, config.evaluation
    train = _prompts_here(p.train)
    test = None if e.prompts is None else _prompts_here(e.prompts)
    if train and test:
        check_overlap(train, test, allowed=p.allow_overlap)
    specs = [spec for spec in (reward.spec() for reward in rewards) if spec is not None]
    all_can_be_asked = len(specs) == len(rewards)
    if train is not None:
        PromptSampler(train, 1, 0, balance=p.balance, weights=p.weights)  # raises where none fits
        if all_can_be_asked:
            check_prompts(specs, train)
    if test is not None:
        PromptSampler(test, 1, 0, balance=e.balance)
        if all_can_be_asked:
            check_evaluation(specs, test)
    held_out = None if e.prompts is None else _write_first(test, folder, "test")
    few = {"train": _write_first(train, folder, "train")}
    return {
        # Few prompts need not have every kind, and those that stand in may ask for the same.
        "prompts": few | {"balance": None, "weights": None, "allow_overlap": True},
        "evaluation": {"prompts": held_out, "balance": None},
    }


def _prompts_here(source: str) -> list[PromptRecord] | None:
    """Return the prompts of a source; None where they are neither built in nor on this machine."""
    if source.startswith(HUB) or not (source.startswith(TINY) or Path(source).exists()):
        return None
    return load_prompts(source)


def _write_first(records: Sequence[PromptRecord] | None, folder: Path, split: str) -> str:
    """Write COUNT prompts without metadata, which no stand-in reads; return their source."""
    if records is None:
        return f"{FALLBACK}:{split}"
    rows = [
        {"prompt": r.text} | ({} if r.negative is None else {"negative": r.negative})
        for r in records[:COUNT]
    ]
    path = folder / f"{split}.jsonl"
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
