"""A recipe rehearsed on the tiny pipeline of its family: everything small, nothing real to load.

Tree, objective, kernel, credit, exploring and the rewards' names, weights and transforms are the
recipe's own, and so are prompts where they can be read. What is replaced is said line by line.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from flowrl.backbones.loading import pipeline_path
from flowrl.build.objective import build_objective
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.planning.dry_prompts import choose
from flowrl.planning.dry_rewards import Told, tell
from flowrl.trees.plan import PlanError
from flowrl.trees.shape import count

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
