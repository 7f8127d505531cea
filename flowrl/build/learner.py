"""From configuration to objects: the one place that knows names, files and every component."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.base import Backbone
from flowrl.backbones.lora_files import read_lora
from flowrl.backbones.policy import Policy
from flowrl.build.backbone import BACKBONES as BACKBONES
from flowrl.build.backbone import TextCaches
from flowrl.build.backbone import GuidedPrompts
from flowrl.build.backbone import prompts_to_encode
from flowrl.build.backbone import rounding_key
from flowrl.build.backbone import adapted_layers, build_backbone, build_pipeline, learning_guidance, set_precision
from flowrl.build.rewards import build_rewards
from flowrl.build.rollout import RolloutParts
from flowrl.build.rollout import build_generator
from flowrl.build.rollout import build_explorer, build_stored, plan_at
from flowrl.build.work_split import iteration_work
from flowrl.build.work_split import check_split
from flowrl.config import Config
from flowrl.config.load import with_old_names
from flowrl.config.validate import check_states
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs
from flowrl.objectives.reward_backprop.decoder import RewardGradient, check_differentiable
from flowrl.prompts.records import PromptRecord, PromptSampler, check_paraphrases, load_prompts
from flowrl.sampling.sampler import Schedule
from flowrl.sampling.source import Sampler, Source
from flowrl.scoring.combine import mean_reward
from flowrl.scoring.spec import Reward, RewardSpec, check_evaluation, check_prompts
from flowrl.training.checkpoint import Checkpoints
from flowrl.training.evaluate import Evaluation, Evaluator, check_quality
from flowrl.training.loop import Learner, UpdateSettings
from flowrl.training.run import Run, RunSettings, StopRule, stop_rule
from flowrl.training.tracking import Report
from flowrl.trees.memory import check_memory, free_bytes
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import Steps

# --- From options to the source of rollouts: a sampler, or a store that is read ----------------


def build_source(
    config: Config,
    runtime: Runtime,
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    policy: Policy,
    backbone: Backbone,
    needs: Needs,
    texts: TextCaches,
) -> Source:
    """backbone: with the guidance of rollouts. prompts: none, for a store that has its own."""
    r = config.rollout
    drawing = RolloutParts(
        config=config,
        runtime=runtime,
        specs=specs,
        policy=policy,
        backbone=backbone,
        needs=needs,
        text_cache=texts.of(backbone, r.guidance_scale),
    )
    if r.store is not None and r.store.path is not None:
        _check_store(config, needs)

        def redraw(other: Config) -> Sampler:
            return build_sampler(replace(drawing, config=other), prompts)

        text_cache = texts.of(policy.backbone, learning_guidance(config))
        return build_stored(config, redraw(config), policy.backbone, redraw, text_cache)
    _check_memory(config, backbone, runtime)
    return build_sampler(drawing, prompts)


def build_sampler(drawing: RolloutParts, prompts: Sequence[PromptRecord]) -> Sampler:
    """What draws as the recipe says."""
    config, seed = drawing.config, drawing.config.run.seed
    stage = build_generator(drawing)
    return Sampler(
        generator=stage,
        plan=functools.partial(plan_at, config.rollout.plan, seed),
        prompts=PromptSampler(
            prompts, config.rollout.prompts_per_iteration, seed, balance=config.prompts.balance
        ),
        seed=seed,
        explorer=build_explorer(drawing, stage),
        retained=config.prompts.retained,
    )


def _check_store(config: Config, needs: Needs) -> None:
    """A store has what the objective learns from."""
    if needs.states != "endpoints":
        raise UserError(
            f"objective.kind {config.objective.kind} learns from {needs.states} of its own "
            "rollouts, and a store holds clean images alone: set rollout.store to null, or take "
            "an objective on images, such as gdro, dpo or sft"
        )
    if needs.old is not None and needs.old.samples:
        raise UserError(
            f"objective.kind {config.objective.kind} learns from what its own old policy draws, "
            "and the store was drawn by another: set rollout.store to null, or take an objective "
            "compared with the base, such as gdro, or dpo with anchor: {kind: base}"
        )


def check_work_split(
    config: Config, runtime: Runtime, needs: Needs, specs: Sequence[RewardSpec] = ()
) -> None:
    """Every process gets what its objective and its rewards compare, in every iteration."""
    whole = any(spec.whole_groups for spec in specs)
    for plan in config.plans():
        check_split(iteration_work(config, needs, plan, whole_groups=whole), runtime.world_size)


def check_trees(config: Config, needs: Needs) -> None:
    """The trees give what the objective learns from, also one of the user's own."""
    try:
        check_states(needs.states, config.plans(), config.rollout, config.run.seed)
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_memory(config: Config, backbone: Backbone, runtime: Runtime) -> None:
    """The trees of every iteration fit beside the weights, which are loaded by now."""
    prompts = -(-config.rollout.prompts_per_iteration // runtime.world_size)
    latent, itemsize = math.prod(backbone.latent_shape()), backbone.dtype.itemsize
    free = free_bytes(runtime.device)
    for plan in config.plans():
        check_memory(plan, prompts, latent, itemsize, free)


# --- From configuration to objects: the one place that knows names, files and every component --

# Options under `pipeline` that leave evaluations as they are.
INDIFFERENT = {"device", "decode_batch", "precision", "keep_layers", "min_dim"}
PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # accelerate's names


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidedObjects:
    """Objects that a Python caller has already; None where the configuration decides."""

    pipeline: Any = None
    prompts: Sequence[str] | None = None
    evaluation_prompts: Sequence[str] | None = None
    rewards: Mapping[str, Reward] | None = None


def with_pipeline_name(config: Config, pipeline: Any) -> Config:
    """The recipe under the name of a pipeline that was given, if any."""
    if pipeline is None:
        return config
    name = pipeline.config.get("_name_or_path") or "the pipeline that was given"
    section = config.pipeline.model_copy(update={"path": name})
    return config.model_copy(update={"pipeline": section})


def training_prompts(config: Config, given: ProvidedObjects) -> list[PromptRecord]:
    """The prompts that training draws: none where it only reads a store."""
    store = config.rollout.store
    read = store is not None and store.path is not None and store.refresh_every is None
    return [] if read else build_prompts(config.prompts.train, given.prompts)


def build_prompts(source: str, texts: Sequence[str] | None) -> list[PromptRecord]:
    if texts is None:
        return load_prompts(source)
    return [PromptRecord(uid=f"{i}:{text}", text=text) for i, text in enumerate(texts)]


def build_policy(config: Config, backbone: Backbone, *, keep_old: bool) -> Policy:
    lora = config.lora
    policy = Policy(
        backbone,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=adapted_layers(lora, backbone),
        seed=config.run.seed,
        ema_decay=config.ema.decay,
        keep_old=keep_old,
    )
    if lora.init_from is not None:
        state, strength = read_lora(lora.init_from)
        if strength != lora.alpha / lora.rank:
            raise UserError(
                f"{lora.init_from} has alpha / rank = {strength:g}, but lora.alpha / lora.rank is "
                f"{lora.alpha / lora.rank:g}: set them as it was trained"
            )
        policy.start_from(state)
    return policy


def build_learner(
    config: Config,
    runtime: Runtime,
    given: ProvidedObjects,
    texts: TextCaches | None = None,
    needed: GuidedPrompts | None = None,
) -> Learner:
    """Everything of the loop. Loads the pipeline unless it was given. texts: shared with others;
    needed: what will be asked of them, None for `all_prompts_to_encode`."""
    p, r, u = config.pipeline, config.rollout, config.optim
    specs = build_rewards(config, given.rewards)
    prompts = build_prompts(config.prompts.train, given.prompts)
    objective = config.objective.build(r.kernel)
    if r.store is None or r.store.path is None or r.store.refresh_every is not None:
        check_work_split(config, runtime, objective.needs, specs)
        check_trees(config, objective.needs)
        check_prompts(specs, prompts)
    if objective.needs.reward_grad:
        check_differentiable(specs, config.objective.kind)
    check_evaluations(config, specs, prompts, evaluation_prompts(config, given))
    texts = texts or TextCaches(config, given.pipeline)
    without = texts.unneeded(all_prompts_to_encode(config, given) if needed is None else needed)
    pipeline = build_pipeline(
        config, runtime.device, given.pipeline, without=without,
        revision=texts.commit() if without else None,
        decoder_learns=objective.needs.reward_grad,
    )  # fmt: skip
    drawing = build_backbone(config, pipeline, guidance=r.guidance_scale)
    set_precision(config, drawing, runtime)
    learning = drawing
    if r.training_guidance_scale is not None:
        learning = build_backbone(config, pipeline, guidance=r.training_guidance_scale)
    policy = build_policy(config, learning, keep_old=objective.needs.old is not None)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=u.lr, betas=u.betas, weight_decay=u.weight_decay
    )
    return Learner(
        source=build_source(
            config, runtime, specs, prompts, policy, drawing, objective.needs, texts
        ),
        specs=specs,
        policy=policy,
        objective=objective,
        optimizer=runtime.prepare(optimizer),
        runtime=runtime,
        update=_update_settings(config),
        reward_gradient=RewardGradient(drawing, specs, p.decode_batch),
    )


def _update_settings(config: Config) -> UpdateSettings:
    u = config.optim
    return UpdateSettings(
        lr=u.lr,
        decay_over=config.run.iterations if u.schedule == "linear" else None,
        updates_per_rollout=u.updates_per_rollout,
        micro_batch=u.micro_batch,
        max_grad_norm=u.max_grad_norm,
        ratio_tolerance=u.ratio_tolerance,
    )


def all_prompts_to_encode(config: Config, given: ProvidedObjects, first: int = 0) -> GuidedPrompts:
    """What training from iteration `first` on and evaluation ask the text encoders, but for what
    is read from a store. Nothing where the encoders stay: nobody needs to know it then."""
    if config.memory.text_encoders != "free":
        return []
    held_out = evaluated(config, evaluation_prompts(config, given))
    return prompts_to_encode(config, training_prompts(config, given), held_out, first)


def evaluated(config: Config, prompts: Sequence[PromptRecord]) -> list[PromptRecord]:
    """Those of the held-out prompts that an evaluation draws, in its order."""
    e = config.evaluation
    return PromptSampler(prompts, e.num_images, e.seed, balance=e.balance).at(0) if prompts else []


def check_evaluations(
    config: Config,
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    held_out: Sequence[PromptRecord],
) -> None:
    """What is asked of paraphrases and held-out scores can be had. Raises UserError."""
    p, e = config.prompts, config.evaluation
    check_evaluation(specs, held_out)
    if p.retained is not None:
        check_paraphrases(prompts, "prompts.retained", p.train)
    if e.paraphrases:
        check_paraphrases(held_out, "evaluation.paraphrases", e.prompts or "evaluation.prompts")
    if e.quality is not None:
        check_quality(specs, held_out, e.quality)
    build_stop_rule(config, specs, held_out)


def build_stop_rule(
    config: Config, specs: Sequence[RewardSpec], held_out: Sequence[PromptRecord]
) -> StopRule | None:
    rule = config.run.stop_when_hacking
    if rule is None:
        return None
    return stop_rule(
        specs, held_out, held_out=rule.held_out, patience=rule.patience, margin=rule.margin
    )


def build_evaluator(
    config: Config,
    pipeline: Any,
    specs: Sequence[RewardSpec],
    given: ProvidedObjects,
    texts: TextCaches | None = None,
) -> Evaluator | None:
    e = config.evaluation
    prompts = evaluation_prompts(config, given)
    if not prompts:
        return None
    backbone = build_backbone(config, pipeline, guidance=e.guidance_scale)
    return Evaluator(
        backbone=backbone,
        text_cache=(texts or TextCaches(config, given.pipeline)).of(backbone, e.guidance_scale),
        prompts=evaluated(config, prompts),
        specs=specs,
        schedule=Schedule(
            sigmas=backbone.sigmas(e.num_inference_steps),
            kernel=KERNELS["flow_sde"],
            noise_level=0.0,
        ),
        seed=e.seed,
        batch_size=e.batch_size,
        decode_batch=config.pipeline.decode_batch,
        key=evaluation_key(config, specs, prompts),
        quality=e.quality,
        paraphrases=e.paraphrases,
        max_invalid_fraction=config.failures.max_invalid_fraction,
    )


def evaluation_prompts(config: Config, given: ProvidedObjects) -> list[PromptRecord]:
    """The held-out prompts; none when the configuration and the caller name none."""
    source, texts = config.evaluation.prompts, given.evaluation_prompts
    return [] if source is None and texts is None else build_prompts(source or "", texts)


def evaluation_key(
    config: Config, specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]
) -> str:
    """Everything that two evaluations must share for their difference to mean something."""
    how = config.evaluation.model_dump(exclude={"every", "batch_size", "quality"})
    how = with_old_names("evaluation", how)
    # Evaluations draw with the exact weights, whatever the precision of training.
    what = config.pipeline.model_dump(exclude=INDIFFERENT) | rounding_key(config)
    rewards = [[s.name, getattr(s.reward, "version", None)] for s in specs]
    words = [p.paraphrases for p in prompts] if config.evaluation.paraphrases else []
    parts = [how, what, config.rollout.negative_prompt, rewards, [p.uid for p in prompts], words]
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def build_run(
    config: Config,
    learner: Learner,
    evaluator: Evaluator | None,
    resume: dict[str, Any] | None,
    *,
    resumed: bool,
) -> Run:
    """The run in its folder, which the caller has claimed; `resume` is a checkpoint's state."""
    folder, runtime = Path(config.run.output_dir), learner.runtime
    done = resume["iteration"] if resume else 0

    def score(evaluation: Evaluation) -> float:
        columns = [evaluation.names.index(spec.name) for spec in learner.specs]
        return mean_reward(learner.specs, evaluation.scores[:, columns])

    return Run(
        folder=folder,
        settings=RunSettings(
            iterations=config.run.iterations,
            max_minutes=config.run.max_minutes,
            checkpoint_every=config.run.checkpoint_every,
            evaluate_every=config.evaluation.every,
            sample_every=config.run.sample_every,
        ),
        runtime=runtime,
        checkpoints=Checkpoints(folder, keep=config.run.keep_checkpoints),
        evaluator=evaluator,
        score=score,
        report=Report(folder, trackers=config.run.trackers, resume_step=done if resumed else None)
        if runtime.is_main
        else None,
        steps=Steps("training", config.run.iterations, start=done) if runtime.is_main else None,
        stop=build_stop_rule(config, learner.specs, evaluator.prompts if evaluator else ()),
        resume=resume,
    )
