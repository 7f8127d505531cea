"""From options to stages: what draws exactly, and what explores cheaply before it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.backbones.base import Backbone
from flowrl.backbones.policy import OLD, POLICY, Policy
from flowrl.backbones.quantized_base import is_rounded
from flowrl.backbones.text_cache import TextCache
from flowrl.build.build_precision import layer_rules
from flowrl.build.rewards import build_limit
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs
from flowrl.quantization.backends import Backend, Plain
from flowrl.quantization.layer_rules import LayerChoice
from flowrl.quantization.precision import (
    Capability,
    Resolved,
    capability_of,
    next_lower,
    resolve,
)
from flowrl.quantization.prepare import prepare
from flowrl.quantization.report import write_precision
from flowrl.quantization.rollout_model import Twin
from flowrl.sampling.audit_log import AuditLog
from flowrl.sampling.gate import Gate
from flowrl.sampling.networks import of_twin, policys_own, with_network
from flowrl.sampling.stage import Stage
from flowrl.sampling.two_stage import Explorer
from flowrl.scoring.spec import RewardSpec
from flowrl.trees.plan import PlanError, TreePlan
from flowrl.utils.distributed import Runtime

WHERE = "rollout.explore"
EXPLORING = ("time/explore", "time/explore_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What all stages of a run share: who draws, with which guidance, judged by whom."""

    config: Config
    runtime: Runtime
    specs: Sequence[RewardSpec]
    policy: Policy
    backbone: Backbone  # with the guidance of rollouts
    needs: Needs
    encode: TextCache

    @property
    def adapter(self) -> str:
        """The old policy where the objective wants that; else the policy."""
        return OLD if self.needs.old is not None and self.needs.old.samples else POLICY

    @property
    def merged(self) -> bool:
        """Whether the adapter is folded into the weights that draw exactly."""
        # Folding rounds the weights: in fp32 that is far below any clip, in half precision not.
        wanted, p = self.config.rollout.merge_lora, self.config.pipeline
        return p.dtype == "fp32" and self.foldable if wanted == "auto" else wanted

    @property
    def foldable(self) -> bool:
        """Whether the frozen weights are such that an adapter can be folded into them: neither
        packed for training nor kept in few bits."""
        return self.config.pipeline.precision is None and not is_rounded(self.policy.network)


def whole_prompts(needs: Needs, specs: Sequence[RewardSpec]) -> bool:
    """Whether one process must draw all pictures of a prompt: they are compared there."""
    return needs.complete_groups or any(spec.whole_groups for spec in specs)


def build_stage(d: Drawing) -> Stage:
    """What draws the pictures that are learned from."""
    r, backbone = d.config.rollout, d.backbone
    network = functools.partial(
        policys_own, d.policy, backbone, d.adapter, merged=d.merged, runtime=d.runtime
    )
    if r.compile:
        twin = Twin(
            d.policy,
            (),
            Plain(backbone.dtype),
            lora="merge" if d.merged else "side",
            compile=True,
        )
        backbone = with_network(backbone, twin.network)
        network = functools.partial(of_twin, twin, backbone, d.adapter, runtime=d.runtime)
    return Stage(
        backbone=backbone,
        network=network,
        encode=d.encode,
        specs=d.specs,
        runtime=d.runtime,
        failures=build_limit(d.config),
        steps=r.steps,
        kernel=KERNELS[r.kernel],
        level=r.noise_level,
        batch_size=r.batch_size,
        decode_batch=d.config.pipeline.decode_batch,
        whole_prompts=whole_prompts(d.needs, d.specs),
    )


def build_explorer(d: Drawing, exact: Stage) -> Explorer | None:
    """What names the trees that `exact` draws; None without `rollout.explore`.

    Raises UserError for a precision that the device lacks, and layers that cannot be quantised.
    """
    e, seed = d.config.rollout.explore, d.config.run.seed
    if e is None:
        return None
    capability = capability_of(d.runtime.device)
    first = resolve(e.precision, capability, where=WHERE)
    falls = e.audit.every and e.audit.on_miss == "degrade"
    for resolved in _ladder(first, capability) if falls else [first]:
        low_precision(d, resolved)  # what cannot work is told before anything is drawn
    plan = functools.partial(plan_at, d.config.rollout.candidates, seed)

    def exact_plan(iteration: int) -> TreePlan:
        return replace(plan_at(d.config.rollout.plan, seed, iteration), roots=e.candidates)

    gate = Gate(
        make=functools.partial(_exploring, d, exact),
        first=first,
        capability=capability,
        exact=exact,
        plan=plan,
        exact_plan=exact_plan,
        keep=lambda iteration: d.config.rollout.plan(iteration, seed).roots,
        mode=e.select,
        every=e.audit.every,
        prompts=e.audit.prompts,
        min_rho=e.audit.min_rho,
        on_miss=e.audit.on_miss,
        log=AuditLog(Path(d.config.run.output_dir)),
    )
    return Explorer(stage=gate, plan=plan, mode=e.select)


def _exploring(d: Drawing, exact: Stage, resolved: Resolved, since: int) -> Stage:
    """The stage that draws candidates from an iteration on, which is told and written down."""
    e = d.config.rollout.explore
    assert e is not None
    choices, backend = low_precision(d, resolved)
    if d.runtime.is_main:
        write_precision(
            Path(d.config.run.output_dir),
            resolved,
            choices,
            dtype=d.backbone.dtype,
            since=since,
            lora=e.lora,
            four_over_six=e.four_over_six,
        )
    return draft_stage(d, exact, choices, backend)


def _ladder(resolved: Resolved | None, capability: Capability) -> Iterator[Resolved]:
    """A precision and those that follow where audits are missed."""
    while resolved is not None:
        yield resolved
        resolved = next_lower(resolved, capability)


def draft_stage(
    d: Drawing, exact: Stage, choices: Sequence[LayerChoice], backend: Backend
) -> Stage:
    """The stage that draws candidates. Its rewards are those that are trained.

    choices, backend: see `low_precision`. Without choices and with the adapter folded in or beside
    the weights as in `exact`, it draws with the network of that.
    """
    r, e = d.config.rollout, d.config.rollout.explore
    assert e is not None
    backbone, network = exact.backbone, exact.network
    folds = e.lora == "merge" and d.foldable
    if choices or folds != d.merged:
        twin = Twin(d.policy, choices, backend, lora=e.lora, compile=r.compile)
        backbone = with_network(backbone, twin.network)
        network = functools.partial(of_twin, twin, backbone, d.adapter, runtime=d.runtime)
    trained = [spec for spec in d.specs if spec.trained]
    return replace(
        exact,
        backbone=backbone,
        network=network,
        specs=trained,
        failures=replace(build_limit(d.config), max_streak=None),
        steps=r.steps if e.steps is None else e.steps,
        whole_prompts=any(spec.whole_groups for spec in trained),
        times=EXPLORING,
    )


def low_precision(d: Drawing, resolved: Resolved) -> tuple[tuple[LayerChoice, ...], Backend]:
    """The layers of candidates' network, and how they multiply: see `prepare`."""
    e = d.config.rollout.explore
    assert e is not None
    return prepare(
        d.policy.network,
        resolved,
        dtype=d.backbone.dtype,
        device=d.runtime.device,
        rules=layer_rules(d.backbone),
        min_dim=e.min_dim,
        keep=e.keep_layers,
        four_over_six=e.four_over_six,
        where=WHERE,
    )


def plan_at(plan: Callable[[int, int], TreePlan], seed: int, iteration: int) -> TreePlan:
    """A plan of an iteration. Raises UserError for one that cannot be drawn."""
    try:
        return plan(iteration, seed)
    except PlanError as error:
        raise UserError(f"iteration {iteration} cannot be drawn: {error}") from error
