"""What to change when a recipe does not fit; each change is planned anew."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrl.config import Config, parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.errors import UserError
from flowrl.planning.memory import Footprint

Peak = Callable[[Config], Footprint]  # the phase that needs most
GAIN = 0.99  # a change must lower a peak at least to this share
SAMPLING = ("rollout", "decode", "rewards")  # phases
BATCHES = ("optim.micro_batch", "rollout.batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of options, and what comes of it."""

    changes: tuple[str, ...]  # KEY=VALUE to type, all together
    costs: str  # what one pays for it
    peak: int  # bytes with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """Ways to make a recipe fit."""

    alone: tuple[Remedy, ...]  # every change that lowers the peak by itself
    best: Remedy | None  # the first of them that fits, else several that fit together
    least: int  # bytes of the peak with `best`, or with all that helped


def find_remedies(config: Config, peak: Peak, memory: int) -> Remedies:
    """Find changes that fit a recipe to `memory` bytes, of those that the recipe allows."""
    now, alone = peak(config), []
    for words, costs in _touching(config, now.phase):
        if (changed := _changed(config, words)) is None:
            continue
        if (then := peak(changed).total) <= GAIN * now.total:
            alone.append(Remedy(changes=words, costs=costs, peak=then))
    fitting = next((remedy for remedy in alone if remedy.peak <= memory), None)
    if fitting is not None:
        return Remedies(alone=tuple(alone), best=fitting, least=fitting.peak)
    words, least = _combine(config, peak, memory, now)
    best = Remedy(changes=tuple(words), costs="", peak=least) if least <= memory else None
    return Remedies(alone=tuple(alone), best=best, least=least)


def _combine(config: Config, peak: Peak, memory: int, found: Footprint) -> tuple[list[str], int]:
    """Add changes of the phase that needs most then, until it fits or none helps."""
    words: list[str] = []
    now = config
    while found.total > memory:
        for change, _ in _touching(now, found.phase):
            keys = {word.partition("=")[0] for word in change}
            attempt = [word for word in words if word.partition("=")[0] not in keys] + [*change]
            if (changed := _changed(config, attempt)) is None:
                continue
            if (then := peak(changed)).total <= GAIN * found.total:
                words, now, found = attempt, changed, then
                break
        else:
            break
    return words, found.total


def _touching(config: Config, phase: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the changes that lower a phase, from what costs least: (KEY=VALUE to type, costs).

    Images stay the same; only fewer bits change the policy's numbers.
    """
    m, p = config.memory, config.pipeline
    if not m.gradient_checkpointing and phase == "training":
        yield ("memory.gradient_checkpointing=true",), "one more forward for each backward pass"
    for keys, size, phases in _batch_sizes(config):
        for less in dict.fromkeys(n for n in (size // 4, 1) if 0 < n < size and phase in phases):
            yield tuple(f"{key}={less}" for key in keys), "smaller products"
    if m.text_encoders == "keep":
        yield ("memory.text_encoders=offload",), "all prompts are encoded at first"
        yield ("memory.text_encoders=free",), "the same, and no others can be later"
    if m.vae == "keep":
        yield ("memory.vae=offload",), "it travels to the GPU and back"
    if not m.vae_tiling and phase in ("decode", "evaluation"):
        yield ("memory.vae_tiling=true",), "slightly other images, above 512 pixels a side"
    if p.dtype == "fp32":
        sizes = {config.optim.micro_batch, config.rollout.batch_size}
        equal = len(sizes) > 1 and _compares_likelihoods(config)
        words = tuple(f"{key}={min(sizes)}" for key in BATCHES) if equal else ()
        yield ("pipeline.dtype=bf16", *words), "less exact arithmetic"
    for bits in (8, 4):
        if m.base_bits is None or m.base_bits > bits:
            yield (f"memory.base_bits={bits}",), "slower products with rounded weights"


def _batch_sizes(config: Config) -> list[tuple[tuple[str, ...], int, tuple[str, ...]]]:
    """Return (options, their value, phases that they touch)."""
    micro, batch = config.optim.micro_batch, config.rollout.batch_size
    sizes = [
        (("optim.micro_batch",), micro, ("training",)),
        (("rollout.batch_size",), batch, SAMPLING),
        (("evaluation.batch_size",), config.evaluation.batch_size, ("evaluation",)),
        (("pipeline.decode_batch",), config.pipeline.decode_batch, ("decode", "evaluation")),
    ]
    if config.pipeline.dtype != "fp32" and _compares_likelihoods(config):
        sizes[:2] = [(BATCHES, min(micro, batch), ("training", *SAMPLING))]
    return sizes


def _compares_likelihoods(config: Config) -> bool:
    """Return whether likelihoods are compared with the rollout's.

    In 16 bits that takes equal shapes of batches: see optim.ratio_tolerance.
    """
    return config.objective.build(config.rollout.kernel).needs.ratio


def _changed(config: Config, words: Sequence[str]) -> Config | None:
    """Return the recipe with changes; None where the rest of it does not allow them."""
    try:
        return parse_config(merge(config.model_dump(mode="json"), parse_overrides(words)))
    except UserError:
        return None
