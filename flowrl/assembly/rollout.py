"""Build what samples: generators of exact images and of candidates, and the sampler of both."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from flowrl.assembly.backbone import network_dtype
from flowrl.backbones.base import VelocityField
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import OLD, POLICY, Policy
from flowrl.backbones.quantized_base import check_mergeable, is_quantised
from flowrl.backbones.text_cache import TextCache
from flowrl.config import Config
from flowrl.config.rollout import Precision
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs
from flowrl.prompts.book import PromptBook
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.quantization.backends import Backend, resolve
from flowrl.quantization.layer_rules import LayerChoice
from flowrl.quantization.rollout_model import RolloutModel, log_precision, prepare
from flowrl.sampling.rank_audit import RankAuditor
from flowrl.sampling.rewording import Rewording
from flowrl.sampling.rollout import (
    RolloutGenerator,
    Sampler,
    policy_velocity,
    rollout_model_velocity,
    with_network,
)
from flowrl.sampling.two_stage import Explorer
from flowrl.sampling.workers import RemoteGenerator, WorkerPool
from flowrl.scoring.spec import RewardSpec
from flowrl.utils.distributed import Runtime

EXPLORING = ("time/explore", "time/explore_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What all generators of a run share."""

    config: Config
    runtime: Runtime
    specs: Sequence[RewardSpec]
    policy: Policy
    backbone: PipelineBackbone  # with the guidance of rollouts
    needs: Needs  # the objective's
    text_cache: TextCache
    pool: WorkerPool | None = None  # of processes that sample for this one

    @property
    def adapter(self) -> str:
        """The adapter that samples: the old policy's where the objective needs its images."""
        return OLD if self.needs.old is not None and self.needs.old.samples else POLICY

    @property
    def merged(self) -> bool:
        """Whether the adapter is folded into the weights that sample exactly.

        Raises UserError where that is wanted of quantised weights.
        """
        # Folding rounds the weights: in fp32 that is far below any clip, in half precision not.
        wanted, p = self.config.rollout.merge_lora, self.config.pipeline
        # Folding puts other tensors in place of the weights, whose addresses CUDA graphs hold.
        sound = p.dtype == "fp32" and p.compile != "graphs" and self.foldable
        if wanted is True:
            for weight in self.policy.network.parameters():
                check_mergeable(weight)
        return sound if wanted == "auto" else wanted

    @property
    def foldable(self) -> bool:
        """Whether an adapter can be folded into the frozen weights, which low-bit ones refuse."""
        whole = self.config.pipeline.precision is None and self.config.runtime.shard is None
        return whole and not is_quantised(self.policy.network)

    def copied_network(
        self, layers: Sequence[LayerChoice], backend: Backend | None
    ) -> tuple[PipelineBackbone, Callable[[], AbstractContextManager[VelocityField]]]:
        """Return a backbone around a copy of the network, and what prepares it for sampling."""
        compile = self.config.pipeline.compile
        model = RolloutModel(self.policy, layers, backend, compile=compile)
        backbone = with_network(self.backbone, model.network)
        network = functools.partial(
            rollout_model_velocity, model, backbone, self.adapter, runtime=self.runtime
        )
        return backbone, network


def build_sampler(parts: RolloutParts, prompts: Sequence[PromptRecord]) -> Sampler:
    """Return what samples the rollouts of training."""
    config, seed = parts.config, parts.config.run.seed
    generator, book, make = build_generator(parts), parts.config.prompts.book, PromptSampler
    if book is not None:
        make = functools.partial(PromptBook, options=book, group_size=config.rollout.group_size)
    return Sampler(
        generator=generator,
        plans=config.rollout.plans(seed),
        prompts=make(
            prompts,
            config.rollout.prompts_per_iteration,
            seed,
            balance=config.prompts.balance,
            weights=config.prompts.weights,
        ),
        seed=seed,
        explorer=build_explorer(parts, generator),
        rewording=build_rewording(parts),
    )


def build_rewording(parts: RolloutParts) -> Rewording | None:
    """Return what rewords prompts, with its refiner on the main process; None without one."""
    options, runtime, seed = parts.config.prompts.refiner, parts.runtime, parts.config.run.seed
    if options is None:
        return None
    with runtime.raise_on_all():
        refiner = options.build(seed, runtime.device) if runtime.is_main else None
    return Rewording(refiner=refiner, own_words=options.own_words, seed=seed, runtime=runtime)


def build_generator(parts: RolloutParts) -> RolloutGenerator:
    """Return what samples the images that are learned from."""
    r, backbone = parts.config.rollout, parts.backbone
    network = functools.partial(
        policy_velocity, parts.policy, backbone, parts.adapter,
        merged=parts.merged, runtime=parts.runtime,
    )  # fmt: skip
    make = RolloutGenerator
    if parts.pool is not None:
        make = functools.partial(
            RemoteGenerator, pool=parts.pool, policy=parts.policy, adapter=parts.adapter
        )  # fmt: skip
    return make(
        backbone=backbone,
        network=network,
        text_cache=parts.text_cache,
        specs=[spec for spec in parts.specs if spec.asked_in("rollout")],
        runtime=parts.runtime,
        num_inference_steps=r.num_inference_steps,
        kernel=KERNELS[r.kernel],
        noise_level=r.noise_level,
        batch_size=r.batch_size,
        decode_batch=parts.config.pipeline.decode_batch,
        # Images that are compared are on one process, and so are candidates that go on.
        whole_prompts=parts.needs.complete_groups
        or any(s.whole_groups for s in parts.specs)
        or r.prunes_in_place,
    )


def build_explorer(parts: RolloutParts, exact: RolloutGenerator) -> Explorer | None:
    """Return what selects the candidates that `exact` samples; None without `rollout.explore`.

    Raises UserError for a precision that the device lacks, and layers that cannot be quantised.
    """
    e, seed = parts.config.rollout.explore, parts.config.run.seed
    if e is None:
        return None
    precision, *_ = preview_layers(parts)  # what cannot work fails before anything is sampled
    rollout = parts.config.rollout
    auditor = RankAuditor(
        preview=functools.cache(functools.partial(build_preview_generator, parts, exact)),
        precision=precision,
        exact=exact,
        rollout=rollout,
        explore=e,
        seed=seed,
    )
    plan = functools.partial(rollout.candidates, seed=seed)
    return Explorer(preview=auditor, plan=plan, select=e.select)


def build_preview_generator(parts: RolloutParts, exact: RolloutGenerator) -> RolloutGenerator:
    """Return what samples candidates, scored by the rewards that are trained.

    Where nothing is quantised or merged otherwise, the network of `exact` is used.
    """
    r, e = parts.config.rollout, parts.config.rollout.explore
    assert e is not None
    backbone, network = exact.backbone, exact.network
    with parts.runtime.raise_on_all():
        precision, layers, backend = preview_layers(parts)
        if parts.runtime.is_main:
            log_precision("candidates", precision, layers)
        faster = bool(layers) or parts.foldable != parts.merged
        if faster and parts.pool is None and not r.prunes_in_place:
            backbone, network = parts.copied_network(layers, backend)
    trained = [spec for spec in parts.specs if spec.trained]
    if isinstance(exact, RemoteGenerator):
        exact = replace(exact, preview=True)
    return replace(
        exact,
        backbone=backbone,
        network=network,
        specs=trained,
        num_inference_steps=e.num_inference_steps or r.num_inference_steps,
        whole_prompts=any(spec.whole_groups for spec in trained) or r.prunes_in_place,
        times=EXPLORING,
    )


def preview_layers(
    parts: RolloutParts,
) -> tuple[Precision, tuple[LayerChoice, ...], Backend | None]:
    """Return the precision of previews, the layers that they quantise, and their backend.

    Raises UserError for a precision that the device lacks, and see `prepare`.
    """
    e, p = parts.config.rollout.explore, parts.config.pipeline
    assert e is not None
    precision = resolve(e.precision, parts.runtime.device, where="rollout.explore")
    layers, backend = prepare(
        parts.policy.network,
        precision,
        dtype=network_dtype(parts.backbone),
        device=parts.runtime.device,
        min_dim=p.min_dim,
    )
    return precision, layers, backend
