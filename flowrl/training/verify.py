"""Check a run, a checkpoint, an offline data set or a LoRA: read every file as its users do."""

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.backbones.original_layers import layers_of
from flowrl.errors import CheckResult, DamagedFile, UserError
from flowrl.offline.format import METADATA, open_dataset
from flowrl.training.checkpoint import CONFIG, STATE, Checkpoints, read_checkpoint, step_of
from flowrl.training.evaluate import Evaluation
from flowrl.training.ledger import Ledger
from flowrl.utils.digests import sealed_digest

UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError, UserError)


def verify(path: Path) -> Iterator[CheckResult]:
    """Check what lies at `path`."""
    if (path / CONFIG).is_file():
        yield from _check_run(path)
    elif (path / METADATA).is_file():
        yield _check("store", path, _store)
    elif (path / STATE).is_file():
        yield from _check_checkpoint(path)
    elif path.is_file() or (path / FILE).is_file():
        yield _check("lora", path, _lora)
    else:
        raise UserError(
            f"{path} is neither a run ({CONFIG}), a store ({METADATA}), a checkpoint ({STATE}) nor "
            f"a LoRA ({FILE})"
        )


def _check_run(folder: Path) -> Iterator[CheckResult]:
    checkpoints = Checkpoints(folder, keep=1)
    for step in checkpoints.steps():
        yield from _check_checkpoint(checkpoints.path(step))
    for path in sorted(folder.glob("evaluations/*.safetensors")):
        yield _check("evaluation", path, _evaluation)
    if (folder / FILE).exists():
        yield _check("lora", folder, _lora)
    yield _check("ledger", folder, _ledger)


def _check_checkpoint(folder: Path) -> Iterator[CheckResult]:
    """Check the state to resume from, and the LoRA beside it."""
    yield _check(folder.name, folder, _checkpoint)
    if (folder / FILE).exists():
        yield _check("lora", folder, _lora)


def _check(topic: str, path: Path, describe: Callable[[Path], str]) -> CheckResult:
    """Read something; return what it is, or why it is not as it should be."""
    try:
        return CheckResult(topic=topic, state="ok", detail=describe(path))
    except UNREADABLE as error:
        text = " ".join(str(error).split())[:300]
        detail = text if isinstance(error, UserError) else f"{path} cannot be read ({text})"
        remedy = "Use an intact checkpoint and its LoRA; an evaluation is made again once deleted."
        return CheckResult(topic=topic, state="problem", detail=detail, remedy=remedy)


# --- what lies there, in words --------------------------------------------------------------------


def _lora(source: Path) -> str:
    lora = open_lora(source)  # whole and finite
    layers = layers_of(lora.state)
    ranks = ", ".join(map(str, sorted({len(down) for down, _ in layers.values()})))
    scales = ", ".join(f"{scale:g}" for scale in sorted(set(lora.scales.values())))
    return f"{lora.path.name} of {lora.make}: {len(layers)} layers, rank {ranks}, scale {scales}"


def _checkpoint(folder: Path) -> str:
    state = read_checkpoint(folder)
    step = int(state["iteration"])
    if step_of(folder) not in (step, None):
        raise DamagedFile(f"{folder} holds iteration {step}")
    numbers = sum(t.numel() for ts in state["policy"]["adapters"].values() for t in ts)
    return f"iteration {step}, {numbers:,} finite numbers of adapters"


def _evaluation(path: Path) -> str:
    scores = Evaluation.load(path).scores
    return f"{path.name}: {len(scores)} images, {int(scores.isnan().sum())} scores missing"


def _store(folder: Path) -> str:
    store = open_dataset(folder)
    missing = int(store.scores.isnan().sum())
    return f"{len(store.groups)} groups, {len(store)} images, {missing} scores missing"


def _ledger(folder: Path) -> str:
    """Compare the files of checkpoints, and the LoRA of the newest, with what was saved."""
    checkpoints, saved = Checkpoints(folder, keep=1), dict[Path, str]()
    for event in Ledger(folder).events():
        if event["event"] == "checkpoint":
            place = checkpoints.path(event["step"])
            saved |= {place / name: digest for name, digest in event["digests"].items()}
    for newest in map(checkpoints.path, checkpoints.steps()[-1:]):
        if newest / FILE in saved:  # not where a kill came between it and its line in the ledger
            saved[folder / FILE] = saved[newest / FILE]
        if not (folder / FILE).is_file():
            raise DamagedFile(f"{folder / FILE} is missing; {newest / FILE} is a copy of it")
    files = [path for path in saved if path.is_file()]
    changed = [path for path in files if sealed_digest(path) != saved[path]]
    if changed:
        raise DamagedFile(f"changed since it was saved: {', '.join(map(str, changed[:3]))}")
    return f"{len(files)} files are as they were saved"
