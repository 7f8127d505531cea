"""Build everything of a run: the learner with its source of rollouts, the evaluator and the run."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flowrl import __version__
from flowrl.assembly.backbone import (
    adapted_layers,
    build_backbone,
    build_pipeline,
    call_settings,
    rounding_key,
    set_precision,
)
from flowrl.assembly.offline import build_stored, check_offline
from flowrl.assembly.rollout import RolloutParts, build_sampler
from flowrl.assembly.text import GuidedPrompts, TextCaches, prompts_to_encode, stored_prompts
from flowrl.assembly.work_split import check_split, iteration_work
from flowrl.backbones.compiling import compile_blocks
from flowrl.backbones.lora_files import fit_lora
from flowrl.backbones.lora_formats import LoRA, lora_of_main
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.config import Config
from flowrl.config.objectives import DistillOptions
from flowrl.config.rollout import ReferenceOptions
from flowrl.config.validate import check_states
from flowrl.errors import UserError, phase
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs
from flowrl.objectives.distill import teacher_of
from flowrl.objectives.reward_backprop.decoder import RewardGradient, check_differentiable
from flowrl.objectives.selective_kl import check_kl_on
from flowrl.offline.format import open_dataset
from flowrl.prompts.overlap import check_overlap, hold_out
from flowrl.prompts.records import PromptRecord, PromptSampler, load_prompts
from flowrl.prompts.sources import check_row
from flowrl.sampling.rollout import Ahead, Sampler
from flowrl.sampling.sampler import Schedule
from flowrl.sampling.workers import WorkerPool
from flowrl.scoring.combine import mean_reward
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.spec import Reward, RewardSpec, check_evaluation, check_gates, check_prompts
from flowrl.training.checkpoint import Checkpoints, set_aside
from flowrl.training.evaluate import Evaluation, Evaluator, PipelineCall
from flowrl.training.hacking import hacking_rule
from flowrl.training.ledger import Ledger
from flowrl.training.loop import Learner, Source
from flowrl.training.radar import radar_of
from flowrl.training.run import Run
from flowrl.training.tracking import Report
from flowrl.utils.digests import content_digest, digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import Steps

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidedObjects:
    """Objects that a Python caller has already; None where the configuration decides."""

    pipeline: Any = None
    prompts: Sequence[str] | None = None
    evaluation_prompts: Sequence[str] | None = None
    rewards: Mapping[str, Reward] | None = None


def build_learner(
    config: Config,
    runtime: Runtime,
    provided: ProvidedObjects,
    caches: TextCaches | None = None,
    needed: GuidedPrompts | None = None,
    pool: WorkerPool | None = None,
) -> Learner:
    """Return everything that the loop needs. Loads the pipeline unless it was provided.

    Args:
        needed: what will be encoded; None for `all_prompts_to_encode`.
        pool: of workers that sample; None samples here, whatever `rollout.workers` says.
    """
    # The LoRA is read before anything is loaded.
    p, r, start = config.pipeline, config.rollout, starting_lora(config, runtime)
    specs = build_rewards(config, provided.rewards, gpu=runtime.gpu)
    prompts = _split_prompts(config, provided)[0]
    objective = config.objective.build(r.kernel)
    needs = objective.needs
    teachers = [None if lora is None else lora_of_main(lora, runtime) for lora in needs.teachers]
    held_out = evaluation_prompts(config, provided)
    check_parts(config, runtime, needs, specs, prompts, held_out)
    caches = caches or TextCaches(config, provided.pipeline)
    needed = all_prompts_to_encode(config, provided) if needed is None else needed
    stored = stored_prompts(config, specs)
    check_overlap([p for _, p in stored], held_out, allowed=config.prompts.allow_overlap)
    check_teachers(config, prompts if r.store is None else [p for _, p in stored])
    with phase("encode"):  # before the transformer is placed, unless the encoders are kept
        loaded = caches.encode_first([*needed, *stored], runtime)
    pipeline = build_pipeline(
        config, runtime.device, caches.pipeline, loaded=loaded, runtime=runtime,
        revision=caches.commit() if loaded else None, decoder_learns=needs.reward_grad,
    )  # fmt: skip
    backbone = build_backbone(p, pipeline, guidance=r.guidance_scale, runtime=runtime)
    set_precision(config, backbone, runtime)
    learning = backbone
    if r.training_guidance_scale is not None:
        learning = build_backbone(p, pipeline, guidance=r.training_guidance_scale, runtime=runtime)
    policy = build_policy(
        config, learning, start, keep_old=needs.old is not None, teachers=teachers
    )
    parts = RolloutParts(
        config=config, runtime=runtime, specs=specs, policy=policy, backbone=backbone,
        needs=needs, text_cache=caches.get(backbone, r.guidance_scale), pool=pool,
    )  # fmt: skip
    text_cache = parts.text_cache
    if r.store is not None:
        text_cache = caches.get(learning, r.learning_guidance_scale)
    check_velocity(config, runtime, text_cache, prompts)
    source = build_source(parts, prompts, caches)
    return Learner(
        source=source,
        specs=specs,
        policy=policy,
        objective=objective,
        optimizer=runtime.prepare(config.optim.build(policy.parameters())),
        runtime=runtime,
        optim=config.optim,
        reference=config.reference,
        iterations=config.run.iterations,
        reward_gradient=RewardGradient(backbone, specs, p.decode_batch),
        book=source.book if isinstance(source, Sampler) else None,
        rewording=source.rewording if isinstance(source, Sampler) else None,
        checks_ratio=not isinstance(source, Ahead),
    )


def check_teachers(config: Config, prompts: Sequence[PromptRecord]) -> None:
    """Raise UserError for a prompt that objective.teachers leaves without a teacher."""
    if isinstance(config.objective, DistillOptions):
        for prompt in prompts:
            teacher_of(prompt.metadata, config.objective)


def check_velocity(
    config: Config, runtime: Runtime, text_cache: TextCache, prompts: Sequence[PromptRecord]
) -> None:
    """Check that the velocity is that of the pipeline's own run, at each step of the rollout.

    All processes do it: what is computed once stays with the backbone, and is to be equal on all.

    Args:
        text_cache: Of the backbone that is checked.
        prompts: Of training; the first is encoded where none is yet.

    Raises:
        UserError: The velocity is another one.
    """
    backbone, encoders = text_cache.backbone, config.memory.text_encoders
    if backbone.example is None and encoders != "keep":
        LOG.info(
            "the velocity is not compared with the pipeline's own: memory.text_encoders is %s, "
            "and no prompt was encoded",
            encoders,
        )
        return
    with runtime.raise_on_all(at_once=runtime.in_lockstep), torch.random.fork_rng():
        if backbone.example is None and prompts:
            text, negative = text_cache.key(prompts[0])
            backbone.encode([text], [negative])  # not into the cache: bits depend on the batch
        line = backbone.check(config.rollout.num_inference_steps)
    if runtime.is_main:
        LOG.info("%s", line)


def check_parts(
    config: Config,
    runtime: Runtime,
    needs: Needs,
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    held_out: Sequence[PromptRecord],
) -> None:
    """Check that rollouts, objective, rewards and prompts fit each other. Raises UserError."""
    if config.rollout.store is None:
        whole = any(spec.whole_groups for spec in specs)
        book, compared = config.prompts.book, whole or needs.complete_groups
        if book is not None and book.largest_group and compared:
            raise UserError(
                "prompts.book.largest_group makes groups of several places, which are sampled "
                "apart, but the objective or a reward compares whole groups: set it to null"
            )
        for plan in config.plans():  # every process gets what objective and rewards compare
            load = iteration_work(config, needs, plan, whole_groups=whole)
            check_split(load, runtime.world_size)
        try:
            check_states(needs.states, config.plans(), config.rollout)
        except ValueError as error:
            raise UserError(str(error)) from error
        check_prompts(specs, prompts)
        check_overlap(prompts, held_out, allowed=config.prompts.allow_overlap)
    else:
        check_offline(config, needs)
    if needs.reward_grad:
        check_differentiable(specs, config.objective.kind)
    if kl_on := getattr(config.objective, "kl_on", None):
        scored, store = [s.name for s in specs if s.asked_in("rollout")], config.rollout.store
        check_kl_on(kl_on, specs, scored if store is None else open_dataset(store).metadata.names)
    check_evaluation(specs, held_out)
    hacking_rule(config.run.on_hacking, specs, held_out)
    for spec in specs:
        if not held_out and not spec.asked_in("rollout"):
            LOG.warning(
                "reward %r is only measured, and there are no held-out prompts to measure it on: "
                "name evaluation.prompts, or set its option when to both",
                spec.name,
            )


def check_unseen(config: Config, held_out: Sequence[PromptRecord]) -> None:
    """Check that the held-out prompts ask for nothing that prompts.train asks for.

    Training prompts that are not on this machine are only warned of. Raises UserError.
    """
    try:
        training = training_prompts(config, ProvidedObjects())
    except UserError as error:
        LOG.warning("whether evaluation.prompts are unseen is not known: %s", error)
        return
    check_overlap(training, held_out, allowed=config.prompts.allow_overlap)


def build_rewards(
    config: Config, provided: Mapping[str, Reward] | None = None, *, gpu: int | None = None
) -> list[RewardSpec]:
    """Return the rewards in `provided`, by name, or those of the recipe.

    gpu: number of this process's GPU, on which the threads of rewards work, too.
    Raises UserError when one cannot be made, or when two have one name.
    """
    if provided:
        return [
            RewardSpec(name=name, reward=reward, executor=InlineExecutor(reward, name))
            for name, reward in provided.items()
        ]
    specs: list[RewardSpec] = []
    try:
        for entry in config.rewards:
            specs.append(entry.build(gpu))
            if [spec.name for spec in specs].count(specs[-1].name) > 1:
                raise UserError(
                    f"two rewards are called {specs[-1].name!r}, and scores are kept by name: keep "
                    "one, or give it a label"
                )
        check_gates(specs)
    except UserError:
        for spec in specs:
            spec.close()
        raise
    return specs


# Options under `pipeline` that leave evaluations as they are, which use the exact weights.
INDIFFERENT = {"device", "decode_batch", "precision", "min_dim", "quantize_gradients"}
PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # accelerate's names


def starting_lora(config: Config, runtime: Runtime | None = None) -> LoRA | None:
    """Read what `lora.init_from` names, None where it names nothing.

    Raises UserError for what is no LoRA, or was trained at another strength than the recipe's.
    """
    lora = config.lora
    if lora.init_from is None:
        return None
    start = lora_of_main(lora.init_from, runtime, default_alpha=lora.alpha)
    if start.scale != lora.alpha / lora.rank:
        raise UserError(
            f"{lora.init_from} has alpha / rank = {start.scale:g}, but lora.alpha / "
            f"lora.rank is {lora.alpha / lora.rank:g}: set them as it was trained"
        )
    return start


def build_policy(
    config: Config, backbone: PipelineBackbone, start: LoRA | None = None, *, keep_old: bool,
    teachers: Sequence[LoRA | None] = (),
) -> Policy:  # fmt: skip
    """Return the adapters, at zero change or as `start` has them, see `starting_lora`."""
    lora = config.lora
    policy = Policy(
        backbone, rank=lora.rank, alpha=lora.alpha, targets=adapted_layers(lora, backbone),
        seed=config.run.seed, ema_decay=config.ema.decay, keep_old=keep_old,
        keep_reference=config.reference != ReferenceOptions(),
    )  # fmt: skip
    if start is not None:
        start = fit_lora(start, policy.network, type(backbone.pipeline))
        policy.start_from(start.state)
    for number, teacher in enumerate(teachers):
        if teacher is None:
            continue
        policy.add_teacher(number, fit_lora(teacher, policy.network, type(backbone.pipeline)))
    if config.pipeline.compile:
        graphs = config.pipeline.compile == "graphs"
        compile_blocks(policy.network, graphs=graphs)
        if graphs:
            policy.replay_graphs()
    return policy


def build_source(
    parts: RolloutParts, prompts: Sequence[PromptRecord], caches: TextCaches
) -> Source:
    """Return the source of rollouts: a sampler, or an offline data set that is read."""
    config = parts.config
    if config.rollout.store is None:
        sampler = build_sampler(parts, prompts)
        if not config.rollout.staleness:
            return sampler
        check_staleness(config, parts.needs)
        return Ahead(
            sampler=sampler, policy=parts.policy, adapter=parts.adapter, last=config.run.iterations
        )

    learning = parts.policy.backbone
    text_cache = caches.get(learning, config.rollout.learning_guidance_scale)
    return build_stored(parts, learning, text_cache)


def check_staleness(config: Config, needs: Needs) -> None:
    """Check that images may be learned from one iteration late. Raises UserError.

    Objectives with a ratio keep the means of the weights that sampled, so that it stays exact.
    """
    why = ""
    if needs.states == "path" or needs.reward_grad:
        why = (
            f"objective.kind {config.objective.kind} follows the gradient along the steps of the "
            "weights that learn, which are not those that sampled: take another objective"
        )
    elif config.rollout.explore is not None:
        why = "rollout.explore needs scores before it samples, so nothing can be sampled ahead"
    if why:
        raise UserError(
            f"rollout.staleness is {config.rollout.staleness}, but {why}; or set it to 0"
        )


def build_evaluated_pipeline(
    config: Config, runtime: Runtime, held_out: Sequence[PromptRecord]
) -> tuple[Any, TextCaches]:
    """Return the pipeline for evaluations without training, and the encoded held-out prompts."""
    if config.memory.text_encoders == "free":  # the pipeline goes on to others
        config = config.changed("memory", text_encoders="offload")
    caches = TextCaches(config)
    needed = prompts_to_encode(config, (), _evaluated(config, held_out))
    if config.evaluation.as_deployed:  # the pipeline's own call encodes
        needed = []
    with phase("encode"):
        loaded = caches.encode_first(needed, runtime)
    return build_pipeline(config, runtime.device, loaded=loaded, runtime=runtime), caches


def build_evaluator(
    config: Config,
    pipeline: Any,
    specs: Sequence[RewardSpec],
    provided: ProvidedObjects,
    caches: TextCaches | None = None,
    runtime: Runtime | None = None,
) -> Evaluator | None:
    """Return the evaluator; None without held-out prompts.

    runtime: see `build_backbone`.
    """
    e = config.evaluation
    prompts = evaluation_prompts(config, provided)
    if not prompts:
        return None
    caches = caches or TextCaches(config, provided.pipeline)
    backbone = build_backbone(config.pipeline, pipeline, guidance=e.guidance_scale, runtime=runtime)
    text_cache = caches.get(backbone, e.guidance_scale)
    first, *at_steps = (
        Schedule(sigmas=backbone.sigmas(steps), kernel=KERNELS["flow_sde"], noise_level=0.0)
        for steps in e.step_counts
    )
    return Evaluator(
        backbone=backbone,
        text_cache=text_cache,
        prompts=_evaluated(config, prompts),
        specs=specs,
        schedule=first,
        at_steps=at_steps,
        call=build_call(config, pipeline) if e.as_deployed else None,
        seed=e.seed,
        batch_size=e.batch_size,
        decode_batch=config.pipeline.decode_batch,
        key=evaluation_key(config, specs, prompts),
        origin=evaluation_origin(config, caches, specs, prompts, backbone.device),
    )


def build_call(config: Config, pipeline: Any) -> PipelineCall:
    """Return the diffusers pipeline's own call with the settings of evaluation.

    Raises UserError if memory.text_encoders is free: the call needs the text encoders.
    """
    if config.memory.text_encoders == "free":
        raise UserError(
            "evaluation.as_deployed calls the pipeline, whose text encoders memory.text_encoders: "
            "free removes: set memory.text_encoders to offload or keep, or use flowrl evaluate "
            "evaluation.as_deployed=true memory.text_encoders=offload after the run"
        )
    return PipelineCall(
        arguments=call_settings(config, pipeline), negative=config.rollout.negative_prompt
    )


IMAGES_OF_A_PROMPT = 8  # at most, in an evaluation


def evaluation_key(
    config: Config, specs: Sequence[RewardSpec], prompts: Sequence[PromptRecord]
) -> str:
    """Return a digest of all that two evaluations must share to be compared."""
    how = config.evaluation.model_dump(exclude={"every", "batch_size", "quality"})
    what = config.pipeline.model_dump(exclude=INDIFFERENT) | rounding_key(config.memory)
    unasked = {s.name: [s.when] for s in specs if not s.asked_in("evaluation")}
    rewards = [
        [s.name, getattr(s.reward, "version", None), *unasked.get(s.name, [])] for s in specs
    ]
    parts = [how, what, config.rollout.negative_prompt, rewards, [p.uid for p in prompts]]
    return content_digest(parts)


def evaluation_origin(
    config: Config, caches: TextCaches, specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord], device: torch.device,
) -> str:  # fmt: skip
    """Return a digest of what decides an evaluation's scores beside its key.

    "" for a provided pipeline and for a reward without `version`, of which nothing is known.
    """
    weights = caches.weights()
    scored = [s.reward for s in specs if s.asked_in("evaluation")]
    if weights is None or not all(getattr(reward, "version", None) for reward in scored):
        return ""
    sources = Path(__file__).parents[1].rglob("*.py")  # a clone may be edited between two runs
    edited = max(path.stat().st_mtime_ns for path in sources)
    rewards = [[entry.name, entry.args] for entry in config.rewards]
    code = [version(name) for name in ("torch", "diffusers", "transformers", "peft")]
    texts = [[p.text, p.negative, p.metadata] for p in prompts]
    parts = [weights, code, __version__, edited, device.type, rewards, texts]
    return digest(json.dumps(parts, sort_keys=True, default=str).encode())


def build_run(
    config: Config,
    learner: Learner,
    evaluator: Evaluator | None,
    resume: dict[str, Any] | None,
    *,
    resumed: bool,
) -> Run:
    """Return the run in its folder, which the caller has claimed; resume: a checkpoint's state.

    What the run did after that checkpoint is set aside, or cut where no checkpoint holds it.
    """
    folder, runtime = Path(config.run.output_dir), learner.runtime
    done, ledger = resume["iteration"] if resume else 0, Ledger(folder)
    if resume is not None:
        learner.policy.check_state(resume["policy"])
        if runtime.is_main and (aside := set_aside(folder, done)) is not None:
            LOG.warning("what came after iteration %d lies in %s now", done, aside)
            ledger.append("aside", step=done, to=str(aside.relative_to(folder)))

    def score(evaluation: Evaluation) -> float:
        columns = [evaluation.names.index(spec.name) for spec in learner.specs]
        return mean_reward(learner.specs, evaluation.scores[:, columns])

    return Run(
        folder=folder,
        options=config.run,
        evaluate_every=config.evaluation.every,
        runtime=runtime,
        checkpoints=Checkpoints(folder, keep=config.run.keep_checkpoints),
        ledger=ledger,
        evaluator=evaluator,
        score=score,
        radar=radar_of(learner.specs),
        report=Report(folder, trackers=config.run.trackers, resume_step=done if resumed else None)
        if runtime.is_main
        else None,
        steps=Steps("training", config.run.iterations, start=done, show=runtime.is_main),
        hacking=hacking_rule(
            config.run.on_hacking, learner.specs, evaluator.prompts if evaluator else ()
        ),
        resume=resume,
    )


def with_pipeline_name(config: Config, pipeline: Any) -> Config:
    """Return the recipe with the name of a pipeline that was provided, if any."""
    if pipeline is None:
        return config
    name = pipeline.config.get("_name_or_path") or "the pipeline that was provided"
    return config.changed("pipeline", path=name)


def build_prompts(source: str, texts: Sequence[str] | None) -> list[PromptRecord]:
    """Return `texts` as prompts, or those of a source."""
    if texts is None:
        return load_prompts(source)
    for number, text in enumerate(texts):
        check_row({"prompt": text}, f"prompt {number} of those provided")
    return [PromptRecord(uid=f"{i}:{text}", text=text) for i, text in enumerate(texts)]


def training_prompts(config: Config, provided: ProvidedObjects) -> list[PromptRecord]:
    """Return the prompts that training samples from: none where it only reads a data set."""
    return _split_prompts(config, provided)[0] if config.rollout.store is None else []


def evaluation_prompts(config: Config, provided: ProvidedObjects) -> list[PromptRecord]:
    """Return the held-out prompts: none where configuration and caller name none."""
    source, texts = config.evaluation.prompts, provided.evaluation_prompts
    if source is None and texts is None:
        splits = config.prompts.held_out is not None
        return _split_prompts(config, provided)[1] if splits else []
    return build_prompts(source or "", texts)


def _split_prompts(
    config: Config, provided: ProvidedObjects
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Return the prompts of prompts.train: those to train on, and those kept out of it."""
    prompts = build_prompts(config.prompts.train, provided.prompts)
    share, texts = config.prompts.held_out, provided.evaluation_prompts
    if share is None or config.evaluation.prompts is not None or texts is not None:
        return prompts, []
    return hold_out(prompts, share)


def all_prompts_to_encode(
    config: Config, provided: ProvidedObjects, first: int = 0
) -> GuidedPrompts:
    """Return what training from iteration `first` on and evaluation encode.

    Without what is read from an offline data set; nothing where the text encoders stay.
    """
    if config.memory.text_encoders == "keep":
        return []
    held_out = _evaluated(config, evaluation_prompts(config, provided))
    iterations = range(first, config.run.iterations)
    return prompts_to_encode(config, training_prompts(config, provided), held_out, iterations)


def fill_prompt_cache(config: Config, runtime: Runtime) -> dict[str, int]:
    """Encode what a run of the recipe will ask for into memory.prompt_cache; return the counts.

    Neither the transformer nor a reward is loaded. Raises UserError without such a folder.
    """
    if config.memory.prompt_cache is None:
        raise UserError(
            "memory.prompt_cache is null, so there is nowhere to keep encoded prompts: name a "
            "folder, as in memory.prompt_cache=prompts/encoded"
        )
    config = config.changed("memory", text_encoders="offload")
    needed, store = [*all_prompts_to_encode(config, ProvidedObjects())], config.rollout.store
    if store is not None:
        guidance = config.rollout.learning_guidance_scale
        needed += [(guidance, group.record) for group in open_dataset(store).groups]
    caches = TextCaches(config)
    before = caches.count_on_disk(needed)
    caches.encode_first(needed, runtime)
    return {"prompts": len(needed), "encoded": caches.count_on_disk(needed) - before}


def _evaluated(config: Config, prompts: Sequence[PromptRecord]) -> list[PromptRecord]:
    """Return the prompt of each image of an evaluation; [] without held-out prompts.

    More images of few prompts would say little more: intervals resample prompts.
    """
    e = config.evaluation
    count = min(e.num_images, IMAGES_OF_A_PROMPT * len(prompts))
    return PromptSampler(prompts, count, e.seed, balance=e.balance).at(0) if prompts else []
