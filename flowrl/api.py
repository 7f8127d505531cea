"""What the commands do, as functions: train, evaluate, sample, score, compare."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrl.backbones.guidance import RLG
from flowrl.backbones.loading import load_pipeline, own_call
from flowrl.backbones.lora_files import load_lora, read_lora
from flowrl.build.backbone import Texts, build_pipeline, needed_texts, of_family, stored_texts
from flowrl.build.learner import (
    PRECISION,
    ProvidedObjects,
    all_texts,
    as_given,
    build_backbone,
    build_evaluator,
    build_learner,
    build_run,
    check_measures,
    drawn_prompts,
    evaluation_prompts,
)
from flowrl.build.rewards import build_rewards
from flowrl.build.rollout import Drawing, about, draft_stage, low_precision, plan_at
from flowrl.config import Config, config_yaml, load_config, parse_config
from flowrl.config.load import load_recipe
from flowrl.config.rollout import ExploreOptions
from flowrl.errors import UserError
from flowrl.export.gallery import write_gallery
from flowrl.export.hub import open_repository, publish
from flowrl.export.summary import call_settings, draw_sweep, hand_over, pairs, summary, write_sweep
from flowrl.offline.format import (
    PAIRS,
    DatasetMetadata,
    OfflineDataset,
    create,
    finished_shards,
    open_store,
)
from flowrl.offline.writer import REWARD, SHARD, fill, pairs_digest, read_pairs, write_pairs
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.quantization.backends import Capability, Resolved, capability_of, named, resolve
from flowrl.quantization.layer_rules import quantised_share
from flowrl.quantization.linear import packed_within
from flowrl.sampling.rank_audit import audit
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Stopwatch
from flowrl.sampling.source import Sampler
from flowrl.sampling.two_stage import score_candidates
from flowrl.scoring.check import preflight
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import Reward, RewardSpec, closing, load_reward
from flowrl.training.checkpoint import CONFIG, Checkpoints, claim, write_config
from flowrl.training.evaluate import EvaluationComparison, compare
from flowrl.training.loop import Learner, train
from flowrl.trajectory import Rollout
from flowrl.trees.plan import TreePlan, count
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import write_bytes
from flowrl.utils.images import png, to_tensor
from flowrl.utils.progress import Steps

LOG = logging.getLogger(__name__)


def align(
    config: Config,
    *,
    pipeline: Any = None,
    prompts: Sequence[str] | None = None,
    evaluation_prompts: Sequence[str] | None = None,
    rewards: dict[str, Any] | None = None,
    resume: str | None = None,
) -> list[EvaluationComparison]:
    """Train as configured; -> each reward before and after on the held-out prompts, if any.

    pipeline, prompts, rewards: a loaded diffusers pipeline, texts and callables by name, used
    instead of what the configuration names. resume: "latest" or a checkpoint's folder. The
    folder `config.run.output_dir` then holds LoRA, card, gallery, metrics and checkpoints. A given
    pipeline keeps its adapters of training, of which the file may hold the average: load it anew.
    Raises UserError for what the caller can mend; Ctrl-C saves and returns.
    """
    config = as_given(config, pipeline)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    given = ProvidedObjects(
        pipeline=pipeline, prompts=prompts, evaluation_prompts=evaluation_prompts, rewards=rewards
    )
    folder = Path(config.run.output_dir)
    precision = PRECISION[config.pipeline.dtype]
    runtime = Runtime(device=config.pipeline.device, mixed_precision=precision)
    # A launcher ends all processes when one fails, so only the main one has to look.
    with claim(folder, resume=resume) if runtime.is_main else nullcontext():
        pushed = config.run.push_to_hub
        repository = repository_of(config) if pushed and runtime.is_main else None
        state = Checkpoints(folder, keep=config.run.keep).load(resume) if resume else None
        texts = Texts(config, pipeline)
        needed = all_texts(config, given, first=state["iteration"] if state else 0)
        learner = build_learner(config, runtime, given, texts, needed)
        with closing(learner.specs), packed_within(learner.policy.network):
            pipeline = learner.policy.backbone.pipeline
            evaluator = build_evaluator(config, pipeline, learner.specs, given, texts)
            held_out = evaluator.prompts if evaluator else ()
            with runtime.together():
                try_rewards(learner, [*drawn_prompts(config, given), *held_out])
            asked = [*needed, *stored_texts(config, learner.source)]
            texts.free(pipeline, asked, runtime)
            run = build_run(config, learner, evaluator, state, resumed=resume is not None)
            if runtime.is_main:
                write_config(folder, config_yaml(config))
            with run.session():
                train(learner, run, iterations=config.run.iterations)
                rows = hand_over(config, learner, run)
                if pushed:
                    publish(run, repository)
                return rows


def repository_of(config: Config) -> str:
    """Where the run is pushed at its end, made or found now -> its whole name.

    Raises UserError when nothing could be pushed, before anything is loaded or drawn.
    """
    name = config.run.hub_model_id or Path(config.run.output_dir).resolve().name
    return open_repository(name, private=config.run.hub_private)


def try_rewards(learner: Learner, prompts: Sequence[PromptRecord]) -> None:
    """Before anything is drawn. What is wrong with a reward that is only measured is told."""
    size = learner.policy.backbone.image_size()
    for finding in preflight(learner.specs, prompts, size):
        if finding.state != "ok":
            LOG.warning("reward %s: %s. %s", finding.topic, finding.detail, finding.remedy)


def evaluate_model(config: Config, *, lora: str | None = None) -> list[dict[str, Any]]:
    """The configured pipeline, and with `lora` also the adapted one, on the held-out prompts.

    Raises UserError when there are none, or what `evaluation` asks of them cannot be had.
    """
    specs, held_out = build_rewards(config), evaluation_prompts(config, ProvidedObjects())
    if not held_out:
        raise UserError("evaluation.prompts is null, expected held-out prompts to evaluate on")
    check_measures(_without_training(config), specs, (), held_out)
    runtime = Runtime(device=config.pipeline.device)
    pipeline = build_pipeline(config, runtime.device)
    evaluator = build_evaluator(config, pipeline, specs, ProvidedObjects())
    assert evaluator is not None  # there are prompts
    with closing(specs):
        base = evaluator(evaluator.backbone.velocity, runtime)
        if lora is None:
            measures = base.measures(evaluator.quality).items()
            return [{"reward": name, "mean": values.nanmean().item()} for name, values in measures]
        load_lora(pipeline, lora)
        after = evaluator(evaluator.backbone.velocity, runtime)
        return table(compare(base, after, evaluator.quality))


def _without_training(config: Config) -> Config:
    """Without what is asked of prompts and rewards for training alone."""
    prompts = config.prompts.model_copy(update={"retained": None})
    run = config.run.model_copy(update={"stop_when_hacking": None})
    return config.model_copy(update={"prompts": prompts, "run": run})


def table(rows: Sequence[EvaluationComparison]) -> list[dict[str, Any]]:
    """A comparison as rows for people."""
    return [
        {
            "reward": row.name,
            "base": row.before,
            "aligned": row.after,
            "change": row.change.mean,
            "95% low": row.change.low,
            "95% high": row.change.high,
            "images": row.pairs,
        }
        for row in rows
    ]


def sample_images(  # noqa: PLR0913  # an argument for each option
    model: str,
    prompts: Sequence[str],
    *,
    lora: str | None,
    negative: str,
    guidance: float | None,
    steps: int | None,
    seed: int,
    count: int,
    max_sequence_length: int | None,
    output_dir: Path,
    device: str,
    rlg: float | None = None,
    revision: str | None = None,
) -> list[Path]:
    """Draw `count` images of each prompt with the pipeline's own call -> paths of PNG files.

    What is None, or a negative of "", is as the run of `lora` was evaluated, else the pipeline's
    default. rlg: the strength of the LoRA, see `flowrl.backbones.guidance`.
    """
    asked = {
        "guidance_scale": guidance,
        "num_inference_steps": steps,
        "max_sequence_length": max_sequence_length,
        "negative_prompt": negative or None,
    }
    run_file = Path(lora) / CONFIG if lora else None
    of_run = call_settings(load_config(run_file)) if run_file and run_file.is_file() else {}
    where = Runtime(device=device).device
    dtype = "bf16" if where.type == "cuda" else "fp32"
    pipeline = load_pipeline(model, dtype=dtype, device=where, revision=revision)
    call = own_call(pipeline, negative) | {"negative_prompt": ""} | of_run
    call |= {name: value for name, value in asked.items() if value is not None}
    if lora is not None:
        load_lora(pipeline, lora)
    paths = []
    for i, prompt in enumerate(prompts):
        for k in range(count):
            generator = torch.Generator().manual_seed(seed + k)
            with nullcontext() if rlg is None else RLG(pipeline, rlg):
                image = pipeline(prompt, generator=generator, **call).images[0]
            path = output_dir / f"{i:03d}-seed{seed + k}.png"
            write_bytes(path, png(image))
            paths.append(path)
    return paths


def build_gallery(
    run: Path | None,
    *,
    base: str | None,
    lora: str | None,
    prompts: str | None,
    count: int,
    seed: int | None,
    output_dir: Path | None,
    rlg: Sequence[float] = (),
    revision: str | None = None,
) -> Path:
    """Draw base and aligned images of the same prompts and seeds -> the page that shows them.

    Of a run: its pipeline, LoRA, rewards and evaluation settings; or of `base` with `lora`. With
    `rlg`: the base and the LoRA at each of these strengths, see `flowrl.backbones.guidance`.
    """
    config, rewards = _recipe_of(run) if run else (_plain_recipe(str(base), lora, str(prompts)), [])
    if revision is not None:
        section = config.pipeline.model_copy(update={"revision": revision})
        config = config.model_copy(update={"pipeline": section})
    changes = {"images": count} | ({"prompts": prompts, "balance": None} if prompts else {})
    changes |= {"seed": seed} if seed is not None else {}
    evaluation = config.evaluation.model_copy(update=changes)
    config = config.model_copy(update={"evaluation": evaluation})
    runtime = Runtime(device=config.pipeline.device)
    pipeline = build_pipeline(config, runtime.device)
    config = config if run else of_family(config, pipeline)
    evaluator = build_evaluator(config, pipeline, rewards, ProvidedObjects())
    if evaluator is None:
        raise UserError(f"{run} has no held-out prompts: name some with --prompts")
    evaluator = replace(evaluator, keep=count)
    with closing(rewards):
        before = evaluator(evaluator.backbone.velocity, runtime)
        load_lora(pipeline, lora or str(run))
        folder = output_dir or Path(str(run)) / "comparison"
        caption = f"{count} images of {evaluation.prompts}, seed {evaluation.seed}"
        if rlg:
            title = f"{config.pipeline.path}: base and strengths of the LoRA"
            at_each = draw_sweep(evaluator, runtime, rlg)
            return write_sweep(folder, before, at_each, title=title, caption=caption)
        after = evaluator(evaluator.backbone.velocity, runtime)
        page, _ = write_gallery(
            folder,
            pairs(before, after),
            title=f"{config.pipeline.path}: base and aligned",
            summary=summary(compare(before, after, evaluator.quality)),
            caption=caption,
        )
        return page


def _recipe_of(run: Path) -> tuple[Config, list[RewardSpec]]:
    path = run / CONFIG
    if not path.is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG}")
    config = load_config(path)
    return config, build_rewards(config)


def _plain_recipe(base: str, lora: str | None, prompts: str) -> Config:
    """The recipe of the run that `lora` is, on another base; or defaults."""
    if lora is not None and (Path(lora) / CONFIG).is_file():
        return load_config(Path(lora) / CONFIG, [f"pipeline.path={base}", "pipeline.revision=null"])
    rewards = [{"name": "brightness"}]  # a recipe needs one; the gallery asks none
    return parse_config(
        {"pipeline": {"path": base}, "prompts": {"train": prompts}, "rewards": rewards}
    )


# --- What `flowrl collect` does: groups, drawn by a pipeline or given as pairs, into a store ---

NAMED = 5  # lines of a file of pairs that are reported one by one


def collect_groups(
    config: Config,
    folder: Path,
    *,
    groups: int,
    lora: str | None = None,
    pipeline: Any = None,
    rewards: Mapping[str, Reward] | None = None,
) -> list[dict[str, Any]]:
    """Draw and score at least `groups` groups as the recipe's rollouts are, in whole iterations.

    What the folder has already is kept. lora: a run or file, of the model that draws. pipeline,
    rewards: objects to use in place of those that the recipe names. -> one row that sums up.
    """
    config = _without_store(as_given(config, pipeline))
    shards = -(-groups // config.rollout.prompts)  # iterations, as many as are drawn
    # What is written down about a rollout's stages belongs to the store.
    run = config.run.model_copy(update={"output_dir": str(folder), "iterations": shards})
    config = config.model_copy(update={"run": run})
    if config.prompts.retained is not None:
        raise UserError(
            "prompts.retained asks for images in other words than the prompt's own, which a "
            "store does not keep: set it to null"
        )
    if lora is not None:
        config = with_lora(config, lora)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    runtime = Runtime(
        device=config.pipeline.device, mixed_precision=PRECISION[config.pipeline.dtype]
    )
    given = ProvidedObjects(pipeline=pipeline, rewards=rewards)
    texts = Texts(config, pipeline)
    needed = needed_texts(config, drawn_prompts(config, given), ())
    learner = build_learner(config, runtime, given, texts, needed)
    sampler = learner.source
    assert isinstance(sampler, Sampler)  # the recipe has no store
    done = len(set(finished_shards(folder)) & set(range(shards)))
    steps = Steps("collecting", shards, start=done) if runtime.is_main else None

    def advance(rollout: Rollout) -> None:
        if steps is not None:
            steps.advance({"reward": rollout.reward.nanmean().item()})

    packed = packed_within(learner.policy.network)
    with closing(learner.specs), packed, steps or nullcontext():
        with runtime.together():
            try_rewards(learner, drawn_prompts(config, given))
        texts.free(learner.policy.backbone.pipeline, needed, runtime)
        store = fill(folder, about(config, sampler), sampler, shards=shards, advance=advance)
    return collection_summary(store) if runtime.is_main else []


def collect_pairs(
    config: Config, source: Path, folder: Path, *, pipeline: Any = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Encode pairs of images with the recipe's pipeline: groups of two, scored 1 and 0.

    What the folder has already is kept. -> one row that sums up, and why pairs were left out.
    Raises UserError when no pair is left.
    """
    pairs = read_pairs(source)
    config = as_given(config, pipeline)
    p = config.pipeline
    runtime = Runtime(device=p.device)
    if runtime.world_size > 1:
        raise UserError("pairs are encoded by one process: start this without a launcher")
    if pipeline is None:
        pipeline = load_pipeline(p.path, dtype=p.dtype, device=runtime.device, revision=p.revision)
    backbone = build_backbone(config, pipeline, guidance=1.0)
    create(
        folder,
        DatasetMetadata(
            pipeline=p.path,
            backbone=p.backbone,
            latent_shape=list(backbone.latent_shape()),
            dtype="float32",
            sigmas=backbone.sigmas(config.rollout.steps).tolist(),
            rewards=[{"name": REWARD, "version": None, "weight": 1.0}],
            recipe={PAIRS: pairs_digest(source)},
        ),
    )
    left_out: list[str] = []
    shards = -(-len(pairs) // SHARD)
    with Steps("encoding", shards) as steps:
        for reasons in write_pairs(folder, pairs, backbone, batch_size=p.decode_batch):
            left_out += reasons
            steps.advance({"left out": len(left_out)})
    if len(left_out) == len(pairs):
        raise UserError(f"none of the {len(pairs)} pairs can be used; the first: {left_out[0]}")
    return collection_summary(open_store(folder)), left_out


def with_lora(config: Config, source: str) -> Config:
    """The recipe on top of a LoRA: its rank and strength, and of a run also its layers."""
    state, strength = read_lora(source)
    rank = next(t.shape[0] for name, t in state.items() if ".lora_A." in name)
    alpha = round(strength * rank, 6)  # as it was, before it was divided
    saved = Path(source) / CONFIG
    layers = load_config(saved).lora if saved.is_file() else config.lora
    changes = {"rank": rank, "alpha": alpha, "init_from": source}
    return config.model_copy(update={"lora": layers.model_copy(update=changes)})


def _without_store(config: Config) -> Config:
    """The recipe as it draws, whatever it would otherwise read."""
    rollout = config.rollout.model_copy(update={"store": None})
    return config.model_copy(update={"rollout": rollout})


def collection_summary(store: OfflineDataset) -> list[dict[str, Any]]:
    """One row: what is in a store, and the means of its scores."""
    means = store.scores.nanmean(0).tolist()
    return [
        {"groups": len(store.groups), "images": len(store)}
        | dict(zip(store.about.names, means, strict=True))
    ]


# --- What `flowrl score` does: scores of image files -----------------------------------------

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
BATCH = 16  # images that are held at a time, where nothing compares them


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredFile:
    """rows: of each image its path, its prompt and a score for each reward, NaN where there is
    none. missing: why, a line for each reward, and for each file that cannot be read."""

    rows: list[dict[str, Any]]
    missing: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: Path
    prompt: str
    metadata: dict
    scores: dict[str, float] = field(default_factory=dict)


class _Missing:
    """Why scores are missing: of each reward the first reason, and how often it has none."""

    def __init__(self):
        self._told: dict[tuple[str, str], dict[object, str]] = {}

    def add(self, source: str, unit: str, which: object, sentence: str) -> None:
        """source: a reward or a file; unit: what `which` is one of, in the plural."""
        self._told.setdefault((source, unit), {}).setdefault(which, sentence)

    def lines(self) -> list[str]:
        return [
            next(iter(told.values()))
            + (f"; {unit} without a score: {len(told)}" if len(told) > 1 else "")
            for (_, unit), told in self._told.items()
        ]


def score_images(
    images: Sequence[Path],
    rewards: Sequence[str],
    prompts: str | None,
    args: Sequence[Mapping[str, Any] | None] = (),
) -> ScoredFile:
    """Scores of files, or of the images in folders.

    prompts: one prompt for all, or a file or built-in split with one for each image in the
    order of their names; images of one prompt are one group, for rewards that compare them.
    args: for each reward, or none at all. Raises UserError when there are more prompts than
    images or fewer, and for a reward that cannot be made.
    """
    paths = _image_files(images)
    records = _prompts_for(prompts or "", len(paths))
    specs = [
        RewardSpec(name=name, reward=load_reward(name, its))
        for name, its in zip(rewards, args or [None] * len(rewards), strict=True)
    ]
    files = [
        _File(path=path, prompt=text, metadata=metadata)
        for path, (text, metadata) in zip(paths, records, strict=True)
    ]
    missing = _Missing()
    for group in _by_prompt(files):
        _score_group(specs, group, missing)
    rows = [
        {"image": str(file.path), "prompt": file.prompt}
        | {name: file.scores.get(name, math.nan) for name in rewards}
        for file in files
    ]
    return ScoredFile(rows=rows, missing=missing.lines())


def _by_prompt(files: Sequence[_File]) -> list[list[_File]]:
    groups: dict[str, list[_File]] = {}
    for file in files:
        key = json.dumps([file.prompt, file.metadata], sort_keys=True, default=repr)
        groups.setdefault(key, []).append(file)
    return list(groups.values())


def _score_group(specs: Sequence[RewardSpec], group: list[_File], missing: _Missing) -> None:
    """Every reward, on all images of one prompt."""
    fits = []
    for spec in specs:
        if why := _why_not(spec, group[0]):
            _refuse(spec, group, why, missing)
        else:
            fits.append(spec)
    if alone := [spec for spec in fits if not spec.whole_groups]:
        for start in range(0, len(group), BATCH):
            for part in _by_size(_read(group[start : start + BATCH], missing)):
                for spec in alone:
                    _ask(spec, part, missing)
    if together := [spec for spec in fits if spec.whole_groups]:
        _compare(together, group, missing)


def _compare(specs: Sequence[RewardSpec], group: list[_File], missing: _Missing) -> None:
    parts = _by_size(_read(group, missing))
    why = ""
    if len(parts) > 1:
        sizes = ", ".join("{} x {}".format(*part[0][1].size) for part in parts)
        why = f"it compares images of one size, and these are {sizes}"
    elif sum(map(len, parts)) < 2:
        why = "it compares the images of a prompt: give two or more"
    for spec in specs:
        if why:
            _refuse(spec, group, why, missing)
        else:
            _ask(spec, parts[0], missing)


def _why_not(spec: RewardSpec, file: _File) -> str:
    """Why a reward has no score for a prompt, "" if it may have one."""
    try:
        if spec.applies(file.prompt, file.metadata):
            return ""
    except UserError as error:
        return _bare(spec, error)
    needs = [k for k in getattr(spec.reward, "required_metadata", ()) if k not in file.metadata]
    if needs:
        return f"it needs {', '.join(needs)} in its metadata: give --prompts a file that has them"
    return "there is nothing in it that it could judge"


def _refuse(spec: RewardSpec, group: list[_File], why: str, missing: _Missing) -> None:
    told = f"reward {spec.name!r} does not apply to the prompt {group[0].prompt!r}: {why}"
    missing.add(spec.name, "prompts", group[0].path, told)


def _ask(spec: RewardSpec, part: list[tuple[_File, Image.Image]], missing: _Missing) -> None:
    """Scores of images of one prompt and one size."""
    files, images = [file for file, _ in part], to_tensor([image for _, image in part])
    prompts, metadata = [file.prompt for file in files], [file.metadata for file in files]
    try:
        answer = spec.asked_by().submit(quantise(images), prompts, metadata).result()
    except UserError as error:
        reasons = dict.fromkeys(range(len(files)), _bare(spec, error))
    else:
        reasons = answer.reasons
        for file, value in zip(files, answer.scores.tolist(), strict=True):
            file.scores[spec.name] = value
    for row, reason in reasons.items():
        file = files[row]
        told = (
            f"reward {spec.name!r} has no score for {file.path}, prompt {file.prompt!r}: {reason}"
        )
        missing.add(spec.name, "images", file.path, told)


def _bare(spec: RewardSpec, error: UserError) -> str:
    """What it says, without the name of the reward."""
    return str(error).removeprefix(f"reward {spec.name!r}").lstrip(": ")


def _read(files: Sequence[_File], missing: _Missing) -> Iterator[tuple[_File, Image.Image]]:
    """Those that can be read, and what they show."""
    for file in files:
        try:
            with Image.open(file.path) as image:
                yield file, image.convert("RGB")
        except Exception as error:  # Pillow has no common class for what it finds in broken files
            missing.add(str(file.path), "", file.path, f"cannot read {file.path}: {error}")


def _by_size(
    read: Iterator[tuple[_File, Image.Image]],
) -> list[list[tuple[_File, Image.Image]]]:
    parts: dict[tuple[int, int], list[tuple[_File, Image.Image]]] = {}
    for file, image in read:
        parts.setdefault(image.size, []).append((file, image))
    return list(parts.values())


def _image_files(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(p for p in source.iterdir() if p.suffix.lower() in IMAGES)
        elif source.is_file():
            found.append(source)
        else:
            raise UserError(f"no image at {source}")
    if not found:
        raise UserError(f"no images in {', '.join(map(str, sources))}: looked for {IMAGES}")
    return found


def _prompts_for(source: str, count: int) -> list[tuple[str, dict]]:
    if not source.startswith("tiny:") and not Path(source).suffix and not Path(source).is_file():
        return [(source, {})] * count
    records = load_prompts(source, limit=count if source.startswith("tiny:") else None)
    if len(records) != count:
        raise UserError(f"{source} has {len(records)} prompts for {count} images")
    return [(record.text, record.metadata) for record in records]


# --- What `flowrl audit` does ------------------------------------------------------------------

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
    # Only images are drawn: what would be learned from them asks nothing of the rollout.
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
    return [max(2, whole - 1)] if whole < ExploreOptions.model_fields["steps"].default else []


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
    kind, then one of the exact images and one of choices at random. Raises UserError for a
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
    given = ProvidedObjects(pipeline=pipeline, rewards=rewards)
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
class _ExactSamples:
    """All candidates, drawn and scored as those that are learned from."""

    request: RolloutRequest
    true: Tensor  # (P, N)
    seconds: float  # an image


def _resolved(config: Config, precisions: Sequence[str], capability: Capability) -> list[Resolved]:
    """What was asked for, or what the recipe explores in; each once."""
    names = precisions or (_explore(config).precision,)
    return [resolve(name, capability) for name in dict.fromkeys(names)]


def _explore(config: Config) -> ExploreOptions:
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


def _exact(config: Config, learner: Learner, bar: Steps | None) -> _ExactSamples:
    explore, sampler = _explore(config), _sampler(learner)
    plan = replace(plan_at(config.rollout.plan, config.run.seed, 0), roots=explore.candidates)
    request = sampler.request(0, plan)
    with torch.no_grad(), learner.runtime.autocast():
        sampler.stage.encode(request.prompts)  # once for all: it is nobody's time
    # Its rewards are those of the previews: what is only held out decides nothing here.
    stage = replace(sampler.stage, specs=[spec for spec in learner.specs if spec.trained])
    true, seconds = _timed(stage, request, plan, compiled=config.rollout.compile)
    if bar is not None:
        bar.advance({"s/image": seconds})
    return _ExactSamples(request=request, true=true, seconds=seconds)


def _rows(
    configs: Sequence[Config],
    learner: Learner,
    exact: _ExactSamples,
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
            | {"s/image": seconds, "to exact": seconds / exact.seconds}
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


def _previews(
    config: Config, learner: Learner, resolved: Resolved
) -> tuple[RolloutGenerator, float]:
    """What draws them, and the share of the network's weights that it quantises."""
    drawing = _drawing(config, learner)
    choices, backend = low_precision(drawing, resolved)
    stage = draft_stage(drawing, _sampler(learner).stage, choices, backend)
    return stage, quantised_share(choices) if choices else 0.0


def _timed(
    stage: RolloutGenerator, request: RolloutRequest, plan: TreePlan, *, compiled: bool
) -> tuple[Tensor, float]:
    """Scores (P, N), and the seconds that an image took: drawn, decoded and scored."""
    if compiled:
        score_candidates(stage, request, plan, Stopwatch())  # compiling is nobody's time either
    watch = Stopwatch()
    scores = score_candidates(stage, request, plan, watch)
    images = scores.shape[0] * count(plan).leaves
    return scores, sum(watch.seconds.values()) / images


def _compared(config: Config, proxy: Tensor, true: Tensor) -> Row:
    keep = config.rollout.plan(0, config.run.seed).roots
    return audit(proxy, true, keep, _explore(config).select).summary()


def _ends(config: Config, exact: _ExactSamples) -> list[Row]:
    """The best and the poorest that previews could do: choices by exact scores, and at random."""
    found = _compared(config, exact.true, exact.true)
    middle = (exact.true.isfinite().sum(1).double().mean().item() + 1) / 2
    return [
        {"steps": config.rollout.steps, "precision": "exact", "quantised": 0.0}
        | found
        | {"s/image": exact.seconds, "to exact": 1.0},
        {"precision": "random", "rank best": middle, "rank worst": middle},
    ]
