"""Compare base and LoRAs on the same prompts and noise: the evaluator in a loop.

    drawn/<key>/00000.png                images of the base or of a LoRA
    drawn/<key>/part-00000.safetensors   measures of 48 of them, and the digests of their files

The key identifies everything that decides images and scores, so a part that is complete and intact
is never made again: an interrupted call resumes, and later LoRAs meet the base as it is.
"""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.assembly.learner import build_rewards, evaluation_key
from flowrl.backbones.lora_files import load_lora, unload_lora
from flowrl.backbones.lora_formats import LoRA, open_lora
from flowrl.config import Config
from flowrl.errors import DamagedFile, UserError
from flowrl.evaluation.benchmark import kind_of
from flowrl.evaluation.drawing import lora_digest
from flowrl.evaluation.loading import held_out_prompts, load_evaluator, one_process
from flowrl.functional.contrasts import Contrast, holm, paired_contrast, resamples_for
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.scoring.combine import combine
from flowrl.scoring.spec import RewardResult, RewardSpec, closing
from flowrl.training.evaluate import Evaluation, Evaluator, prompt_numbers
from flowrl.utils.digests import digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state, locked_folder, save_state, write_bytes
from flowrl.utils.images import png, to_pil
from flowrl.utils.untrusted import read_bytes

LOG = logging.getLogger(__name__)
BASE, OVERALL, DIVERSITY = "base", "overall", "diversity"
DRAWN = "drawn"
PART = 48  # images of a part, rounded down to whole prompts
SIGNIFICANT = 0.05
# Names of files and folders that say nothing of a LoRA.
COMMON = ("lora", "checkpoints", "checkpoint-", "step-", "pytorch_lora_weights", "adapter_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The base or a LoRA, and the measures of its N images."""

    name: str
    folder: Path  # of its images
    measures: Mapping[str, Tensor]  # by name, (N,) fp32, NaN where missing or not applicable
    missing: Sequence[str]  # why scores are missing

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
    per_prompt: int  # images of a prompt, which are adjacent
    held_out: frozenset[str]  # rewards without a part in training
    title: str

    def images(self, entry: Entry) -> list[Path]:
        return [_image(entry.folder, row) for row in range(len(self.prompts))]

    def kinds(self) -> dict[str, Tensor]:
        """Return the rows of each kind of prompt; {} where there is one kind."""
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            rows.setdefault(kind_of(prompt.metadata), []).append(row)
        return {k: torch.tensor(v) for k, v in sorted(rows.items())} if len(rows) > 1 else {}


def compare_loras(
    config: Config,
    loras: Sequence[str],
    folder: Path,
    *,
    per_prompt: int = 2,
    lora_alpha: float | None = None,
) -> Comparison:
    """Evaluate the base and every LoRA; compare all pairs.

    Args:
        config: its `evaluation` has prompts, number of images, noise, steps and guidance.
        folder: of images and measures; complete parts that it holds are kept.
        per_prompt: images of each prompt; diversity needs two.

    Raises:
        UserError: for a LoRA that cannot be read or does not fit, before anything is generated.
    """
    opened = [open_lora(source, alpha=lora_alpha) for source in loras]
    runtime = one_process(config, "several LoRAs are compared")
    specs = build_rewards(config, gpu=runtime.gpu)
    with closing(specs):
        held_out = held_out_prompts(config, specs)
        evaluator, opened = load_evaluator(config, runtime, specs, held_out, opened)
        prompts = _prompts_of_images(config, held_out, per_prompt)
        specs = [spec for spec in specs if spec.asked_in("evaluation")]
        evaluator = replace(evaluator, prompts=prompts, specs=specs, keep=max(PART, per_prompt))
        key = _hex([evaluation_key(config, specs, prompts), *map(_source_of, specs)])
        with locked_folder(folder, "leaderboard"):
            entries = [
                _evaluate(
                    name, lora, evaluator, runtime, folder / DRAWN / _key_of(key, lora), per_prompt
                )
                for name, lora in _named(opened)
            ]
    pairs = compare_pairs(entries, prompt_numbers(prompts))
    first = next(iter(entries[0].measures))
    return Comparison(
        entries=sorted(entries, key=lambda entry: -_sortable(entry.mean(first))),
        pairs=pairs,
        prompts=prompts,
        per_prompt=per_prompt,
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


def short_name(source: str) -> str:
    """Return a LoRA's name on a page: its last folders, from one with a name of its own on."""
    parts = Path(source.removesuffix(".safetensors")).parts or (source,)
    count = 1
    while count < len(parts) and parts[-count].startswith(COMMON):
        count += 1
    return "/".join(parts[-count:])


# --- prompts, names and keys ----------------------------------------------------------------------


def _prompts_of_images(
    config: Config, prompts: Sequence[PromptRecord], per_prompt: int
) -> list[PromptRecord]:
    """Return the prompt of each image: at most evaluation.num_images, equal ones adjacent."""
    e = config.evaluation
    count = min(max(1, e.num_images // per_prompt), len(prompts))
    chosen = PromptSampler(prompts, count, e.seed, balance=e.balance).at(0)
    unique = {prompt.uid: prompt for prompt in chosen}.values()  # a small kind may repeat
    return [prompt for prompt in unique for _ in range(per_prompt)]


def _named(loras: Sequence[LoRA]) -> list[tuple[str, LoRA | None]]:
    """Return the base and every LoRA with different names."""
    named: dict[str, LoRA | None] = {BASE: None}
    for lora in loras:
        name = short_name(lora.name)
        while name in named:
            name += "'"
        named[name] = lora
    return list(named.items())


def _key_of(key: str, lora: LoRA | None) -> str:
    return key if lora is None else _hex([key, lora_digest(lora)])


def _hex(parts: Sequence[str]) -> str:
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _source_of(spec: RewardSpec) -> str:
    """Return the digest of the code of a reward without a version: it may change between calls."""
    reward: Any = spec.reward
    if getattr(reward, "version", None):
        return ""
    try:
        file = inspect.getsourcefile(reward if inspect.isroutine(reward) else type(reward))
        return digest(Path(str(file)).read_bytes())
    except (OSError, TypeError):
        return ""


# --- images and measures --------------------------------------------------------------------------


def _evaluate(
    name: str,
    lora: LoRA | None,
    evaluator: Evaluator,
    runtime: Runtime,
    folder: Path,
    per_prompt: int,
) -> Entry:
    """Evaluate the parts that are missing or damaged; return the measures of all."""
    prompts, pipeline = evaluator.prompts, evaluator.backbone.pipeline
    size = max(1, PART // per_prompt) * per_prompt
    parts = {start: _saved_part(folder, start) for start in range(0, len(prompts), size)}
    missing = [start for start, part in parts.items() if part is None]
    if missing and lora is not None:
        load_lora(pipeline, lora)
    try:
        for start in missing:
            title = f"evaluating {name}, images {start} to {min(start + size, len(prompts)) - 1}"
            part = replace(evaluator, prompts=prompts[start : start + size], title=title)
            evaluation = part(evaluator.backbone.velocity, runtime)
            parts[start] = _save_part(folder, start, evaluation, evaluator.quality, per_prompt)
    finally:
        if missing and lora is not None:
            unload_lora(pipeline)
    states = [part for part in parts.values() if part is not None]
    measures = {
        measure: torch.cat([state["measures"][measure] for state in states])
        for measure in states[0]["measures"]
    }
    rewards = [spec.name for spec in evaluator.specs]
    measures = {m: v for m, v in measures.items() if m in rewards or v.isfinite().any()}
    if any(spec.trained for spec in evaluator.specs):
        measures = {OVERALL: _overall(evaluator.specs, measures, prompts)} | measures
    errors = dict.fromkeys(f"{name}: {error}" for state in states for error in state["errors"])
    return Entry(name=name, folder=folder, measures=measures, missing=list(errors))


def _save_part(
    folder: Path, start: int, evaluation: Evaluation, quality: str | None, per_prompt: int
) -> dict[str, Any]:
    """Write the images of a part, then its measures, which make it complete."""
    files = [png(image) for image in to_pil(evaluation.images.float() / 255)]
    for row, data in enumerate(files, start):
        write_bytes(_image(folder, row), data)
    measures = evaluation.measures(quality)
    if per_prompt > 1:
        measures[DIVERSITY] = _diversity(evaluation.images, per_prompt)
    state = {
        "measures": measures,
        "errors": list(evaluation.errors),
        "images": [digest(data) for data in files],
    }
    save_state(_part(folder, start), state)
    return state


def _saved_part(folder: Path, start: int) -> dict[str, Any] | None:
    """Return what a part's file holds; None where it or one of its images is missing or damaged."""
    path = _part(folder, start)
    try:
        state = load_state(path)
        for row, wanted in enumerate(state["images"], start):
            if digest(read_bytes(_image(folder, row), inside=folder, limit=None)) != wanted:
                raise DamagedFile(f"{_image(folder, row)} is damaged")
    except FileNotFoundError:
        return None
    except UserError as error:  # damaged, or no file at all
        LOG.warning("%s: its part is generated and scored again", error)
        return None
    return state


def _part(folder: Path, start: int) -> Path:
    return folder / f"part-{start:05d}.safetensors"


def _image(folder: Path, row: int) -> Path:
    return folder / f"{row:05d}.png"


def _overall(
    specs: Sequence[RewardSpec], measures: Mapping[str, Tensor], prompts: Sequence[PromptRecord]
) -> Tensor:
    """Return the reward of training, (N,): the recipe's weighted sum."""
    scores = torch.stack([measures[spec.name] for spec in specs], 1)
    applicable = torch.tensor([[s.applies(p.text, p.metadata) for s in specs] for p in prompts])
    result = RewardResult(
        scores=scores, valid=scores.isfinite(), applicable=applicable,
        names=tuple(spec.name for spec in specs),
    )  # fmt: skip
    reward, valid, _ = combine(specs, result, prompt_numbers(prompts))
    return torch.where(valid, reward, math.nan)


def _diversity(images: Tensor, per_prompt: int) -> Tensor:
    """Return each image's mean absolute difference to the others of its prompt, in [0, 1].

    images: (N, 3, H, W) uint8, the `per_prompt` of a prompt adjacent -> (N,).
    """
    pixels = images.flatten(1).float().unflatten(0, (-1, per_prompt)) / 255
    difference = torch.cdist(pixels, pixels, p=1) / pixels.shape[2]
    return (difference.sum(2) / (per_prompt - 1)).flatten()


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
