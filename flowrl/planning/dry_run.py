"""A recipe rehearsed on the tiny pipeline of its family: everything small, nothing real to load.

Tree, objective, kernel, credit, exploring and the rewards' names, weights and transforms are the
recipe's own, and so are prompts where they can be read. What is replaced is said line by line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from flowrl.backbones.loading import pipeline_path
from flowrl.build.objective import build_objective
from flowrl.config import Config, parse_config
from flowrl.config.rewards import HTTPOptions
from flowrl.config.rewards import RewardOptions as RewardSection
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.prompts.records import PromptRecord, PromptSampler, load_prompts
from flowrl.prompts.sources import HUB, TINY
from flowrl.scoring.spec import BUILT_IN, RewardSpec, check_evaluation, check_prompts, load_reward
from flowrl.trees.plan import PlanError, count
from flowrl.utils.files import write_text
from flowrl.utils.imports import load_callable

# --- Rewards of a rehearsal: the names and properties of the real ones, at no cost -------------

STAND_IN = "flowrl.planning.dry_run:StandIn"
WAVES = 300.0  # radians from black to white: tiny images of one prompt differ by hundredths
KEY = "judged in rehearsal by"  # in a prompt's metadata: names of the rewards that apply to it


class StandIn:
    """A wave over the brightness, between bounds; its mixture of colours depends on the name.

    The wave is short, so that the images of a prompt get scores that differ. The same image
    always gets the same score, and gradients reach it. It applies to a prompt as the real reward
    was found to, which stands in the metadata.
    """

    def __init__(
        self,
        name: str,
        *,
        differentiable: bool = False,
        scope: str = "sample",
        low: float = 0.0,
        high: float = 1.0,
    ):
        self.name, self.differentiable, self.scope = name, differentiable, scope
        self.bounds = low, high
        self.version = f"stand-in of {name}"
        digits = blake2b(name.encode(), digest_size=3).digest()
        shares = torch.tensor([1.0 + digit for digit in digits])
        self.shares = shares / shares.sum()

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """(B, 3, H, W) in [0, 1] -> (B,) fp32 between the bounds."""
        low, high = self.bounds
        bright = (images.float().mean((2, 3)) * self.shares.to(images.device)).sum(1)
        return low + (high - low) * (0.5 + 0.5 * (WAVES * bright).sin())

    def applies(self, prompt: str, metadata: dict) -> bool:
        """As the real reward said of this prompt; to all where nobody asked it."""
        return self.name in metadata.get(KEY, (self.name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What could be learned of a reward without its weights or its server.

    name: in reports. reward: made, but for its weights; or its class or function; None where only
    a server has it.
    """

    name: str
    reward: Any
    entry: RewardSection

    def spec(self) -> RewardSpec | None:
        """The real one as far as it can be asked about prompts; None where it cannot."""
        if self.reward is None or isinstance(self.reward, type):
            return None
        given = {key: tuple(values) for key, values in self.entry.applies_to.items()}
        e = self.entry
        return RewardSpec(
            name=self.name, reward=self.reward, weight=e.weight, held_out=e.held_out,
            applies_to=given,
        )  # fmt: skip

    def applies(self, prompt: str, metadata: dict) -> bool:
        """What the real one says of a prompt, or only the names of the metadata it needs."""
        spec = self.spec()
        if spec is not None:
            return spec.applies(prompt, metadata)
        return all(key in metadata for key in getattr(self.reward, "required_metadata", ()))

    def stand_in(self) -> dict[str, Any]:
        """The recipe's entry with the real scoring replaced; all else stays."""
        low, high = [
            other if bound is None else float(bound)
            for bound, other in zip(
                getattr(self.reward, "bounds", (0.0, 1.0)), (0.0, 1.0), strict=True
            )
        ]
        args = {
            "name": self.name,
            "differentiable": getattr(self.reward, "differentiable", False) is True,
            "scope": getattr(self.reward, "scope", "sample"),
            "low": low,
            "high": high if high > low else low + 1,
        }
        kept = self.entry.model_dump(exclude={"name", "args", "executor", "label"})
        return kept | {"name": STAND_IN, "args": args, "label": self.name}


def tell(entry: RewardSection) -> Told:
    """What a recipe's entry names. Raises UserError for a reward that is not there, or that does
    not take its arguments; weights and servers are not asked for."""
    if isinstance(entry.executor, HTTPOptions):
        return Told(name=entry.label or entry.name, reward=None, entry=entry)
    reward = _made(entry.name, entry.args) if entry.name in BUILT_IN else _found(entry.name)
    name = entry.label or getattr(reward, "name", entry.name)
    # The name of a class may be a property, which only its objects have.
    return Told(name=name if isinstance(name, str) else entry.name, reward=reward, entry=entry)


def _made(name: str, args: Mapping[str, Any]) -> Any:
    """A built-in reward, which loads its weights when it is first asked; or its class, where a
    package that it needs is missing."""
    try:
        return load_reward(name, args)
    except UserError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return _found(BUILT_IN[name])


def _found(target: str) -> Any:
    """One's own reward is not made, which may load weights; only found."""
    if ":" not in target:
        load_reward(target)  # raises the sentence with the known names
    try:
        return load_callable(target)
    except LookupError as error:
        raise UserError(f"cannot load reward {target!r}: {error.args[0]}") from error


# --- Prompts of a rehearsal --------------------------------------------------------------------

COUNT = 6
FALLBACK = "tiny:geneval:train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A file of a few prompts that stands for `source`, and a sentence on which they are."""

    path: Path
    note: str


def choose(
    path: Path, source: str, told: Sequence[Told], *, balance: str | None, held_out: bool = False
) -> Chosen:
    """Write COUNT prompts for a rehearsal to `path`, with what the rewards say of them.

    held_out: they are those of evaluation. All of the user's prompts are read and shown to the
    rewards, as far as these can be asked. Raises UserError for what is wrong with them.
    """
    if not _there(source):
        return _made_up(path, source, told, balance=balance)
    records = load_prompts(source)
    specs = [spec for spec in (t.spec() for t in told) if spec is not None]
    if len(specs) == len(told):
        (check_evaluation if held_out else check_prompts)(specs, records)
    PromptSampler(records, 1, 0, balance=balance)  # raises for prompts without the key
    judges = [[t.name for t in told if t.applies(r.text, r.metadata)] for r in records]
    rows = _varied(judges, told)
    _write(path, [_row(records[i], judges[i]) for i in rows])
    return Chosen(path=path, note=f"{len(rows)} of the {len(records)} prompts of {source}")


def _there(source: str) -> bool:
    """Whether the prompts can be read without a network."""
    return source.startswith(TINY) or (not source.startswith(HUB) and Path(source).exists())


def _varied(judges: Sequence[Sequence[str]], told: Sequence[Told]) -> list[int]:
    """Places of a few prompts, among which each reward finds one if there is any."""
    first = [next((i for i, names in enumerate(judges) if t.name in names), None) for t in told]
    found = dict.fromkeys([*(i for i in first if i is not None), *range(len(judges))])
    return sorted(list(found)[: max(COUNT, len(told))])


def _row(record: PromptRecord, judges: Sequence[str]) -> dict[str, Any]:
    row = {"prompt": record.text, KEY: list(judges)} | record.metadata
    row |= {"negative": record.negative} if record.negative is not None else {}
    return row | ({"paraphrases": list(record.paraphrases)} if record.paraphrases else {})


def _made_up(path: Path, source: str, told: Sequence[Told], *, balance: str | None) -> Chosen:
    """Prompts of the tiny world, which every reward takes for its own."""
    records = load_prompts(FALLBACK, limit=max(COUNT, len(told)))
    learned = [t for t in told if t.entry.weight and not t.entry.held_out]
    rows = []
    for i, record in enumerate(records):
        # Of rewards that are kept to some prompts each gets its own, and so does what is learned.
        chosen = [*told, *learned][i % (len(told) + len(learned))]
        kept = {key: values[0] for key, values in chosen.entry.applies_to.items()}
        metadata = record.metadata | ({balance: str(i % 2)} if balance else {}) | kept
        row = _row(record, [t.name for t in told]) | metadata
        rows.append(row | {"paraphrases": [f"{record.text}, please", f"draw {record.text}"]})
    _write(path, rows)
    what = "is looked up in training only" if source.startswith(HUB) else "is not there"
    return Chosen(path=path, note=f"{source} {what}: {len(rows)} prompts of the tiny world")


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    except TypeError as error:  # of a data set with images in its columns
        raise UserError(f"a prompt's metadata cannot be written as JSON: {error}") from error
    write_text(path, text)


# --- A recipe rehearsed on the tiny pipeline of its family -------------------------------------

FAMILIES = {"sd3": "tiny-sd3", "flux": "tiny-flux", "sana": "tiny-sana"}
ITERATIONS, PROMPTS, ROWS, RANK, TOKENS, IMAGES = 2, 2, 16, 4, 16, 4
FORWARDS = 24  # of a prompt, above which a rehearsal takes fewer steps
STEPS = 6  # then, or as few more as the tree has to have


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A small recipe, and what it has in place of the real one's: (option, real, here)."""

    config: Config
    replaced: tuple[tuple[str, str, str], ...]


@dataclass(slots=True)
class _Draft:
    """A recipe on its way to a small one."""

    data: dict[str, Any]
    replaced: list[tuple[str, str, str]] = field(default_factory=list)

    def put(self, key: str, value: Any, said: str | None = None) -> None:
        """Set an option; said: how the new value reads, by default as it is."""
        *path, last = key.split(".")
        at = self.data
        for name in path:
            at = at[name]
        if at[last] != value:
            self.replaced.append((key, _shown(at[last]), said or _shown(value)))
            at[last] = value

    def most(self, key: str, value: int) -> None:
        """Lower an option to at most `value`."""
        *path, last = key.split(".")
        at = self.data
        for name in path:
            at = at[name]
        self.put(key, min(at[last], value))


def dry(config: Config, folder: str | Path) -> Config:
    """The small recipe alone; see `rehearse`."""
    return rehearse(config, folder).config


def rehearse(config: Config, folder: str | Path) -> Rehearsal:
    """A recipe of the same kind for a CPU, whose prompts and run lie under `folder`.

    Raises UserError for what is wrong with the real one: prompts that cannot be read or that
    rewards do not fit, rewards and objectives that are not there or refuse their arguments.
    """
    folder = Path(folder)
    build_objective(config.objective, KERNELS[config.rollout.kernel])
    told = [tell(entry) for entry in config.rewards]
    draft = _Draft(config.model_dump(mode="json"))
    _pipeline(draft, config)
    _memory(draft, folder)
    _rollout(draft, config)
    _learning(draft)
    _evaluation(draft)
    _run(draft, folder)
    _prompts(draft, config, told, folder)
    _rewards(draft, config, told)
    return Rehearsal(config=_smallest(draft, config), replaced=tuple(draft.replaced))


def _pipeline(draft: _Draft, config: Config) -> None:
    backbone = config.pipeline.backbone
    if backbone not in FAMILIES:
        draft.put("pipeline.backbone", "sd3", "sd3: there is no tiny pipeline of the family")
    draft.put("pipeline.path", FAMILIES.get(backbone, "tiny-sd3"))
    for name in ("revision", "attention", "height", "width"):
        draft.put(f"pipeline.{name}", None)
    draft.put("pipeline.device", "cpu")
    draft.put("pipeline.dtype", "fp32")
    draft.most("pipeline.max_sequence_length", TOKENS)
    draft.most("pipeline.decode_batch", ROWS)
    if config.pipeline.precision not in (None, "bf16"):
        draft.put("pipeline.precision", "nvfp4-emulated")
    if config.pipeline.precision is not None:
        draft.put("pipeline.min_dim", 0)  # the layers of a tiny network are all small


def _memory(draft: _Draft, folder: Path) -> None:
    draft.put("memory.base_bits", None)
    if draft.data["memory"]["prompt_cache"] is not None:
        draft.put("memory.prompt_cache", str(folder / "prompt-cache"), "a temporary folder")


def _rollout(draft: _Draft, config: Config) -> None:
    r = config.rollout
    draft.most("optim.updates_per_rollout", PROMPTS)
    draft.put("rollout.prompts", PROMPTS)
    draft.most("rollout.batch_size", ROWS)
    draft.put("rollout.compile", False)
    if r.store is not None and r.store.path is not None:
        draft.put("rollout.store", None, "null: the groups are drawn")
    if r.explore is not None:
        if r.explore.precision != "bf16":
            draft.put("rollout.explore.precision", "nvfp4-emulated")
        draft.put("rollout.explore.min_dim", 0)
        draft.most("rollout.explore.audit.prompts", 1)
        draft.put("rollout.explore.audit.on_miss", "warn")


def _learning(draft: _Draft) -> None:
    lora = draft.data["lora"]
    strength = lora["alpha"] / lora["rank"]
    draft.most("lora.rank", RANK)
    draft.put("lora.alpha", strength * lora["rank"])
    draft.put("lora.init_from", None)
    draft.put("lora.dual_attention", False, "false: tiny networks have no second attention")
    if lora["targets"] and not _matches(draft.data["pipeline"]["path"], lora["targets"]):
        draft.put("lora.targets", None, "null: no layer of the tiny network has such a name")
    draft.most("optim.micro_batch", ROWS)


def _matches(tiny: str, targets: list[str]) -> bool:
    """Whether a layer of a tiny network has one of these endings, as PEFT compares them."""
    layers: set[str] = set()
    for path in (Path(pipeline_path(tiny)) / "transformer").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            layers |= {key.removesuffix(".weight") for key in file.keys()}
    return any(f".{name}".endswith(f".{target}") for name in layers for target in targets)


def _evaluation(draft: _Draft) -> None:
    draft.most("evaluation.images", IMAGES)
    draft.most("evaluation.every", 1)
    draft.most("evaluation.steps", 4)
    draft.most("evaluation.batch_size", ROWS)


def _run(draft: _Draft, folder: Path) -> None:
    draft.put("run.output_dir", str(folder / "run"), "a temporary folder")
    draft.most("run.iterations", ITERATIONS)
    for name in ("checkpoint_every", "sample_every"):
        draft.most(f"run.{name}", 1)
    draft.put("run.max_minutes", None)
    draft.put("run.trackers", [])
    draft.put("run.push_to_hub", False)


def _prompts(draft: _Draft, config: Config, told: list[Told], folder: Path) -> None:
    p, e = config.prompts, config.evaluation
    chosen = choose(folder / "train.jsonl", p.train, told, balance=p.balance)
    draft.put("prompts.train", str(chosen.path), chosen.note)
    if e.prompts is not None:
        held_out = choose(folder / "test.jsonl", e.prompts, told, balance=e.balance, held_out=True)
        draft.put("evaluation.prompts", str(held_out.path), held_out.note)


def _rewards(draft: _Draft, config: Config, told: list[Told]) -> None:
    draft.data["rewards"] = [t.stand_in() for t in told]
    names = ", ".join(t.name for t in told)
    draft.replaced.append(("rewards", names, "stand-ins of the same names and bounds"))


def _smallest(draft: _Draft, config: Config) -> Config:
    """The smallest group and number of candidates that the tree, and everything else, allows."""
    error: UserError | None = None
    for steps, size in _sizes(config):
        attempt = _Draft(_copy(draft.data))
        attempt.put("rollout.steps", steps)
        attempt.put("rollout.group_size", size)
        try:
            if config.rollout.explore is not None:
                _fewer_candidates(attempt)
            found = parse_config(attempt.data)
        except UserError as refused:
            error = error or refused
            continue
        draft.replaced += attempt.replaced
        return found
    assert error is not None  # the recipe's own numbers are among those that are tried
    raise error


def _sizes(config: Config) -> Iterator[tuple[int, int]]:
    """(steps, group size), from what suits best. Steps stay, where that is cheap enough."""
    r = config.rollout
    least = min(r.group_size, 4)

    def sizes(steps: int) -> list[tuple[int, int]]:
        return [(steps, n) for n in range(least, r.group_size + 1) if _forwards(config, steps, n)]

    whole = sizes(r.steps)
    cheap = [pair for pair in whole if _forwards(config, *pair) <= FORWARDS]
    yield from cheap
    fewer = min(STEPS, r.steps)
    order = [*range(fewer, 1, -1), *range(fewer + 1, r.steps)]
    yield from (pair for steps in order for pair in sizes(steps))
    yield from whole


def _forwards(config: Config, steps: int, size: int) -> int:
    """Of a prompt at most, in the first iterations; 0 where the tree cannot be so small."""
    rollout = config.rollout.model_copy(update={"steps": steps, "group_size": size})
    try:
        plans = [rollout.plan(i, config.run.seed) for i in range(ITERATIONS)]
    except PlanError:
        return 0
    return max(count(plan).forwards for plan in plans)


def _fewer_candidates(attempt: _Draft) -> None:
    """Twice as many as are kept."""
    plain = _copy(attempt.data)
    plain["rollout"]["explore"] = None
    roots = max(plan.roots for plan in parse_config(plain).plans())
    attempt.most("rollout.explore.candidates", 2 * roots)


def _copy(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _copy(value) for key, value in data.items()}
    return [_copy(value) for value in data] if isinstance(data, list) else data


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
