"""What the commands do, as functions: train, evaluate, sample, score, compare."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.calls import own_call
from flowrl.backbones.guidance import RLG
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import load_lora
from flowrl.build.backbone import of_family
from flowrl.build.build_memory import Texts, build_pipeline, stored_texts
from flowrl.build.learner import (
    PRECISION,
    Given,
    all_texts,
    as_given,
    build_evaluator,
    build_learner,
    build_run,
    check_measures,
    drawn_prompts,
    evaluation_prompts,
)
from flowrl.build.rewards import build_rewards
from flowrl.config import Config, config_yaml, load_config, parse_config
from flowrl.errors import UserError
from flowrl.export.gallery import write_gallery
from flowrl.export.hub import open_repository
from flowrl.export.publish import publish
from flowrl.export.summary import call_settings, hand_over, pairs, summary
from flowrl.export.sweep import draw_sweep, write_sweep
from flowrl.prompts.records import PromptRecord
from flowrl.quantization.training import packed_within
from flowrl.scoring.check import preflight
from flowrl.scoring.spec import RewardSpec, closing
from flowrl.training.checkpoint import CONFIG, Checkpoints, claim, write_config
from flowrl.training.evaluate import Comparison, compare
from flowrl.training.loop import Learner, train
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import write_bytes
from flowrl.utils.images import png

LOG = logging.getLogger(__name__)


def align(
    config: Config,
    *,
    pipeline: Any = None,
    prompts: Sequence[str] | None = None,
    evaluation_prompts: Sequence[str] | None = None,
    rewards: dict[str, Any] | None = None,
    resume: str | None = None,
) -> list[Comparison]:
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
    given = Given(
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
    size = learner.policy.backbone.picture_size()
    for finding in preflight(learner.specs, prompts, size):
        if finding.state != "ok":
            LOG.warning("reward %s: %s. %s", finding.topic, finding.detail, finding.remedy)


def evaluate_model(config: Config, *, lora: str | None = None) -> list[dict[str, Any]]:
    """The configured pipeline, and with `lora` also the adapted one, on the held-out prompts.

    Raises UserError when there are none, or what `evaluation` asks of them cannot be had.
    """
    specs, held_out = build_rewards(config), evaluation_prompts(config, Given())
    if not held_out:
        raise UserError("evaluation.prompts is null, expected held-out prompts to evaluate on")
    check_measures(_without_training(config), specs, (), held_out)
    runtime = Runtime(device=config.pipeline.device)
    pipeline = build_pipeline(config, runtime.device)
    evaluator = build_evaluator(config, pipeline, specs, Given())
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


def table(rows: Sequence[Comparison]) -> list[dict[str, Any]]:
    """A comparison as rows for people."""
    return [
        {
            "reward": row.name,
            "base": row.before,
            "aligned": row.after,
            "change": row.change.mean,
            "95% low": row.change.low,
            "95% high": row.change.high,
            "pictures": row.pairs,
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
    """Draw `count` pictures of each prompt with the pipeline's own call -> paths of PNG files.

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
    """Draw base and aligned pictures of the same prompts and seeds -> the page that shows them.

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
    evaluator = build_evaluator(config, pipeline, rewards, Given())
    if evaluator is None:
        raise UserError(f"{run} has no held-out prompts: name some with --prompts")
    evaluator = replace(evaluator, keep=count)
    with closing(rewards):
        before = evaluator(evaluator.backbone.velocity, runtime)
        load_lora(pipeline, lora or str(run))
        folder = output_dir or Path(str(run)) / "comparison"
        caption = f"{count} pictures of {evaluation.prompts}, seed {evaluation.seed}"
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
