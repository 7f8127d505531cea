"""What to change when a recipe does not fit, each change computed anew."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrl.build.objective import build_objective
from flowrl.config import Config, parse_config
from flowrl.config.load import merge, parse_overrides
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.planning.memory import Footprint

Peak = Callable[[Config], Footprint]  # the phase that needs most
GAIN = 0.99  # a change that leaves more than this share of a peak is none
DRAWN = ("rollout", "decode", "rewards")
SHAPES = ("optim.micro_batch", "rollout.batch_size")
TRAVELS = "it travels to the GPU and back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """words: KEY=VALUE to type, all together. costs: what one pays for it. phases: that it
    touches; () for all."""

    words: tuple[str, ...]
    costs: str
    phases: tuple[str, ...] = ()

    def over(self, words: Sequence[str]) -> list[str]:
        """Beside those of changes before, as far as it does not set the same."""
        own = {_key(word) for word in self.words}
        return [*(word for word in words if _key(word) not in own), *self.words]


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
    now, alone = peak(config), []
    for change in _touching(config, now.phase):
        if (other := _changed(config, change.words)) is not None:
            remedy = Remedy(changes=change.words, costs=change.costs, peak=peak(other).total)
            alone.append(remedy)
    fitting = next((remedy for remedy in alone if remedy.peak <= memory), None)
    if fitting is not None:
        return Remedies(alone=tuple(alone), best=fitting, least=fitting.peak)
    words, least = _together(config, peak, memory, now)
    best = Remedy(changes=tuple(words), costs="", peak=least) if least <= memory else None
    return Remedies(alone=tuple(alone), best=best, least=least)


def _together(config: Config, peak: Peak, memory: int, found: Footprint) -> tuple[list[str], int]:
    """One change after the other of what needs most then, until it fits or none helps."""
    words: list[str] = []
    now = config
    while found.total > memory:
        for change in _touching(now, found.phase):
            attempt = change.over(words)
            if (other := _changed(config, attempt)) is None:
                continue
            if (then := peak(other)).total <= GAIN * found.total:
                words, now, found = attempt, other, then
                break
        else:
            break
    return words, found.total


def _touching(config: Config, phase: str) -> list[Change]:
    return [c for c in _changes(config) if phase in c.phases or not c.phases]


def _changes(config: Config) -> Iterator[Change]:
    """What can be changed, from what costs least. Images stay the same; only fewer bits change
    the policy's numbers."""
    m, p = config.memory, config.pipeline
    if not m.gradient_checkpointing:
        yield Change(
            words=("memory.gradient_checkpointing=true",),
            costs="one more forward for each backward pass",
            phases=("training",),
        )
    yield from _smaller(config)
    if m.text_encoders == "keep":
        yield Change(words=("memory.text_encoders=offload",), costs=TRAVELS)
        costs = "all prompts are encoded at first"
        yield Change(words=("memory.text_encoders=free",), costs=costs)
    if m.vae == "keep":
        yield Change(words=("memory.vae=offload",), costs=TRAVELS)
    if p.dtype == "fp32":
        yield Change(words=("pipeline.dtype=bf16", *_equal(config)), costs="less exact arithmetic")
    for bits in (8, 4):
        if m.base_bits is None or m.base_bits > bits:
            costs = "slower products with rounded weights"
            yield Change(words=(f"memory.base_bits={bits}",), costs=costs)


def _smaller(config: Config) -> Iterator[Change]:
    """Fewer rows at once."""
    learned, drawn = config.optim.micro_batch, config.rollout.batch_size
    sizes = [
        (("optim.micro_batch",), learned, ("training",)),
        (("rollout.batch_size",), drawn, DRAWN),
        (("evaluation.batch_size",), config.evaluation.batch_size, ("evaluation",)),
        (("pipeline.decode_batch",), config.pipeline.decode_batch, ("decode", "evaluation")),
    ]
    if config.pipeline.dtype != "fp32" and _compares(config):
        sizes[:2] = [(SHAPES, min(learned, drawn), ("training", *DRAWN))]
    for keys, size, phases in sizes:
        for less in dict.fromkeys(n for n in (size // 4, 1) if 0 < n < size):
            words = tuple(f"{key}={less}" for key in keys)
            yield Change(words=words, costs="smaller products", phases=phases)


def _equal(config: Config) -> tuple[str, ...]:
    """What fewer bits ask for beside: one shape of batch, where likelihoods are compared."""
    sizes = {config.optim.micro_batch, config.rollout.batch_size}
    if len(sizes) == 1 or not _compares(config):
        return ()
    return tuple(f"{key}={min(sizes)}" for key in SHAPES)


def _compares(config: Config) -> bool:
    """Whether likelihoods are compared with the rollout's, which in 16 bits takes equal shapes of
    batch: see optim.ratio_tolerance."""
    return build_objective(config.objective, KERNELS[config.rollout.kernel]).needs.ratio


def _key(word: str) -> str:
    return word.partition("=")[0]


def _changed(config: Config, words: Sequence[str]) -> Config | None:
    """The recipe with changes; None where the rest of it does not allow them."""
    try:
        return parse_config(merge(config.model_dump(mode="json"), parse_overrides(words)))
    except UserError:
        return None
