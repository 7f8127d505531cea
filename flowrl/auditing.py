"""What `flowrl audit` does: all candidates of a few prompts, cheaply in every way and exactly.

Cheap and exact pictures start from the same noise; whatever their ranking loses is lost to fewer
steps, to the precision, and to noise that the exact pictures' tree adds on the way.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.api import try_rewards
from flowrl.build.learner import PRECISION, Given, as_given, build_learner, drawn_prompts
from flowrl.build.rollout import Drawing, draft_stage, low_precision, plan_at
from flowrl.collecting import with_lora
from flowrl.config import Config, load_config
from flowrl.config.load import load_recipe
from flowrl.config.sections_explore import Explore
from flowrl.quantization.layer_rules import quantised_share
from flowrl.quantization.precision import Capability, Resolved, capability_of, named, resolve
from flowrl.quantization.training import packed_within
from flowrl.sampling.rank_audit import audit
from flowrl.sampling.rollout import Request, Stopwatch
from flowrl.sampling.source import Sampler
from flowrl.sampling.stage import Stage
from flowrl.sampling.two_stage import score_candidates
from flowrl.scoring.spec import Reward, closing
from flowrl.training.loop import Learner
from flowrl.trees.plan import TreePlan
from flowrl.trees.shape import count
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import Steps

Row = dict[str, Any]


def audited(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    prompts: int,
    candidates: int | None = None,
    steps: Sequence[int] = (),
) -> list[Config]:
    """The recipe as it explores, once for each number of a candidate's steps.

    prompts: how many; candidates: of each. None or empty: as `rollout.explore` has it, or its
    defaults where the recipe has none; of a rollout that has fewer steps than the default, all but
    one. Raises UserError for what cannot be drawn.
    """
    # Only pictures are drawn: what would be learned from them asks nothing of the rollout.
    drawn = ["rollout.store=null", "objective={kind: sft}", "optim.updates_per_rollout=1"]
    drawn += [f"rollout.prompts={prompts}", "rollout.explore={audit: {every: 0}}"]
    if candidates is not None:
        drawn.append(f"rollout.explore.candidates={candidates}")
    steps = steps or _fewer(recipe, [*overrides, *drawn])
    kinds = [[f"rollout.explore.steps={number}"] for number in dict.fromkeys(steps)] or [[]]
    return [load_config(recipe, [*overrides, *drawn, *kind]) for kind in kinds]


def _fewer(recipe: str | Path, overrides: Sequence[str]) -> list[int]:
    """The rollout's steps less one, where a recipe sets no candidate's and the default is more."""
    if "steps" in load_recipe(recipe, overrides)["rollout"]["explore"]:
        return []
    whole = load_config(recipe, [*overrides, "rollout.explore.steps=null"]).rollout.steps
    return [max(2, whole - 1)] if whole < Explore.model_fields["steps"].default else []


def audit_previews(
    configs: Sequence[Config],
    *,
    precisions: Sequence[str] = (),
    lora: str | None = None,
    pipeline: Any = None,
    rewards: Mapping[str, Reward] | None = None,
) -> list[Row]:
    """Draw all candidates of an iteration's prompts as previews of all kinds, and once exactly.

    configs: see `audited`; they differ in `rollout.explore.steps` alone. precisions: of previews,
    each with all these steps; none is the recipe's. lora: a run or file, of the model that draws.
    pipeline, rewards: objects to use in place of those that the recipe names. -> a row for each
    kind, then one of the exact pictures and one of choices at random. Raises UserError for a
    precision that the device lacks, before anything is drawn.
    """
    configs = [as_given(config, pipeline) for config in configs]
    if lora is not None:
        configs = [with_lora(config, lora) for config in configs]
    if configs[0].run.threads is not None:
        torch.set_num_threads(configs[0].run.threads)
    p = configs[0].pipeline
    runtime = Runtime(device=p.device, mixed_precision=PRECISION[p.dtype])
    resolved = _resolved(configs[0], precisions, capability_of(runtime.device))
    given = Given(pipeline=pipeline, rewards=rewards)
    learner = build_learner(_not_exploring(configs[0]), runtime, given)
    bar = Steps("auditing", len(configs) * len(resolved) + 1) if runtime.is_main else None
    packed = packed_within(learner.policy.network)
    with closing(learner.specs), packed, bar or nullcontext():
        for one in resolved:
            low_precision(_drawing(configs[0], learner), one)  # told before anything is drawn
        with runtime.together():
            try_rewards(learner, drawn_prompts(configs[0], given))
        exact = _exact(configs[0], learner, bar)
        rows = [row for one in resolved for row in _rows(configs, learner, exact, one, bar)]
    return [*rows, *_ends(configs[0], exact)] if runtime.is_main else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exact:
    """All candidates, drawn and scored as those that are learned from."""

    request: Request
    true: Tensor  # (P, N)
    seconds: float  # a picture


def _resolved(config: Config, precisions: Sequence[str], capability: Capability) -> list[Resolved]:
    """What was asked for, or what the recipe explores in; each once."""
    names = precisions or (_explore(config).precision,)
    return [resolve(name, capability) for name in dict.fromkeys(names)]


def _explore(config: Config) -> Explore:
    explore = config.rollout.explore
    assert explore is not None  # see `audited`
    return explore


def _not_exploring(config: Config) -> Config:
    """The recipe as it draws exactly: its own precision is not what is asked about."""
    rollout = config.rollout.model_copy(update={"explore": None})
    return config.model_copy(update={"rollout": rollout})


def _sampler(learner: Learner) -> Sampler:
    assert isinstance(learner.source, Sampler)  # the recipe has no store
    return learner.source


def _exact(config: Config, learner: Learner, bar: Steps | None) -> _Exact:
    explore, sampler = _explore(config), _sampler(learner)
    plan = replace(plan_at(config.rollout.plan, config.run.seed, 0), roots=explore.candidates)
    request = sampler.request(0, plan)
    with torch.no_grad(), learner.runtime.autocast():
        sampler.stage.encode(request.prompts)  # once for all: it is nobody's time
    # Its rewards are those of the previews: what is only held out decides nothing here.
    stage = replace(sampler.stage, specs=[spec for spec in learner.specs if spec.trained])
    true, seconds = _timed(stage, request, plan, compiled=config.rollout.compile)
    if bar is not None:
        bar.advance({"s/picture": seconds})
    return _Exact(request=request, true=true, seconds=seconds)


def _rows(
    configs: Sequence[Config],
    learner: Learner,
    exact: _Exact,
    resolved: Resolved,
    bar: Steps | None,
) -> Iterator[Row]:
    """Draw the candidates in one precision, with each number of steps, and compare."""
    stage, share = _previews(configs[0], learner, resolved)
    for config in configs:
        steps = _explore(config).steps or config.rollout.steps
        plan = plan_at(config.rollout.candidates, config.run.seed, 0)
        compiled = config.rollout.compile
        proxy, seconds = _timed(replace(stage, steps=steps), exact.request, plan, compiled=compiled)
        found = _compared(config, proxy, exact.true)
        if bar is not None:
            bar.advance({"rho": found["rho"]})
        yield (
            {"steps": steps, "precision": named(resolved), "quantised": share}
            | found
            | {"s/picture": seconds, "to exact": seconds / exact.seconds}
        )


def _drawing(config: Config, learner: Learner) -> Drawing:
    return Drawing(
        config=config,
        runtime=learner.runtime,
        specs=learner.specs,
        policy=learner.policy,
        backbone=_sampler(learner).stage.backbone,
        encode=_sampler(learner).stage.encode,
        needs=learner.objective.needs,
    )


def _previews(config: Config, learner: Learner, resolved: Resolved) -> tuple[Stage, float]:
    """What draws them, and the share of the network's weights that it quantises."""
    drawing = _drawing(config, learner)
    choices, backend = low_precision(drawing, resolved)
    stage = draft_stage(drawing, _sampler(learner).stage, choices, backend)
    return stage, quantised_share(choices) if choices else 0.0


def _timed(
    stage: Stage, request: Request, plan: TreePlan, *, compiled: bool
) -> tuple[Tensor, float]:
    """Scores (P, N), and the seconds that a picture took: drawn, decoded and scored."""
    if compiled:
        score_candidates(stage, request, plan, Stopwatch())  # compiling is nobody's time either
    watch = Stopwatch()
    scores = score_candidates(stage, request, plan, watch)
    pictures = scores.shape[0] * count(plan).leaves
    return scores, sum(watch.seconds.values()) / pictures


def _compared(config: Config, proxy: Tensor, true: Tensor) -> Row:
    keep = config.rollout.plan(0, config.run.seed).roots
    return audit(proxy, true, keep, _explore(config).select).summary()


def _ends(config: Config, exact: _Exact) -> list[Row]:
    """The best and the poorest that previews could do: choices by exact scores, and at random."""
    found = _compared(config, exact.true, exact.true)
    middle = (exact.true.isfinite().sum(1).double().mean().item() + 1) / 2
    return [
        {"steps": config.rollout.steps, "precision": "exact", "quantised": 0.0}
        | found
        | {"s/picture": exact.seconds, "to exact": 1.0},
        {"precision": "random", "rank best": middle, "rank worst": middle},
    ]
