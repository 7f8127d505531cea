"""One function a command: align, evaluate, sample, gallery, collect, score, audit.

Each function does what the command of its name does, and takes loaded objects where that is
useful: `align` a pipeline, prompts and rewards, `collect` and `audit` a pipeline.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowrl.assembly.auditing import (
    candidate_rows,
    compare_ranks,
    exact_samples,
    explore_options,
    rollout_parts,
    sampler_of,
)
from flowrl.assembly.learner import (
    PRECISION,
    ProvidedObjects,
    all_prompts_to_encode,
    build_backbone,
    build_evaluator,
    build_learner,
    build_rewards,
    build_run,
    check_unseen,
    evaluation_prompts,
    fill_prompt_cache,
    training_prompts,
    with_pipeline_name,
)
from flowrl.assembly.offline import dataset_metadata
from flowrl.assembly.rollout import preview_layers
from flowrl.assembly.start import begin_session, recipe_to_show, runtime_to_evaluate, start_on_all
from flowrl.assembly.text import TextCaches, prompts_to_encode
from flowrl.assembly.worker import build_pool
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import load_lora
from flowrl.backbones.lora_formats import lora_of_main, open_lora
from flowrl.config import Config, load_config
from flowrl.config.rewards import RewardOptions
from flowrl.errors import UserError, phase
from flowrl.evaluation.drawing import Drawing
from flowrl.evaluation.loading import held_out_prompts, load_evaluator, one_process
from flowrl.export.gallery import write_gallery
from flowrl.export.hub import open_repository, publish
from flowrl.export.summary import (
    TrainedRun,
    finish_run,
    gallery_rows,
    saved_comparisons,
)
from flowrl.offline.format import (
    PAIRS,
    DatasetMetadata,
    OfflineDataset,
    create_dataset,
    finished_shards,
    open_dataset,
)
from flowrl.offline.pairs import pairs_digest, read_pairs
from flowrl.offline.writer import REWARD, SHARD, write_groups, write_pairs
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.check import check_before_training
from flowrl.scoring.files import (
    ScoredFiles,
    best_image,
    images_with_prompts,
    score_files,
)
from flowrl.scoring.spec import RewardSpec, closing
from flowrl.training.checkpoint import CONFIG, LATEST, Checkpoints, claim, read_checkpoint
from flowrl.training.evaluate import compare, table
from flowrl.training.loop import Learner, train
from flowrl.training.resume import AUTO, Facts, Start
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import locked_folder, unused, write_bytes
from flowrl.utils.images import png
from flowrl.utils.progress import SafeConsole, Steps, announced

LOG = logging.getLogger(__name__)
Row = dict[str, Any]  # of a table that a command prints

# --- flowrl train ------------------------------------------------------------------------------


def align(
    config: Config,
    *,
    pipeline: Any = None,
    prompts: Sequence[str] | None = None,
    evaluation_prompts: Sequence[str] | None = None,
    rewards: dict[str, Any] | None = None,
    resume: str | None = AUTO,
    accept_changes: bool = False,
) -> TrainedRun:
    """Train a LoRA; return where it lies, and each reward before and after on held-out prompts.

    `config.run.output_dir` then holds LoRA, model card, gallery, metrics and checkpoints. Ctrl-C
    saves and returns. A run of this recipe that is finished stays as it is, and what it measured
    is returned again.

    Args:
        pipeline, prompts, evaluation_prompts, rewards: a loaded diffusers pipeline, texts, and
            callables by name, in place of those that the configuration names. The pipeline keeps
            the adapters of its training, which may differ from the saved average of them: load it
            anew to use the LoRA.
        resume: "auto" resumes an unfinished run of this recipe, and where the folder holds
            another recipe's run takes the next number (`runs/quickstart-2`); "latest" or the
            folder of a checkpoint resumes the folder's run; None needs a folder without one.
        accept_changes: resume although options differ that affect results.

    Raises:
        UserError: for everything the caller can correct, before training where possible.
    """
    config = with_pipeline_name(config, pipeline)
    provided = ProvidedObjects(
        pipeline=pipeline, prompts=prompts, evaluation_prompts=evaluation_prompts, rewards=rewards
    )
    runtime = training_runtime(config)
    start, facts = start_on_all(
        config, provided, runtime, resume=resume, accept_changes=accept_changes
    )
    config = config.changed("run", output_dir=str(start.folder))
    if start.finished:
        LOG.info("%s: nothing is left to do", start.finished)
        again = saved_comparisons(start.folder) if runtime.is_main else []
        return TrainedRun(folder=start.folder, comparisons=again)
    if runtime.is_main and runtime.idle_gpus:
        LOG.info(
            "GPUs of this machine without work: %d. flowrl train --gpus auto takes all of them.",
            runtime.idle_gpus,
        )
    # A launcher ends all processes when one fails, so only the main one has to look.
    owned = claim(start.folder, resume=LATEST if start.holds_run and resume is not None else None)
    with owned if runtime.is_main else nullcontext():
        return _train(config, provided, runtime, start, facts)


def _train(
    config: Config, provided: ProvidedObjects, runtime: Runtime, start: Start, facts: Facts
) -> TrainedRun:
    """Train in the folder that the caller has claimed."""
    pushed, state = config.run.push_to_hub, start.state
    repository = repository_of(config) if pushed and runtime.is_main else None
    texts = TextCaches(config, provided.pipeline)
    needed = all_prompts_to_encode(config, provided, first=state["iteration"] if state else 0)
    pool = build_pool(config, runtime, provided)
    with phase("load"), announced(f"loading {config.pipeline.path}", show=runtime.is_main):
        learner = build_learner(config, runtime, provided, texts, needed, pool)
    with closing(learner.specs), pool or nullcontext():
        pipeline = learner.policy.backbone.pipeline
        with phase("load"):
            evaluator = build_evaluator(
                config, pipeline, learner.specs, provided, texts, runtime=runtime
            )
        held_out = evaluator.prompts if evaluator else ()
        with (
            phase("check"),
            announced("trying the rewards", show=runtime.is_main),
            runtime.raise_on_all(),
        ):
            try_rewards(learner, [*training_prompts(config, provided), *held_out])
        run = build_run(config, learner, evaluator, state, resumed=start.holds_run)
        with phase("save"):
            if runtime.is_main:
                begin_session(config, run, start, facts)
        with run.session():
            train(learner, run, iterations=config.run.iterations)
            rows = finish_run(config, learner, run)
            if pushed:
                publish(run, repository)
            run.record_stop()
            return TrainedRun(folder=start.folder, comparisons=rows, stopped=run.stopped)


def repository_of(config: Config) -> str:
    """Create or find the Hub repository that the run is pushed to; return its whole name.

    Raises UserError when nothing could be pushed, before anything is loaded.
    """
    name = config.run.hub_model_id or Path(config.run.output_dir).resolve().name
    return open_repository(name)


def try_rewards(learner: Learner, prompts: Sequence[PromptRecord]) -> None:
    """Check the rewards before sampling; log a warning for held-out ones that do not work.

    Raises UserError for a trained reward that does not work.
    """
    size = learner.policy.backbone.image_size()
    for result in check_before_training(learner.specs, prompts, size):
        if result.state != "ok":
            LOG.warning("reward %s: %s. %s", result.topic, result.detail, result.remedy)


# --- flowrl evaluate ---------------------------------------------------------------------------


def evaluate(
    config: Config, *, lora: str | None = None, lora_alpha: float | None = None
) -> list[Row]:
    """Score the configured pipeline, and the same with a LoRA if given, on the held-out prompts.

    Of several processes the first one reads the LoRA and returns the rows.

    Raises UserError when there are no such prompts, or `evaluation` asks what they cannot give.
    """
    runtime = runtime_to_evaluate(config)
    # Before anything is loaded.
    loras = [lora_of_main(lora, runtime, alpha=lora_alpha)] if lora else []
    specs = build_rewards(config, gpu=runtime.gpu)
    with closing(specs):
        held_out = held_out_prompts(config, specs)
        evaluator, loras = load_evaluator(config, runtime, specs, held_out, loras)
        velocity = evaluator.backbone.velocity
        base = evaluator(velocity, runtime, "the base")
        if not loras:
            measures = base.measures().items()
            rows = [{"reward": name, "mean": v.nanmean().item()} for name, v in measures]
        else:
            load_lora(evaluator.backbone.pipeline, loras[0])
            after = evaluator(velocity, runtime, "the LoRA")
            rows = table(compare(base, after))
    return rows if runtime.is_main else []


# --- flowrl train --encode-only ----------------------------------------------------------------


def encode(config: Config) -> list[Row]:
    """Fill memory.prompt_cache with what a run of the recipe encodes; return how many prompts."""
    return [fill_prompt_cache(config, training_runtime(config))]


# --- flowrl sample -----------------------------------------------------------------------------


def sample(
    drawing: Drawing,
    prompts: Sequence[str | PromptRecord],
    *,
    seed: int,
    count: int,
    output_dir: Path,
    best_of: int = 1,
    reward: RewardSpec | None = None,
) -> dict[Path, float]:
    """Generate `count` images of each prompt with the pipeline's own call.

    A prompt's own negative prompt acts before that of `drawing`. A file that is there already
    stays: the new one takes the next free name.

    Args:
        best_of: seeds for each image; of their images the one that `reward` scores best is kept.

    Returns:
        The PNG files with their scores; NaN without a reward.

    Raises:
        UserError: the reward cannot score a prompt, or none of its images.
    """
    records = [PromptRecord(uid=p, text=p) if isinstance(p, str) else p for p in prompts]
    if reward is not None:
        for record in records:
            if reason := reward.misfit(record.text, record.metadata):
                raise UserError(f"{reward.name} cannot score the prompt {record.text!r}: {reason}")
    scores = {}
    with Steps("drawing", len(records) * count, console=SafeConsole(stderr=True)) as steps:
        for (i, record), k in itertools.product(enumerate(records), range(count)):
            seeds = range(seed + k * best_of, seed + (k + 1) * best_of)
            images = [drawing.image(record.encoded, s, record.negative) for s in seeds]
            best, score = best_image(reward, images, record) if reward else (0, math.nan)
            path = unused(output_dir / f"{i:03d}-seed{seeds[best]}.png")
            write_bytes(path, png(images[best]))
            scores[path] = score
            steps.advance()
    return scores


def refine(run: Path, prompts: Sequence[PromptRecord], *, device: str) -> list[PromptRecord]:
    """Return prompts with the wordings that a run's refiner finds the most likely.

    Raises UserError for a folder without such a run.
    """
    config = load_config(run / CONFIG) if (run / CONFIG).is_file() else None
    steps = Checkpoints(run, keep=1).steps()
    if config is None or config.prompts.refiner is None or not steps:
        raise UserError(
            f"{run} is no run with prompts.refiner and a checkpoint: name one with --lora, or "
            "leave --refine out"
        )
    refiner = config.prompts.refiner.build(config.run.seed, Runtime(device=device).device)
    state = read_checkpoint(Checkpoints(run, keep=1).path(steps[-1])).get("refiner")
    if not state:
        raise UserError(f"the newest checkpoint of {run} is from before it had a refiner")
    refiner.load_state_dict(state)
    return [replace(prompt, wording=refiner.wording(prompt)) for prompt in prompts]


# --- flowrl gallery ----------------------------------------------------------------------------


def gallery(
    run: Path | None,
    *,
    base: str | None,
    lora: str | None,
    prompts: str | None,
    count: int,
    seed: int | None,
    output_dir: Path | None,
    revision: str | None = None,
    lora_alpha: float | None = None,
) -> Path:
    """Generate base and aligned images of the same prompts and seeds; return the HTML page.

    Of several processes the first one reads the run and writes; the others return the folder.

    Args:
        run: a run's folder, which brings pipeline, LoRA, rewards and evaluation settings; or None
            with `base`, a pipeline, and `lora`.
    """
    config, runtime = recipe_to_show(run, base, lora, prompts)
    added = lora_of_main(lora or str(run), runtime, alpha=lora_alpha)  # before anything is loaded
    rewards = build_rewards(config, gpu=runtime.gpu) if run else []
    if revision is not None:
        config = config.changed("pipeline", revision=revision)
    changes = {"num_images": count} | ({"prompts": prompts, "balance": None} if prompts else {})
    changes |= {"seed": seed} if seed is not None else {}
    config = config.changed("evaluation", **changes)
    held_out = evaluation_prompts(config, ProvidedObjects())
    if not held_out:
        raise UserError(f"{run} has no held-out prompts: name some with --prompts")
    if run is not None:
        check_unseen(config, held_out)
    evaluator, (added,) = load_evaluator(config, runtime, rewards, held_out, [added])
    evaluator = replace(evaluator, keep=count)
    folder = output_dir or Path(str(run)) / "comparison"
    evaluation = config.evaluation
    caption = f"{len(evaluator.prompts)} images of {config.held_out}, seed {evaluation.seed}"
    caption += ", generated by the pipeline's own call" * evaluation.as_deployed
    with closing(rewards):
        velocity = evaluator.backbone.velocity
        before = evaluator(velocity, runtime, "the base")
        load_lora(evaluator.backbone.pipeline, added)
        after = evaluator(velocity, runtime, "the LoRA")
    if not runtime.is_main:
        return folder
    title = f"{config.pipeline.path}: base and aligned"
    rows, summary = gallery_rows(before, after), compare(before, after)
    return write_gallery(folder, rows, title=title, summary=summary, caption=caption)[0]


# --- flowrl collect ----------------------------------------------------------------------------


def collect(
    config: Config,
    folder: Path,
    *,
    groups: int,
    lora: str | None = None,
    pipeline: Any = None,
) -> list[Row]:
    """Generate and score at least `groups` groups into an offline data set; return its summary.

    Images are generated as in the recipe's rollouts, in whole iterations. Iterations that the
    folder already holds are kept.

    Args:
        lora: run or file of the LoRA that generates.
        pipeline: a loaded object in place of that which the recipe names.
    """
    config = with_pipeline_name(config, pipeline).changed("rollout", store=None)
    if (book := config.prompts.book) is not None:  # nothing is told to it
        plain = book.model_copy(update={"choose": "uniform", "largest_group": None})
        config = config.changed("prompts", book=plain)
    config = config.changed("prompts", refiner=None)  # stored groups have their own words
    shards = -(-groups // config.rollout.prompts_per_iteration)  # one an iteration
    config = config.changed("run", output_dir=str(folder), iterations=shards)
    # A data set has no evaluations: rewards that are only measured score its images.
    measured = [entry.model_copy(update={"when": entry.when or "both"}) for entry in config.rewards]
    config = config.model_copy(update={"rewards": measured})
    if lora is not None:
        config = with_lora(config, lora)
    runtime = training_runtime(config)
    provided = ProvidedObjects(pipeline=pipeline)
    texts = TextCaches(config, pipeline)
    needed = prompts_to_encode(config, training_prompts(config, provided), ())
    pool = build_pool(config, runtime, provided)
    learner = build_learner(config, runtime, provided, texts, needed, pool)
    sampler = sampler_of(learner)
    done = len(set(finished_shards(folder)) & set(range(shards)))
    steps = Steps("collecting", shards, start=done, show=runtime.is_main)

    def advance(rollout: Rollout) -> None:
        steps.advance({"reward": rollout.reward.nanmean().item()})

    with closing(learner.specs), steps, pool or nullcontext():
        with runtime.raise_on_all():
            try_rewards(learner, training_prompts(config, provided))
        metadata = dataset_metadata(config, sampler)
        store = write_groups(folder, metadata, sampler, shards=shards, advance=advance)
    return _dataset_summary(store) if runtime.is_main else []


def collect_pairs(
    config: Config,
    source: str | Path,
    folder: Path,
    *,
    columns: Mapping[str, str] | None = None,
    pipeline: Any = None,
) -> tuple[list[Row], list[str]]:
    """Encode pairs of preferred and rejected images as groups of two, scored 1 and 0.

    Pairs that the folder already holds are kept. Returns the data set's summary, and a reason for
    each pair that was left out. Raises UserError when no pair is left.

    Args:
        source: a table of pairs, see `flowrl.offline.pairs`.
        columns: its columns of prompt, chosen and rejected, where they have other names.
    """
    preferences, left_out = read_pairs(str(source), columns)
    config = with_pipeline_name(config, pipeline)
    p = config.pipeline
    runtime = one_process(config, "pairs are encoded")
    if pipeline is None:
        pipeline = load_pipeline(p.path, dtype=p.dtype, device=runtime.device, revision=p.revision)
    backbone = build_backbone(config.pipeline, pipeline, guidance=1.0)
    unusable = len(left_out)
    with locked_folder(folder, "dataset"):
        create_dataset(
            folder,
            DatasetMetadata(
                pipeline=p.path,
                backbone=type(backbone.pipeline).__name__,
                latent_shape=list(backbone.latent_shape()),
                dtype="float32",
                sigmas=backbone.sigmas(config.rollout.num_inference_steps).tolist(),
                rewards=[{"name": REWARD, "version": None, "weight": 1.0}],
                recipe={PAIRS: pairs_digest(str(source), columns)},
            ),
        )
        with Steps("encoding", -(-len(preferences) // SHARD)) as steps:
            for reasons in write_pairs(folder, preferences, backbone, batch_size=p.decode_batch):
                left_out += reasons
                steps.advance({"left out": len(left_out)})
    if len(left_out) - unusable == len(preferences):
        raise UserError(
            f"none of the {len(preferences)} pairs can be used; the first: {left_out[unusable]}"
        )
    return _dataset_summary(open_dataset(folder)), left_out


def with_lora(config: Config, source: str) -> Config:
    """Return the recipe starting from a LoRA: its rank and alpha, and its layers if it is a run."""
    lora = open_lora(source)
    rank, alpha = lora.rank, round(lora.scale * lora.rank, 6)  # as it was before dividing
    saved = Path(source) / CONFIG
    if saved.is_file():
        config = config.model_copy(update={"lora": load_config(saved).lora})
    return config.changed("lora", rank=rank, alpha=alpha, init_from=source)


def _dataset_summary(store: OfflineDataset) -> list[Row]:
    """Return one row: how many groups and images a data set has, and the means of its scores."""
    means = store.scores.nanmean(0).tolist()
    return [
        {"groups": len(store.groups), "images": len(store)}
        | dict(zip(store.metadata.names, means, strict=True))
    ]


# --- flowrl score ------------------------------------------------------------------------------


def score(
    images: Sequence[Path],
    rewards: Sequence[str],
    prompts: str | None,
    args: Sequence[Mapping[str, Any] | None] = (),
    servers: Sequence[str] = (),
) -> ScoredFiles:
    """Score image files, or the images in folders.

    Args:
        images: files; folders of images; folders that say their prompts themselves, see
            `labelled_images`.
        prompts: one prompt for all other images, or a file or built-in split with one for each in
            the order of their names. Images of one prompt are a group, for rewards that compare.
        args: arguments of each reward, or nothing.
        servers: reward servers that know the rewards by name, in place of this process.

    Raises:
        UserError: when there are more or fewer prompts than images, and for a reward that cannot
            be made.
    """
    files = images_with_prompts(images, prompts or "")
    specs = named_rewards(rewards, args, servers)
    with closing(specs):
        return score_files(specs, files)


def named_rewards(
    names: Sequence[str],
    args: Sequence[Mapping[str, Any] | None] = (),
    servers: Sequence[str] = (),
) -> list[RewardSpec]:
    """Return rewards by name, see `score`. Raises UserError for one that cannot be made."""
    entries = [
        {"name": name, "label": name}
        | (
            {"executor": {"kind": "http", "urls": list(servers)}}
            if servers
            else {"args": dict(its or {})}
        )
        for name, its in zip(names, args or [None] * len(names), strict=True)
    ]
    return [RewardOptions.model_validate(entry).build() for entry in entries]


# --- flowrl audit ------------------------------------------------------------------------------


def audit(configs: Sequence[Config], *, lora: str | None = None, pipeline: Any = None) -> list[Row]:
    """Compare how cheap candidates rank with how the exact images rank (Sol-RL, 2604.06916).

    All candidates of one iteration's prompts are generated and scored once exactly, and once for
    every configuration. Returns a row for each, see `RankAudit`, then one of the exact images
    themselves.

    Args:
        configs: those of `audit_configs`.
        lora: run or file of the LoRA that generates.
        pipeline: a loaded object in place of that which the recipe names.

    Raises:
        UserError: for a precision that the device lacks, before anything is generated.
    """
    configs = [with_pipeline_name(config, pipeline) for config in configs]
    if lora is not None:
        configs = [with_lora(config, lora) for config in configs]
    config = configs[0]
    runtime = training_runtime(config)
    provided = ProvidedObjects(pipeline=pipeline)
    needed = prompts_to_encode(config, training_prompts(config, provided), (), range(1))
    learner = build_learner(
        config.changed("rollout", explore=None), runtime, provided, needed=needed
    )
    bar = Steps("auditing", len(configs) + 1, show=runtime.is_main)
    with closing(learner.specs), bar:
        previews = [rollout_parts(each, learner) for each in configs]
        for parts in previews:
            preview_layers(parts)  # refuses what cannot work
        with runtime.raise_on_all():
            try_rewards(learner, training_prompts(config, provided))
        exact, rows = exact_samples(config, learner), []
        bar.advance({"seconds per image": exact.seconds})
        generator = sampler_of(learner).generator
        by_precision = itertools.groupby(
            previews, key=lambda parts: explore_options(parts.config).precision
        )
        for _, recipes in by_precision:
            for row in candidate_rows(list(recipes), generator, exact):
                rows.append(row)
                bar.advance({"rho": row["rho"]})
    steps_of_exact = config.rollout.num_inference_steps
    rows.append(
        {"steps": steps_of_exact, "precision": "exact", "quantised": 0.0}
        | compare_ranks(config, exact.scores, exact.scores)
        | {"seconds_per_image": exact.seconds, "ratio_to_exact": 1.0}
    )
    return rows if runtime.is_main else []


# --- what several of them need -----------------------------------------------------------------


def training_runtime(config: Config) -> Runtime:
    """Return this process's runtime; set torch's threads as `run.threads` says."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    return Runtime(
        device=config.pipeline.device,
        mixed_precision=PRECISION[config.pipeline.dtype],
        timeout=config.runtime.timeout,
        seed=config.run.seed,
    )
