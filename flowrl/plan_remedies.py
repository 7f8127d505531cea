"""What to change when a recipe does not fit, each change computed anew."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.recipe import merge, parse_overrides

Peak = Callable[[Config], int]  # bytes of the largest phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """changes: KEY=VALUE to type. costs: what one pays for it. peak: bytes with it."""

    changes: tuple[str, ...]
    costs: str
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """alone: every change by itself. best: the first of them that fits, else the fewest first ones
    that fit together, else None, and then least is the peak with all of them."""

    alone: tuple[Remedy, ...]
    best: Remedy | None
    least: int


def find_remedies(config: Config, peak: Peak, memory: int) -> Remedies:
    """memory: bytes of one GPU. What does not go with the rest of the recipe is left out."""
    alone: list[Remedy] = []
    for change, costs in _changes(config):
        if (other := _changed(config, [change])) is not None:
            alone.append(Remedy(changes=(change,), costs=costs, peak=peak(other)))
    fitting = next((remedy for remedy in alone if remedy.peak <= memory), None)
    if fitting is not None:
        return Remedies(alone=tuple(alone), best=fitting, least=min(r.peak for r in alone))
    best, least = _together(config, peak, memory, alone)
    return Remedies(alone=tuple(alone), best=best, least=least)


def _together(
    config: Config, peak: Peak, memory: int, alone: Sequence[Remedy]
) -> tuple[Remedy | None, int]:
    """Adds one after the other until it fits, then takes back what was not needed."""
    words: list[str] = []
    least = peak(config)
    for remedy in alone:
        attempt = [*(w for w in words if _key(w) != _key(remedy.changes[0])), *remedy.changes]
        other = _changed(config, attempt)
        if other is None or (found := peak(other)) >= least:
            continue
        words, least = attempt, found
        if least <= memory:
            break
    else:
        return None, least
    for word in list(words):
        fewer = [w for w in words if w != word]
        other = _changed(config, fewer)
        if other is not None and (found := peak(other)) <= memory:
            words, least = fewer, found
    return Remedy(changes=tuple(words), costs="", peak=least), least


def _changes(config: Config) -> Iterator[tuple[str, str]]:
    """What can be changed, from what costs least, with what it costs. Pictures stay the same; only
    fewer bits change the policy's numbers."""
    m, r, p, e = config.memory, config.rollout, config.pipeline, config.evaluation
    if not m.gradient_checkpointing:
        yield "memory.gradient_checkpointing=true", "a third more time in training"
    for size in _halves(config.optim.micro_batch):
        yield f"optim.micro_batch={size}", "smaller products"
    for size in _halves(r.batch_size):
        yield f"rollout.batch_size={size}", "smaller products"
    if e.prompts is not None:
        for size in _halves(e.batch_size):
            yield f"evaluation.batch_size={size}", "smaller products"
    for size in _halves(p.decode_batch):
        yield f"pipeline.decode_batch={size}", "smaller products"
    if m.text_encoders == "keep":
        yield "memory.text_encoders=offload", "they travel each iteration"
    if m.text_encoders != "free":
        yield "memory.text_encoders=free", "all prompts are encoded at the start"
    if m.vae == "keep":
        yield "memory.vae=offload", "it travels each iteration"
    if p.dtype == "fp32":
        yield "pipeline.dtype=bf16", "less exact arithmetic"
    for bits in (8, 4):
        if m.base_bits is None or m.base_bits > bits:
            yield f"memory.base_bits={bits}", "slower products, rounded weights"


def _halves(size: int) -> Iterator[int]:
    """A quarter, and 1: in between changes little, and takes long to plan."""
    yield from dict.fromkeys(n for n in (size // 4, 1) if 0 < n < size)


def _changed(config: Config, words: Sequence[str]) -> Config | None:
    """The recipe with changes; None where the rest of it does not allow them."""
    try:
        return parse_config(merge(config.model_dump(mode="json"), parse_overrides(words)))
    except UserError:
        return None


def _key(word: str) -> str:
    return word.partition("=")[0]
