"""Compare base and LoRAs on the same prompts and noise: the evaluator in a loop.

Each evaluation is a file `evaluations/<key>.safetensors`. The key identifies everything that
decides images and scores, so an intact file is never made again where all rewards have a version:
an interrupted call resumes with the next LoRA, and later LoRAs meet the base as it is.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from flowrl.assembly.learner import build_rewards, evaluation_key
from flowrl.backbones.lora_files import load_lora, unload_lora
from flowrl.backbones.lora_formats import LoRA, lora_bytes, open_lora
from flowrl.config import Config
from flowrl.errors import DamagedFile
from flowrl.evaluation.loading import held_out_prompts, load_evaluator, one_process
from flowrl.functional.contrasts import Contrast, holm, paired_contrast, resamples_for
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.combine import combine
from flowrl.scoring.spec import RewardResult, RewardSpec, closing
from flowrl.training.evaluate import Evaluation, Evaluator, prompt_numbers
from flowrl.utils.digests import digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import locked_folder

LOG = logging.getLogger(__name__)
BASE, OVERALL = "base", "overall"
EVALUATIONS = "evaluations"
SHOWN = 12  # images of each entry that a page shows
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The base or a LoRA, and the measures of its N images."""

    name: str
    evaluation: Evaluation  # with the first images
    measures: Mapping[str, Tensor]  # by name, (N,) fp32, NaN where missing or not applicable

    def mean(self, measure: str) -> float:
        return self.measures[measure].nanmean().item()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairContrast:
    """One measure of two entries."""

    measure: str
    first: str
    second: str
    contrast: Contrast  # second minus first
    corrected: float  # p after Holm's correction for all pairs and measures

    @property
    def differs(self) -> bool:
        return self.corrected < SIGNIFICANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All entries, and all their pairs."""

    entries: Sequence[Entry]  # the best overall first
    pairs: Sequence[PairContrast]
    prompts: Sequence[PromptRecord]  # N, the prompt of each image
    held_out: frozenset[str]  # rewards without a part in training
    title: str


def compare_loras(
    config: Config, loras: Sequence[str], folder: Path, *, lora_alpha: float | None = None
) -> Comparison:
    """Evaluate the base and every LoRA; compare all pairs.

    Args:
        config: its `evaluation` has prompts, number of images, noise, steps and guidance.
        folder: of the evaluations; those that it holds are kept.

    Raises:
        UserError: for a LoRA that cannot be read or does not fit, before anything is generated.
    """
    opened = [open_lora(source, alpha=lora_alpha) for source in loras]
    runtime = one_process(config, "several LoRAs are compared")
    specs = build_rewards(config, gpu=runtime.gpu)
    with closing(specs):
        held_out = held_out_prompts(config, specs)
        evaluator, opened = load_evaluator(config, runtime, specs, held_out, opened)
        prompts = evaluator.prompts
        specs = [spec for spec in specs if spec.asked_in("evaluation")]
        key = evaluation_key(config, specs, prompts)
        # The code of a reward without a version may have changed.
        versioned = all(getattr(spec.reward, "version", None) for spec in specs)
        evaluator = replace(evaluator, specs=specs, keep=SHOWN)
        entries = []
        with locked_folder(folder, "leaderboard"):
            for name, lora in _named(opened):
                content = key if lora is None else f"{key}\n{digest(lora_bytes(lora))}"
                file = folder / EVALUATIONS / f"{digest(content.encode())}.safetensors"
                saved = _saved(file) if versioned else None
                evaluation = saved or _evaluate(name, lora, evaluator, runtime, file)
                measures = _measures(evaluation, evaluator)
                entries.append(Entry(name=name, evaluation=evaluation, measures=measures))
    pairs = compare_pairs(entries, prompt_numbers(prompts))
    first = next(iter(entries[0].measures))
    return Comparison(
        entries=sorted(entries, key=lambda e: (math.isnan(e.mean(first)), -e.mean(first))),
        pairs=pairs,
        prompts=prompts,
        held_out=frozenset(spec.name for spec in specs if not spec.trained),
        title=config.pipeline.path,
    )


def compare_pairs(entries: Sequence[Entry], prompt: Tensor) -> list[PairContrast]:
    """Compare every measure of every pair of entries, with Holm's correction for all of them.

    prompt: (N,) long, the prompt of each image.
    """
    wanted = [
        (measure, first, second)
        for first, second in combinations(entries, 2)
        for measure in first.measures
        if measure in second.measures
        and bool((first.measures[measure] + second.measures[measure]).isfinite().any())
    ]
    resamples = resamples_for(len(wanted))
    contrasts = [
        paired_contrast(a.measures[m], b.measures[m], prompt, resamples=resamples)
        for m, a, b in wanted
    ]
    corrected = holm([contrast.p for contrast in contrasts])
    return [
        PairContrast(measure=m, first=a.name, second=b.name, contrast=contrast, corrected=p)
        for (m, a, b), contrast, p in zip(wanted, contrasts, corrected, strict=True)
    ]


# --- names and keys -------------------------------------------------------------------------------


def _named(loras: Sequence[LoRA]) -> list[tuple[str, LoRA | None]]:
    """Return the base and every LoRA as it was asked for, with different names."""
    named: dict[str, LoRA | None] = {BASE: None}
    for lora in loras:
        name = lora.name
        while name in named:
            name += "'"
        named[name] = lora
    return list(named.items())


# --- evaluations and their measures ---------------------------------------------------------------


def _saved(file: Path) -> Evaluation | None:
    """Return what an earlier call evaluated; None where the file is missing or damaged."""
    if not file.exists():
        return None
    try:
        return Evaluation.load(file)
    except DamagedFile as error:
        LOG.warning("%s: it is generated and scored again", error)
        return None


def _evaluate(
    name: str, lora: LoRA | None, evaluator: Evaluator, runtime: Runtime, file: Path
) -> Evaluation:
    """Evaluate the base or a LoRA; write the file."""
    pipeline = evaluator.backbone.pipeline
    if lora is not None:
        load_lora(pipeline, lora)
    try:
        evaluation = evaluator(evaluator.backbone.velocity, runtime, name)
    finally:
        if lora is not None:
            unload_lora(pipeline)
    evaluation.save(file)
    return evaluation


def _measures(evaluation: Evaluation, evaluator: Evaluator) -> dict[str, Tensor]:
    """Return the measures of an evaluation, the reward of training first where there is one."""
    rewards = {spec.name for spec in evaluator.specs}
    measures = {
        name: values
        for name, values in evaluation.measures().items()
        if name in rewards or bool(values.isfinite().any())
    }
    if any(spec.trained for spec in evaluator.specs):
        return {OVERALL: _overall(evaluator.specs, measures, evaluator.prompts)} | measures
    return measures


def _overall(
    specs: Sequence[RewardSpec], measures: Mapping[str, Tensor], prompts: Sequence[PromptRecord]
) -> Tensor:
    """Return the reward of training, (N,): the recipe's weighted sum."""
    scores = torch.stack([measures[spec.name] for spec in specs], 1)
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    applicable = torch.tensor([spec.applicable(texts, metadata) for spec in specs]).T
    result = RewardResult(
        scores=scores, valid=scores.isfinite(), applicable=applicable,
        names=tuple(spec.name for spec in specs),
    )  # fmt: skip
    return combine(specs, result)[0]
