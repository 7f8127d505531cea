"""From options to stages: what draws exactly, and what explores cheaply before it."""

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from flowrl.backbones.base import Backbone
from flowrl.backbones.lora_files import lora_file
from flowrl.backbones.policy import OLD, POLICY, Policy
from flowrl.backbones.quantized_base import is_quantised
from flowrl.backbones.text_cache import TextCache
from flowrl.build.backbone import rounding_key
from flowrl.build.backbone import layer_rules, learning_guidance
from flowrl.config import Config
from flowrl.config.load import with_old_names
from flowrl.config.objectives import check_noising
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs
from flowrl.offline.format import DatasetMetadata, OfflineDataset, open_dataset
from flowrl.offline.source import Caching, StoredGroups, check_dataset
from flowrl.offline.writer import Refresher
from flowrl.quantization.backends import (
    Backend,
    Capability,
    Plain,
    Resolved,
    capability_of,
    next_lower,
    resolve,
)
from flowrl.quantization.layer_rules import LayerChoice
from flowrl.quantization.rollout_model import RolloutModel, prepare, write_precision
from flowrl.sampling.rank_audit import AuditLog, PrecisionController
from flowrl.sampling.rollout import (
    RolloutGenerator,
    policy_velocity,
    rollout_model_velocity,
    with_network,
)
from flowrl.sampling.source import Sampler
from flowrl.sampling.two_stage import Explorer
from flowrl.scoring.spec import RewardSpec
from flowrl.trees.plan import PlanError, TreePlan
from flowrl.utils.distributed import Runtime

WHERE = "rollout.explore"
EXPLORING = ("time/explore", "time/explore_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What all stages of a run share: who draws, with which guidance, judged by whom."""

    config: Config
    runtime: Runtime
    specs: Sequence[RewardSpec]
    policy: Policy
    backbone: Backbone  # with the guidance of rollouts
    needs: Needs
    text_cache: TextCache

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
        return self.config.pipeline.precision is None and not is_quantised(self.policy.network)


def whole_prompts(needs: Needs, specs: Sequence[RewardSpec]) -> bool:
    """Whether one process must draw all images of a prompt: they are compared there."""
    return needs.complete_groups or any(spec.whole_groups for spec in specs)


def build_generator(d: RolloutParts) -> RolloutGenerator:
    """What draws the images that are learned from."""
    r, backbone = d.config.rollout, d.backbone
    network = functools.partial(
        policy_velocity, d.policy, backbone, d.adapter, merged=d.merged, runtime=d.runtime
    )
    if r.compile:
        twin = RolloutModel(
            d.policy,
            (),
            Plain(backbone.dtype),
            lora="merge" if d.merged else "side",
            compile=True,
        )
        backbone = with_network(backbone, twin.network)
        network = functools.partial(
            rollout_model_velocity, twin, backbone, d.adapter, runtime=d.runtime
        )
    return RolloutGenerator(
        backbone=backbone,
        network=network,
        text_cache=d.text_cache,
        specs=d.specs,
        runtime=d.runtime,
        failures=d.config.failures.build(),
        num_inference_steps=r.num_inference_steps,
        kernel=KERNELS[r.kernel],
        noise_level=r.noise_level,
        batch_size=r.batch_size,
        decode_batch=d.config.pipeline.decode_batch,
        whole_prompts=whole_prompts(d.needs, d.specs),
    )


def build_explorer(d: RolloutParts, exact: RolloutGenerator) -> Explorer | None:
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
        preview_layers(d, resolved)  # what cannot work is told before anything is drawn
    plan = functools.partial(plan_at, d.config.rollout.candidates, seed)

    def exact_plan(iteration: int) -> TreePlan:
        return replace(plan_at(d.config.rollout.plan, seed, iteration), roots=e.candidates)

    controller = PrecisionController(
        make=functools.partial(_exploring, d, exact),
        first=first,
        capability=capability,
        exact=exact,
        plan=plan,
        exact_plan=exact_plan,
        keep=lambda iteration: d.config.rollout.plan(iteration, seed).roots,
        select=e.select,
        every=e.audit.every,
        prompts=e.audit.prompts,
        min_rho=e.audit.min_rho,
        on_miss=e.audit.on_miss,
        log=AuditLog(Path(d.config.run.output_dir)),
    )
    return Explorer(preview=controller.current, plan=plan, select=e.select)


def _exploring(
    d: RolloutParts, exact: RolloutGenerator, resolved: Resolved, since: int
) -> RolloutGenerator:
    """The stage that draws candidates from an iteration on, which is told and written down."""
    e = d.config.rollout.explore
    assert e is not None
    choices, backend = preview_layers(d, resolved)
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
    return build_preview_generator(d, exact, choices, backend)


def _ladder(resolved: Resolved | None, capability: Capability) -> Iterator[Resolved]:
    """A precision and those that follow where audits are missed."""
    while resolved is not None:
        yield resolved
        resolved = next_lower(resolved, capability)


def build_preview_generator(
    d: RolloutParts, exact: RolloutGenerator, choices: Sequence[LayerChoice], backend: Backend
) -> RolloutGenerator:
    """The stage that draws candidates. Its rewards are those that are trained.

    choices, backend: see `preview_layers`. Without choices and with the adapter folded in or beside
    the weights as in `exact`, it draws with the network of that.
    """
    r, e = d.config.rollout, d.config.rollout.explore
    assert e is not None
    backbone, network = exact.backbone, exact.network
    folds = e.lora == "merge" and d.foldable
    if choices or folds != d.merged:
        twin = RolloutModel(d.policy, choices, backend, lora=e.lora, compile=r.compile)
        backbone = with_network(backbone, twin.network)
        network = functools.partial(
            rollout_model_velocity, twin, backbone, d.adapter, runtime=d.runtime
        )
    trained = [spec for spec in d.specs if spec.trained]
    return replace(
        exact,
        backbone=backbone,
        network=network,
        specs=trained,
        failures=replace(d.config.failures.build(), max_streak=None),
        num_inference_steps=r.num_inference_steps
        if e.num_inference_steps is None
        else e.num_inference_steps,
        whole_prompts=any(spec.whole_groups for spec in trained),
        times=EXPLORING,
    )


def preview_layers(d: RolloutParts, resolved: Resolved) -> tuple[tuple[LayerChoice, ...], Backend]:
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


# --- From options to stores: how one was made, and one as the source of rollouts ---------------

# Options under `rollout` that leave the images as they are.
INDIFFERENT = {
    "batch_size", "compile", "depth_pruning", "merge_lora", "store", "training_guidance_scale",
}  # fmt: skip
# Options under `pipeline` that change them, beside what a store says of it anyway.
DECISIVE = {"max_sequence_length", "precision", "keep_layers", "min_dim"}
REFERENCE = "reference.safetensors"
STORES = "stores"


def build_stored(
    config: Config,
    sampler: Sampler,
    backbone: Backbone,
    redraw: Callable[[Config], Sampler],
    text_cache: TextCache,
) -> StoredGroups:
    """The source that reads `rollout.store`, checked against the recipe.

    sampler: what would draw instead; backbone: with the guidance of training; redraw: what draws
    as another recipe says, with the same policy, when the store is refreshed; text_cache: reads the
    store's prompts.
    """
    r, p, folder = config.rollout, config.pipeline, Path(config.run.output_dir)
    assert r.store is not None and r.store.path is not None
    store = open_dataset(r.store.path)
    stage = sampler.generator
    check_dataset(store, stage.backbone, stage.specs, pipeline=p.path, family=p.backbone)
    _check_draws(config, store)
    refresher = caching = None
    if r.store.refresh_every is not None:
        refresher = _refresher(config, store, redraw, r.store.refresh_every)
    if r.store.cache_draws is not None:
        key = _reference_key(config)
        caching = Caching(draws=r.store.cache_draws, path=folder / REFERENCE, key=key)
    source = StoredGroups(
        store,
        backbone=backbone,
        text_cache=text_cache,
        specs=stage.specs,
        runtime=stage.runtime,
        prompts=r.prompts_per_iteration,
        group_size=r.group_size,
        seed=config.run.seed,
        balance=config.prompts.balance,
        refresher=refresher,
        caching=caching,
    )
    if source.sampler.skipped and stage.runtime.is_main:
        warnings.warn(
            f"{source.sampler.skipped} groups of {r.store.path} are never read: fewer than two of their "
            "images have a reward",
            stacklevel=2,
        )
    return source


def _check_draws(config: Config, store: OfflineDataset) -> None:
    """The noise levels that the store was drawn with are enough for what is asked of them."""
    noising, stored = getattr(config.objective, "noising", None), config.rollout.store
    if noising is None or stored is None:
        return
    try:
        check_noising(noising, len(store.metadata.sigmas) - 1, stored.cache_draws)
    except ValueError as error:
        raise UserError(str(error)) from error


def _refresher(
    config: Config, store: OfflineDataset, redraw: Callable[[Config], Sampler], every: int
) -> Refresher:
    """Draws as the recipe says, but as many images of a prompt as the store has."""
    size = max(len(group.images) for group in store.groups)
    rollout = config.rollout.model_copy(update={"group_size": size, "store": None})
    config = config.model_copy(update={"rollout": rollout})
    sampler = redraw(config)
    sampler.plan(0)  # or it would be refused only when it is drawn
    return Refresher(
        original=store,
        metadata=dataset_metadata(config, sampler),
        sampler=sampler,
        every=every,
        folder=Path(config.run.output_dir) / STORES,
    )


def _reference_key(config: Config) -> str:
    """Everything but the store that decides the reference's errors; rather too much than less."""
    r, p = config.rollout, config.pipeline.model_dump(exclude={"device", "decode_batch"})
    p, guidance = p | rounding_key(config), learning_guidance(config)
    objective = with_old_names("objective", config.objective.model_dump(mode="json"))
    parts = [p, objective, guidance, r.negative_prompt]
    return _digest([json.dumps(parts, sort_keys=True)])


def dataset_metadata(config: Config, sampler: Sampler) -> DatasetMetadata:
    """How the sampler of a recipe makes images."""
    p, lora = config.pipeline, config.lora.init_from
    uids = sorted(r.uid for records in sampler.prompts.kinds.values() for r in records)
    return DatasetMetadata(
        pipeline=p.path,
        backbone=p.backbone,
        latent_shape=list(sampler.generator.backbone.latent_shape()),
        dtype=str(sampler.generator.backbone.dtype).removeprefix("torch."),
        sigmas=sampler.generator.schedule().sigmas.tolist(),
        rewards=[
            {
                "name": spec.name,
                "version": getattr(spec.reward, "version", None),
                "weight": 0.0 if spec.held_out else spec.weight,
            }
            for spec in sampler.generator.specs
        ],
        recipe={
            "rollout": config.rollout.model_dump(mode="json", exclude=INDIFFERENT),
            "pipeline": p.model_dump(mode="json", include=DECISIVE) | rounding_key(config),
            "prompts": config.prompts.model_dump(mode="json") | {"digest": _digest(uids)},
            "run": {"seed": config.run.seed},
        },
        lora=None if lora is None else {"path": lora, "digest": _file_digest(lora_file(lora))},
    )


def _digest(words: Sequence[str]) -> str:
    return blake2b("\n".join(words).encode(), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()
