"""Audit the candidates of a recipe that explores: sample and score them exactly and as previews."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.assembly.rollout import RolloutParts, build_preview_generator, preview_layers
from flowrl.config import Config, load_config
from flowrl.config.rollout import ExploreOptions, SelectRule
from flowrl.quantization.layer_rules import quantised_share
from flowrl.sampling.rank_audit import audit_ranks
from flowrl.sampling.rollout import Ahead, RolloutGenerator, RolloutRequest, Sampler, Timer
from flowrl.sampling.two_stage import score_candidates
from flowrl.training.loop import Learner
from flowrl.trees.plan import TreePlan, count

Row = dict[str, Any]


def audit_configs(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    prompts: int,
    candidates: int | None = None,
    steps: Sequence[int] = (),
    precisions: Sequence[str] = (),
) -> list[Config]:
    """Return the recipe as it explores, once for each precision and number of steps.

    Args:
        prompts, candidates: how many prompts, and candidates of each; None for the recipe's.
        steps, precisions: of candidates; empty for the recipe's, or the defaults of
            `rollout.explore`.
    """
    # Nothing is learned here, so the objective may ask nothing of the rollout.
    changes = ["rollout.store=null", "objective={kind: sft}", "optim.updates_per_rollout=1"]
    changes += [f"rollout.prompts_per_iteration={prompts}", "rollout.explore={audit: {every: 0}}"]
    if candidates is not None:
        changes.append(f"rollout.explore.candidates={candidates}")
    kinds = itertools.product(
        [[f"rollout.explore.precision={name}"] for name in dict.fromkeys(precisions)] or [[]],
        [[f"rollout.explore.num_inference_steps={n}"] for n in dict.fromkeys(steps)] or [[]],
    )
    return [load_config(recipe, [*overrides, *changes, *a, *b]) for a, b in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSamples:
    """All candidates, generated and scored like the images that are learned from."""

    request: RolloutRequest
    scores: Tensor  # (P, N)
    seconds: float  # per image


def exact_samples(config: Config, learner: Learner) -> ExactSamples:
    """Generate and score all candidates of the first iteration exactly."""
    sampler = sampler_of(learner)
    plan = config.rollout.plan(0, config.run.seed)
    explore = explore_options(config)
    plan = replace(plan, roots=explore.candidates)
    request = sampler.request(0, plan)
    with torch.no_grad(), learner.runtime.autocast():
        # Once for all rows: none of them is charged for it.
        sampler.generator.text_cache(request.prompts)
    # Held-out rewards decide nothing here.
    stage = replace(sampler.generator, specs=[spec for spec in learner.specs if spec.trained])
    scores, seconds = _timed(
        stage, request, plan, explore.select, compiled=bool(config.pipeline.compile)
    )
    return ExactSamples(request=request, scores=scores, seconds=seconds)


def candidate_rows(
    recipes: Sequence[RolloutParts], exact_stage: RolloutGenerator, exact: ExactSamples
) -> Iterator[Row]:
    """Generate the candidates of recipes in one precision, and compare them with the exact images.

    The recipes differ in steps alone, so that one copy of the network serves them all.
    """
    precision, layers, _ = preview_layers(recipes[0])
    stage = build_preview_generator(recipes[0], exact_stage)
    share = quantised_share(layers) if layers else 0.0
    for config in (parts.config for parts in recipes):
        explore, whole = explore_options(config), config.rollout.num_inference_steps
        scores, seconds = _timed(
            replace(stage, num_inference_steps=explore.num_inference_steps or whole),
            exact.request,
            config.rollout.candidates(0, config.run.seed),
            explore.select,
            compiled=bool(config.pipeline.compile),
        )
        steps = explore.forwards(whole)
        yield (
            {"steps": steps, "precision": precision, "quantised": share}
            | compare_ranks(config, scores, exact.scores)
            | {"seconds_per_image": seconds, "ratio_to_exact": seconds / exact.seconds}
        )


def compare_ranks(config: Config, proxy: Tensor, true: Tensor) -> Row:
    """Return the measures of candidates' scores (P, N) against exact ones; see `audit_ranks`."""
    keep = config.rollout.plan(0, config.run.seed).roots
    return asdict(audit_ranks(proxy, true, keep, explore_options(config).select))


def _timed(
    stage: RolloutGenerator,
    request: RolloutRequest,
    plan: TreePlan,
    select: SelectRule,
    *,
    compiled: bool,
) -> tuple[Tensor, float]:
    """Return scores (P, N), and the seconds an image took to generate, decode and score."""
    if compiled:
        score_candidates(stage, request, plan, Timer(), select)  # the first call compiles
    timer = Timer()
    scores = score_candidates(stage, request, plan, timer, select)
    return scores, sum(timer.seconds.values()) / (scores.shape[0] * count(plan).leaves)


def rollout_parts(config: Config, learner: Learner) -> RolloutParts:
    """Return what generators of a learner share, for a recipe that explores."""
    return RolloutParts(
        config=config,
        runtime=learner.runtime,
        specs=learner.specs,
        policy=learner.policy,
        backbone=sampler_of(learner).generator.backbone,
        text_cache=sampler_of(learner).generator.text_cache,
        needs=learner.objective.needs,
    )


def explore_options(config: Config) -> ExploreOptions:
    """Return rollout.explore of a recipe from `audit_configs`."""
    assert config.rollout.explore is not None  # see `audit_configs`
    return config.rollout.explore


def sampler_of(learner: Learner) -> Sampler:
    """Return the sampler of a learner that generates its own rollouts."""
    source = learner.source.sampler if isinstance(learner.source, Ahead) else learner.source
    assert isinstance(source, Sampler)  # the recipe reads no offline data set
    return source
