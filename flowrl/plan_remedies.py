"""What to change when a recipe does not fit, each change computed anew."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.planning.memory import Footprint
from flowrl.recipe import merge, parse_overrides

Peak = Callable[[Config], Footprint]  # the phase that needs most
GAIN = 0.99  # a change that leaves more than this share of a peak is none
DRAWN = ("rollout", "decode", "rewards")
TRAVELS = "it travels to the GPU and back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """word: KEY=VALUE to type. costs: what one pays for it. phases: that it touches; () for all."""

    word: str
    costs: str
    phases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.word.partition("=")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """changes: KEY=VALUE to type. costs: what one pays for it. peak: bytes with it."""

    changes: tuple[str, ...]
    costs: str
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """alone: every change of what needs most, by itself. best: the first of them that fits, else
    several that fit together, else None, and then least is the peak with all that helped."""

    alone: tuple[Remedy, ...]
    best: Remedy | None
    least: int


def find_remedies(config: Config, peak: Peak, memory: int) -> Remedies:
    """memory: bytes of one GPU. What does not go with the rest of the recipe is left out."""
    alone = []
    for change in _touching(config, peak(config).phase):
        if (other := _changed(config, [change.word])) is not None:
            remedy = Remedy(changes=(change.word,), costs=change.costs, peak=peak(other).total)
            alone.append(remedy)
    fitting = next((remedy for remedy in alone if remedy.peak <= memory), None)
    if fitting is not None:
        return Remedies(alone=tuple(alone), best=fitting, least=fitting.peak)
    words, least = _together(config, peak, memory)
    best = Remedy(changes=tuple(words), costs="", peak=least) if least <= memory else None
    return Remedies(alone=tuple(alone), best=best, least=least)


def _together(config: Config, peak: Peak, memory: int) -> tuple[list[str], int]:
    """One change after the other of what needs most then, until it fits or none helps."""
    words: list[str] = []
    now, found = config, peak(config)
    while found.total > memory:
        for change in _touching(now, found.phase):
            attempt = [*(w for w in words if not w.startswith(f"{change.key}=")), change.word]
            other = _changed(config, attempt)
            if other is not None and peak(other).total <= GAIN * found.total:
                words, now, found = attempt, other, peak(other)
                break
        else:
            break
    return words, found.total


def _touching(config: Config, phase: str) -> list[Change]:
    return [c for c in _changes(config) if phase in c.phases or not c.phases]


def _changes(config: Config) -> Iterator[Change]:
    """What can be changed, from what costs least. Pictures stay the same; only fewer bits change
    the policy's numbers."""
    m, p, e = config.memory, config.pipeline, config.evaluation
    if not m.gradient_checkpointing:
        yield Change(
            word="memory.gradient_checkpointing=true",
            costs="a third more time in training",
            phases=("training",),
        )
    sizes = [
        ("optim.micro_batch", config.optim.micro_batch, ("training",)),
        ("rollout.batch_size", config.rollout.batch_size, DRAWN),
        ("evaluation.batch_size", e.batch_size, ("evaluation",)),
        ("pipeline.decode_batch", p.decode_batch, ("decode", "evaluation")),
    ]
    for key, size, phases in sizes:
        for less in dict.fromkeys(n for n in (size // 4, 1) if 0 < n < size):
            yield Change(word=f"{key}={less}", costs="smaller products", phases=phases)
    if m.text_encoders == "keep":
        yield Change(word="memory.text_encoders=offload", costs=TRAVELS)
        yield Change(word="memory.text_encoders=free", costs="all prompts are encoded at first")
    if m.vae == "keep":
        yield Change(word="memory.vae=offload", costs=TRAVELS)
    if p.dtype == "fp32":
        yield Change(word="pipeline.dtype=bf16", costs="less exact arithmetic")
    for bits in (8, 4):
        if m.base_bits is None or m.base_bits > bits:
            costs = "slower products with rounded weights"
            yield Change(word=f"memory.base_bits={bits}", costs=costs)


def _changed(config: Config, words: Sequence[str]) -> Config | None:
    """The recipe with changes; None where the rest of it does not allow them."""
    try:
        return parse_config(merge(config.model_dump(mode="json"), parse_overrides(words)))
    except UserError:
        return None
