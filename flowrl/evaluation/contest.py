"""`flowrl evaluate --lora A --lora B`: base and LoRAs on the same prompts and noises.

Images and scores are kept in the output folder under what determines them, so that an interrupted
call goes on where it was, and the base is drawn once for any number of later LoRAs.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from flowrl.assembly.learner import (
    ProvidedObjects,
    build_evaluated_pipeline,
    build_evaluator,
    build_rewards,
    check_evaluation_alone,
    check_unseen,
    evaluation_key,
    evaluation_prompts,
)
from flowrl.backbones.lora_files import load_lora
from flowrl.backbones.lora_formats import LoRA, check_fits, open_lora
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.evaluation.benchmark import kind_of
from flowrl.evaluation.drawing import digest
from flowrl.functional.contrasts import Contrast, holm, paired_contrast, resamples_for
from flowrl.prompts.records import PromptRecord, PromptSampler, reworded
from flowrl.sampling.rollout import RolloutRequest
from flowrl.scoring.combine import combine
from flowrl.scoring.files import ImageFile, score_files
from flowrl.scoring.spec import RewardResult, RewardSpec, closing
from flowrl.training.evaluate import NO_ITERATION, Evaluator
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import locked_folder, write_bytes
from flowrl.utils.images import png, to_pil, to_tensor
from flowrl.utils.journal import append_line, read_lines
from flowrl.utils.progress import Steps

BASE, OVERALL, DIVERSITY = "base", "overall", "diversity"
GAP = "paraphrase_gap/"
DRAWN, WORDED = "drawn", "reworded"
COMMON = (
    "lora",
    "checkpoints",
    "checkpoint-",
    "step-",
    "pytorch_lora_weights",
    "adapter_model",
)  # names
CHUNK = 24  # images whose scores are kept at once
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """The base or a LoRA, and what was measured of its N images."""

    name: str
    source: str  # as it was given
    key: str  # of everything that decides its images
    folder: Path  # of its images
    measures: Mapping[str, Tensor]  # by name, (N,) fp32, NaN where missing or not applicable
    missing: Sequence[str]  # why scores are missing

    def mean(self, measure: str) -> float:
        return self.measures[measure].nanmean().item()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairContrast:
    """One measure of two contestants."""

    measure: str
    first: str
    second: str
    contrast: Contrast  # second minus first
    corrected: float  # p after Holm's correction for all comparisons of the contest

    @property
    def differs(self) -> bool:
        return self.corrected < SIGNIFICANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Everything that was measured."""

    contestants: Sequence[Contestant]  # the best overall first
    pairs: Sequence[PairContrast]
    prompts: Sequence[PromptRecord]  # N, of the images in their order
    number: Sequence[int]  # N, each image's number among those of its prompt
    held_out: frozenset[str]  # rewards that are not trained on
    title: str

    def images(self, contestant: Contestant) -> list[Path]:
        return _paths(contestant.folder, len(self.prompts))

    def kinds(self) -> dict[str, Tensor]:
        """Return the images of each kind of prompt, as rows; {} where there is one kind."""
        found: dict[str, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            found.setdefault(kind_of(prompt.metadata), []).append(row)
        return {k: torch.tensor(v) for k, v in sorted(found.items())} if len(found) > 1 else {}


def hold_contest(
    config: Config,
    loras: Sequence[str],
    folder: Path,
    *,
    per_prompt: int = 2,
    lora_alpha: float | None = None,
) -> Contest:
    """Draw and score the base and every LoRA; compare all pairs.

    Args:
        config: its `evaluation` says prompts, number of images, noise, steps and guidance.
        folder: of images and scores; those that it holds are kept.
        per_prompt: images of each prompt; diversity needs two.

    Raises:
        UserError: for a LoRA that cannot be read or does not fit, before anything is drawn.
    """
    opened = [open_lora(source, alpha=lora_alpha) for source in loras]
    runtime = Runtime(device=config.pipeline.device)
    specs = build_rewards(config, gpu=runtime.gpu)
    held_out = evaluation_prompts(config, ProvidedObjects())
    if not held_out:
        raise UserError("evaluation.prompts is null, expected held-out prompts to evaluate on")
    if runtime.world_size > 1:
        raise UserError("several LoRAs are compared by one process: start this without a launcher")
    check_evaluation_alone(config, specs, held_out)
    check_unseen(config, held_out)
    with closing(specs):
        pipeline, texts = build_evaluated_pipeline(config, runtime, held_out)
        for lora in opened:
            check_fits(lora, pipeline.transformer)
        evaluator = build_evaluator(config, pipeline, specs, ProvidedObjects(), texts)
        assert evaluator is not None  # there are prompts
        if evaluator.at_steps:
            raise UserError(
                "evaluation.num_inference_steps lists several numbers, and a leaderboard is made "
                "at one: name it, as in evaluation.num_inference_steps=28"
            )
        asked = [spec for spec in specs if spec.asked_in("evaluation")]
        prompts = _repeated(config, held_out, per_prompt)
        evaluator = replace(evaluator, prompts=prompts, specs=asked)
        key = evaluation_key(config, (), evaluator.prompts)
        entries = _entries(opened, key)
        with locked_folder(folder, "leaderboard"):
            found = [
                _measured(name, lora, lora_key, evaluator, runtime, folder)
                for name, lora, lora_key in entries
            ]
    return _judged(found, evaluator, config.pipeline.path)


def _repeated(
    config: Config, prompts: Sequence[PromptRecord], per_prompt: int
) -> list[PromptRecord]:
    """Return the prompt of each image: `evaluation.num_images` of them, the same ones together."""
    e = config.evaluation
    count = max(1, e.num_images // per_prompt)
    chosen = PromptSampler(prompts, count, e.seed, balance=e.balance).at(0)
    return [prompt for prompt in chosen for _ in range(per_prompt)]


def _entries(loras: Sequence[LoRA], key: str) -> list[tuple[str, LoRA | None, str]]:
    """Return name, LoRA and key of the base and each LoRA; equal LoRAs have keys of their own, so
    that each is drawn."""
    entries: list[tuple[str, LoRA | None, str]] = [(BASE, None, key)]
    taken = {BASE}
    for lora in loras:
        name = short_name(lora.name)
        while name in taken:
            name += "'"
        taken.add(name)
        copies = sum(other is not None and digest(other) == digest(lora) for _, other, _ in entries)
        own = f"{key} {digest(lora)} {copies}"
        entries.append((name, lora, blake2b(own.encode(), digest_size=16).hexdigest()))
    return entries


def short_name(source: str) -> str:
    """Return what a page calls a LoRA: its last folders, until one of them tells it apart."""
    parts = Path(source.removesuffix(".safetensors")).parts or (source,)
    kept = 1
    while kept < len(parts) and parts[-kept].startswith(COMMON):
        kept += 1
    return "/".join(parts[-kept:])


# --- images ---------------------------------------------------------------------------------------


def _measured(
    name: str,
    lora: LoRA | None,
    key: str,
    evaluator: Evaluator,
    runtime: Runtime,
    root: Path,
) -> Contestant:
    """Draw what is not there yet, and score it."""
    folder = root / DRAWN / key
    request = evaluator.request()
    worded = _worded(evaluator, request) if evaluator.paraphrases else None
    pipeline = evaluator.backbone.pipeline
    wanted = [*_paths(folder, len(request.prompt))]
    if worded is not None:
        wanted += [_paths(folder / WORDED, len(request.prompt))[r] for r in worded[1]]
    if not all(path.is_file() for path in wanted):
        if lora is not None:
            load_lora(pipeline, lora)
        try:
            _draw(name, evaluator, runtime, request, range(len(request.prompt)), folder)
            if worded is not None:
                _draw(name, evaluator, runtime, worded[0], worded[1], folder / WORDED)
        finally:
            if lora is not None:
                pipeline.unload_lora_weights()
    measures, missing = _scored(name, folder, evaluator, worded and worded[1])
    return Contestant(
        name=name, source=lora.name if lora else evaluator.key, key=key, folder=folder,
        measures=measures, missing=missing,
    )  # fmt: skip


def _worded(evaluator: Evaluator, request: RolloutRequest) -> tuple[RolloutRequest, list[int]]:
    """Return the request in the words of paraphrases, and the rows that have one."""
    rows = [i for i, p in enumerate(evaluator.prompts) if p.paraphrases]
    words = [
        reworded(p, turn, seed=evaluator.seed, iteration=NO_ITERATION) if p.paraphrases else p
        for p, turn in zip(evaluator.prompts, request.root.tolist(), strict=True)
    ]
    return replace(request, prompts=words), rows


@torch.no_grad()
def _draw(
    name: str,
    evaluator: Evaluator,
    runtime: Runtime,
    request: RolloutRequest,
    rows: Sequence[int],
    folder: Path,
) -> None:
    """Draw the batches that lack an image; batches are the same however often this is stopped."""
    paths = _paths(folder, len(request.prompt))
    backbone, size = evaluator.backbone, evaluator.batch_size
    batches = [list(rows)[i : i + size] for i in range(0, len(rows), size)]
    missing = [b for b in batches if not all(paths[row].is_file() for row in b)]
    with Steps(f"drawing {name}", len(batches), start=len(batches) - len(missing)) as steps:
        for batch in missing:
            part = request.take(torch.tensor(batch))
            with runtime.autocast():
                images = torch.cat(list(evaluator.images(backbone.velocity, part)))
            for row, image in zip(batch, to_pil(images), strict=True):
                if not paths[row].is_file():
                    write_bytes(paths[row], png(image))
            steps.advance()


def _paths(folder: Path, count: int) -> list[Path]:
    return [folder / f"{row:05d}.png" for row in range(count)]


# --- scores ---------------------------------------------------------------------------------------


def _scored(
    name: str, folder: Path, evaluator: Evaluator, worded: Sequence[int] | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return all measures of a contestant's images, and why scores are missing."""
    prompts, specs = evaluator.prompts, evaluator.specs
    rows = range(len(prompts))
    columns, missing = _columns(name, folder, evaluator, rows)
    measures: dict[str, Tensor] = {}
    if any(spec.trained for spec in specs):
        measures[OVERALL] = _overall(specs, columns, prompts)
    measures |= columns
    if len({p.uid for p in prompts}) < len(prompts):
        measures[DIVERSITY] = _diversity(folder, prompts)
    if worded is not None:
        others, more = _columns(name, folder / WORDED, evaluator, worded)
        missing += more
        gaps = {f"{GAP}{reward}": columns[reward] - its for reward, its in others.items()}
        measures |= {gap: values for gap, values in gaps.items() if values.isfinite().any()}
    return measures, missing


def _columns(
    name: str, folder: Path, evaluator: Evaluator, rows: Sequence[int]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the scores of each reward, (N,), NaN beside `rows`."""
    prompts, paths = evaluator.prompts, _paths(folder, len(evaluator.prompts))
    found, missing = {}, []
    for spec in evaluator.specs:
        cache = _cache(folder, spec)
        scores = _saved(cache)
        column = torch.full((len(prompts),), math.nan)
        for part in _chunks(rows, prompts):
            if any(row not in scores for row in part):
                files = [
                    ImageFile(path=paths[r], prompt=prompts[r].text, metadata=prompts[r].metadata)
                    for r in part
                ]
                scored = score_files([spec], files)
                missing += [f"{name}: {line}" for line in scored.missing]
                values = [row[spec.name] for row in scored.rows]
                new = {r: v for r, v in zip(part, values, strict=True) if math.isfinite(v)}
                scores |= new
                if cache is not None and new:
                    append_line(cache, {"scores": new})
            for row in part:
                column[row] = scores.get(row, math.nan)
        found[spec.name] = column
    return found, missing


def _cache(folder: Path, spec: RewardSpec) -> Path | None:
    """Return where scores are kept; None for a reward without a version, whose code may change."""
    version = getattr(spec.reward, "version", None)
    if not version:
        return None
    text = json.dumps([spec.name, version])
    return folder / f"scores-{blake2b(text.encode(), digest_size=8).hexdigest()}.jsonl"


def _saved(cache: Path | None) -> dict[int, float]:
    """Return the saved scores by row; those of a damaged line are missing, and computed again."""
    if cache is None:
        return {}
    lines = read_lines(cache)
    lines.warn(cache)
    return {int(row): value for line in lines.entries for row, value in line["scores"].items()}


def _chunks(rows: Sequence[int], prompts: Sequence[PromptRecord]) -> Iterator[list[int]]:
    """Yield about CHUNK rows at a time, never a prompt's images apart."""
    part: list[int] = []
    for row in rows:
        if len(part) >= CHUNK and prompts[row].uid != prompts[part[-1]].uid:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _overall(
    specs: Sequence[RewardSpec], columns: Mapping[str, Tensor], prompts: Sequence[PromptRecord]
) -> Tensor:
    """Return what training would reward, (N,): the recipe's weighted sum."""
    scores = torch.stack([columns[spec.name] for spec in specs], 1)
    applicable = torch.tensor([[s.applies(p.text, p.metadata) for s in specs] for p in prompts])
    result = RewardResult(
        scores=scores, valid=scores.isfinite(), applicable=applicable,
        names=tuple(spec.name for spec in specs),
    )  # fmt: skip
    reward, valid, _ = combine(specs, result, _prompt_numbers(prompts))
    return torch.where(valid, reward, math.nan)


def _diversity(folder: Path, prompts: Sequence[PromptRecord]) -> Tensor:
    """Return each image's mean absolute difference to the others of its prompt, in [0, 1]: (N,)."""
    number, found = _prompt_numbers(prompts), torch.full((len(prompts),), math.nan)
    paths = _paths(folder, len(prompts))
    for prompt in number.unique():
        rows = (number == prompt).nonzero().squeeze(1)
        if len(rows) < 2:
            continue
        pixels = to_tensor([Image.open(paths[row]) for row in rows.tolist()]).flatten(1)
        apart = torch.cdist(pixels, pixels, p=1) / pixels.shape[1]
        found[rows] = apart.sum(1) / (len(rows) - 1)
    return found


def _prompt_numbers(prompts: Sequence[PromptRecord]) -> Tensor:
    places: dict[str, int] = {}
    return torch.tensor([places.setdefault(p.uid, len(places)) for p in prompts])


# --- the comparison -------------------------------------------------------------------------------


def _judged(found: Sequence[Contestant], evaluator: Evaluator, title: str) -> Contest:
    prompt = _prompt_numbers(evaluator.prompts)
    asked = [
        (measure, first, second)
        for first, second in combinations(found, 2)
        for measure in first.measures
        if measure in second.measures and _comparable(first, second, measure)
    ]
    resamples = resamples_for(len(asked))
    raw = []
    for m, a, b in asked:
        change = paired_contrast(a.measures[m], b.measures[m], prompt, resamples=resamples)
        raw.append((m, a.name, b.name, change))
    corrected = holm([change.p for *_, change in raw])
    pairs = [
        PairContrast(measure=m, first=a, second=b, contrast=c, corrected=p)
        for (m, a, b, c), p in zip(raw, corrected, strict=True)
    ]
    first = next(iter(found[0].measures))
    order = sorted(found, key=lambda c: -_sortable(c.mean(first)))
    return Contest(
        contestants=order,
        pairs=pairs,
        prompts=evaluator.prompts,
        number=evaluator.request().root.tolist(),
        held_out=frozenset(spec.name for spec in evaluator.specs if not spec.trained),
        title=title,
    )


def _comparable(first: Contestant, second: Contestant, measure: str) -> bool:
    a, b = first.measures[measure], second.measures[measure]
    return bool((a.isfinite() & b.isfinite()).any())


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
