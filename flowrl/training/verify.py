"""Check a run, a checkpoint, an offline data set or a LoRA: files intact, finite and consistent?"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError

from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.backbones.original_layers import layers_of
from flowrl.config import load_config
from flowrl.config.sections import LoRAOptions
from flowrl.errors import CheckResult, UserError
from flowrl.offline.format import METADATA, open_dataset
from flowrl.training.checkpoint import CONFIG, STATE, Checkpoints, read_checkpoint, step_of
from flowrl.training.evaluate import Evaluation
from flowrl.training.ledger import Ledger
from flowrl.utils.digests import sealed_digest

UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError, UserError)


def verify(path: Path) -> Iterator[CheckResult]:
    """Check what lies at `path`."""
    if (path / CONFIG).is_file():
        return _check_run(path)
    if (path / METADATA).is_file():
        return _check_store(path)
    if (path / STATE).is_file():
        return _check_checkpoint(path)
    if path.is_file() or (path / FILE).is_file():
        return _check_lora(path)
    raise UserError(
        f"{path} is neither a run ({CONFIG}), a store ({METADATA}), a checkpoint ({STATE}) nor a "
        f"LoRA ({FILE})"
    )


def _result(topic: str, holds: bool, detail: str, remedy: str = "") -> CheckResult:
    """Return a check; remedy: what to do where it does not hold."""
    state = "ok" if holds else "problem"
    return CheckResult(topic=topic, state=state, detail=detail, remedy="" if holds else remedy)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, UserError) else f"cannot be read ({text})"


# --- files --------------------------------------------------------------------------------------


def _check_lora(source: Path, trained: LoRAOptions | None = None) -> Iterator[CheckResult]:
    """Check header, factors and numbers; trained: rank and alpha of the run it belongs to."""
    remedy = "Copy the LoRA of an intact checkpoint, or train again."
    try:
        lora = open_lora(source)
        layers = layers_of(lora.state)
    except UNREADABLE as error:
        yield _result("lora", False, _reason(error), remedy)
        return
    ranks = sorted({len(down) for down, _ in layers.values()})
    scales = sorted(set(lora.scales.values()))
    factors = f"rank {_listed(ranks)}, scale {_listed(scales)}"
    yield _result("lora", True, f"{lora.path.name} of {lora.make}: {len(layers)} layers, {factors}")
    if not any(bool(up.any()) for _, up in layers.values()):
        detail = "every second factor is 0: it changes nothing"
        yield CheckResult(topic="lora", state="warning", detail=detail)
    if trained is not None:
        scale = trained.alpha / trained.rank
        expected = f"{factors}; the run trained rank {trained.rank}, scale {scale:g}"
        yield _result("lora", scales == [scale] and ranks == [trained.rank], expected, remedy)


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _check_checkpoint(folder: Path, trained: LoRAOptions | None = None) -> Iterator[CheckResult]:
    """Check the state to resume from, and the LoRA beside it."""
    try:
        state = read_checkpoint(folder)
        step = int(state["iteration"])
        numbers = sum(t.numel() for ts in state["policy"]["adapters"].values() for t in ts)
    except UNREADABLE as error:
        yield _result(folder.name, False, _reason(error), "Resume from another checkpoint.")
        return
    yield _result(
        folder.name, step_of(folder) in (step, None),
        f"iteration {step}, {numbers:,} finite numbers of adapters",
        "It lies in the folder of another iteration.",
    )  # fmt: skip
    if (folder / FILE).exists():
        yield from _check_lora(folder, trained)


def _check_evaluation(path: Path) -> CheckResult:
    try:
        scores = Evaluation.load(path).scores
    except UNREADABLE as error:
        remedy = "Delete it: it is made again."
        return _result("evaluation", False, f"{path.name}: {_reason(error)}", remedy)
    detail = f"{path.name}: {len(scores)} images, {int(scores.isnan().sum())} scores missing"
    return _result("evaluation", True, detail)


def _check_store(folder: Path) -> Iterator[CheckResult]:
    """Check the digests of an offline data set."""
    try:
        store = open_dataset(folder)
    except UNREADABLE as error:
        yield _result("store", False, _reason(error))
        return
    missing = int(store.scores.isnan().sum())
    detail = f"{len(store.groups)} groups, {len(store)} images, {missing} scores missing"
    yield _result("store", True, detail)


# --- runs ---------------------------------------------------------------------------------------


def _check_run(folder: Path) -> Iterator[CheckResult]:
    config, checkpoints = load_config(folder / CONFIG), Checkpoints(folder, keep=1)
    for step in checkpoints.steps():
        yield from _check_checkpoint(checkpoints.path(step), config.lora)
    yield from _check_ledger(folder, checkpoints)
    for path in sorted(folder.glob("evaluations/*.safetensors")):
        yield _check_evaluation(path)
    yield from _check_exported(folder, checkpoints, config.lora)


def _check_exported(
    folder: Path, checkpoints: Checkpoints, trained: LoRAOptions
) -> Iterator[CheckResult]:
    """Check the LoRA at the root, and that it is that of the newest checkpoint."""
    if (folder / FILE).exists():
        yield from _check_lora(folder, trained)
    if not (steps := checkpoints.steps()):
        return
    newest = checkpoints.path(steps[-1])
    try:
        same = sealed_digest(folder / FILE) == sealed_digest(newest / FILE)
        detail = f"it {'equals' if same else 'differs from'} the LoRA of {newest.name}"
    except UNREADABLE as error:
        same, detail = False, _reason(error)
    remedy = f"Copy {newest / FILE} to {folder}."
    yield _result("lora", same, detail, remedy)


def _check_ledger(folder: Path, checkpoints: Checkpoints) -> Iterator[CheckResult]:
    """Compare the files of checkpoints with their digests in the ledger."""
    written = {
        e["step"]: e["digests"] for e in Ledger(folder).events() if e["event"] == "checkpoint"
    }
    files = [(checkpoints.path(step) / name, digest)
             for step, digests in written.items() for name, digest in digests.items()]  # fmt: skip
    files = [(path, digest) for path, digest in files if path.is_file()]
    wrong = [f"{path.parent.name}/{path.name}" for path, digest in files
             if sealed_digest(path) != digest]  # fmt: skip
    if files:
        detail = f"{len(files) - len(wrong)} of {len(files)} files are as they were saved"
        remedy = f"Changed since: {', '.join(wrong[:3])}. Resume from another checkpoint."
        yield _result("ledger", not wrong, detail, remedy)
