"""Do the parts that a recipe names keep their contracts: backbone, objective and rewards?"""

import tempfile
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from flowrl.assembly.backbone import build_backbone
from flowrl.assembly.learner import (
    ProvidedObjects,
    build_learner,
    prompts_of_iterations,
    training_prompts,
)
from flowrl.config import Config, parse_config
from flowrl.errors import CheckResult
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.check import Trial, check_reward, trials_of
from flowrl.scoring.executors.base import InlineExecutor, read_answer
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import RewardSpec, closing
from flowrl.training.loop import Learner
from flowrl.utils.distributed import Runtime
from flowrl.verify.backbone import check_backbone
from flowrl.verify.figures import guarded, judged, passed, unsure
from flowrl.verify.objective import check_objective_on

PARTS = ("backbone", "rewards", "objective")
PROMPTS = 2  # groups of the rollout that objectives are checked on


def verify_recipe(
    config: Config, *, parts: Collection[str] = PARTS, pipeline: Any = None
) -> Iterator[CheckResult]:
    """Check a recipe's parts with figures, on a rollout of two prompts.

    Args:
        parts: some of PARTS.
        pipeline: a loaded one in place of the recipe's, without adapters.
    """
    with tempfile.TemporaryDirectory() as scratch:
        small = _small(config, scratch)
        if small.run.threads is not None:
            torch.set_num_threads(small.run.threads)
        given = ProvidedObjects(pipeline=pipeline)
        needed = prompts_of_iterations(small, given, 1)
        runtime = Runtime(device=small.pipeline.device)
        learner = build_learner(small, runtime, given, needed=needed)
        with closing(learner.specs):
            yield passed("recipe", f"{config.pipeline.path}, {config.objective.kind}")
            if "backbone" in parts:
                yield from guarded("backbone", lambda: _backbone(small, learner))
            if "rewards" in parts:
                yield from _rewards(small, learner)
            if "objective" in parts:
                kernel = small.rollout.kernel
                yield from guarded("objective", lambda: check_objective_on(learner, kernel))


def _small(config: Config, folder: str) -> Config:
    """Return the recipe with fewer prompts at a time, and nothing written outside `folder`."""
    data = config.model_dump(mode="json")
    data["run"] |= {"output_dir": folder, "trackers": []}
    data["optim"]["updates_per_rollout"] = 1
    prompts = min(PROMPTS, config.rollout.prompts_per_iteration)
    data["rollout"]["prompts_per_iteration"] = prompts
    data["rollout"]["explore"] = None  # its candidates are not learned from
    data["prompts"]["retained"] = None
    return parse_config(data)


def _backbone(config: Config, learner: Learner) -> Iterator[CheckResult]:
    pipeline = learner.policy.backbone.pipeline
    with learner.policy.disabled():
        yield from check_backbone(
            lambda guidance: build_backbone(config.pipeline, pipeline, guidance=guidance),
            config.rollout.guidance_scale,
        )


def _rewards(config: Config, learner: Learner) -> Iterator[CheckResult]:
    prompts, size = (
        training_prompts(config, ProvidedObjects()),
        learner.policy.backbone.image_size(),
    )
    for spec in learner.specs:
        yield from guarded(spec.name, partial(check_reward_contract, spec, prompts, size))


def check_reward_contract(
    spec: RewardSpec, prompts: Sequence[PromptRecord], size: tuple[int, int]
) -> Iterator[CheckResult]:
    """Check a reward as training does, and what it does to its images and says of missing scores.

    size: height and width of plain images.
    """
    found = check_reward(spec, prompts, size=size).results
    yield from found
    whole = any(result.state in ("problem", "missing") for result in found)
    if whole or not isinstance(spec.get_executor(), InlineExecutor):
        return  # what a server or a process does to its copies is its own affair
    trials = trials_of(spec, spec.reward, prompts, size)
    for trial in trials[:1]:
        yield from _check_call(spec, trial)


def _check_call(spec: RewardSpec, trial: Trial) -> Iterator[CheckResult]:
    images = quantise(trial.images)
    given, metadata = images.clone(), [dict(trial.metadata) for _ in images]
    texts = [trial.prompt] * len(images)
    with torch.no_grad():
        answer = read_answer(spec.reward(given, texts, metadata), len(images))
    same = torch.equal(given, images) and all(its == trial.metadata for its in metadata)
    same = same and texts == [trial.prompt] * len(images)
    yield judged(
        spec.name, same, "images, prompts and metadata are as they were" if same else
        "it writes into the images, prompts or metadata that it is given",
        "Work on copies: other rewards get the same images.",
    )  # fmt: skip
    silent = [row for row, reason in answer.reasons.items() if "no finite number" in reason]
    if silent:
        yield unsure(
            spec.name, f"{len(silent)} of {len(images)} images have no score and no reason",
            "Return (scores, {row: reason}), so that a run can say what is missing and why.",
        )  # fmt: skip
