"""Check a run, a checkpoint, an offline data set or a LoRA: files intact, finite and consistent?

A run's newest logged iteration is also computed again and compared with what was logged.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flowrl.assembly.learner import ProvidedObjects, build_learner, build_run, prompts_of_iterations
from flowrl.backbones.lora_files import read_lora
from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.backbones.original_layers import layers_of
from flowrl.config import Config, load_config
from flowrl.config.sections import LoRAOptions
from flowrl.errors import CheckResult, UserError
from flowrl.offline.format import METADATA, OfflineDataset, open_dataset
from flowrl.scoring.spec import closing
from flowrl.training.checkpoint import CONFIG, STATE, Checkpoints, read_checkpoint, step_of
from flowrl.training.evaluate import Evaluation
from flowrl.training.ledger import Ledger
from flowrl.training.tracking import read_rows
from flowrl.utils.digests import sealed_digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state

UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError, UserError)
OTHER_MACHINE = 1e-3  # largest relative difference of a metric that other arithmetic explains


def verify(path: Path, *, pipeline: Any = None) -> Iterator[CheckResult]:
    """Check what lies at `path`; pipeline: a loaded one in place of the run's, without adapters."""
    if (path / CONFIG).is_file():
        return _check_run(path, pipeline)
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
    if holds:
        return CheckResult(topic=topic, state="ok", detail=detail)
    return CheckResult(topic=topic, state="problem", detail=detail, remedy=remedy)


def _warning(topic: str, detail: str, remedy: str = "") -> CheckResult:
    return CheckResult(topic=topic, state="warning", detail=detail, remedy=remedy)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, UserError) else f"cannot be read ({text})"


# --- files --------------------------------------------------------------------------------------


def _check_lora(source: Path, trained: LoRAOptions | None = None) -> Iterator[CheckResult]:
    """Check header, factors and numbers; trained: rank and alpha of the run it belongs to."""
    remedy = "Export the run again: flowrl export RUN."
    try:
        lora = open_lora(source)
        layers = layers_of(lora.state)
    except UNREADABLE as error:
        yield _result("lora", False, _reason(error), remedy)
        return
    ranks = sorted({len(down) for down, _ in layers.values()})
    scales = sorted(set(lora.scales.values()))
    detail = f"rank {_listed(ranks)}, scale {_listed(scales)}"
    yield _result("lora", True, f"{lora.path.name} of {lora.make}: {len(layers)} layers, {detail}")
    if not any(bool(up.any()) for _, up in layers.values()):
        yield _warning("lora", "every second factor is 0: it changes nothing")
    if trained is not None:
        scale = trained.alpha / trained.rank
        expected = f"{detail}; the run trained rank {trained.rank}, scale {scale:g}"
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
    remedy = "Delete it: it is made again."
    try:
        evaluation = Evaluation.load(path)
    except UNREADABLE as error:
        return _result("evaluation", False, f"{path.name}: {_reason(error)}", remedy)
    rows, rewards = evaluation.scores.shape
    fits = rewards == len(evaluation.names) and len(evaluation.images) == len(evaluation.prompts)
    missing = int(evaluation.scores.isnan().sum())
    detail = f"{path.name}: {rows} images, {rewards} rewards, {missing} scores missing"
    finite = not bool(evaluation.scores.isinf().any())
    return _result("evaluation", fits and finite, detail, remedy)


def _check_store(folder: Path) -> Iterator[CheckResult]:
    """Check rows, latents and scores of an offline data set."""
    try:
        store = open_dataset(folder)
    except UNREADABLE as error:
        yield _result("store", False, _reason(error))
        return
    detail = f"{len(store.groups)} groups, {len(store)} images, {', '.join(store.metadata.names)}"
    yield _result("store", True, detail)
    scores = store.scores
    detail = f"{int(scores.isfinite().sum())} of {scores.numel()} scores are finite"
    yield _result("scores", not bool(scores.isinf().any()), detail, "Collect again.")
    yield _check_latents(store)


def _check_latents(store: OfflineDataset) -> CheckResult:
    wrong = []
    for shard in store.shard.unique().tolist():
        try:
            x0 = store.latents((store.shard == shard).nonzero().flatten()).float().flatten(1)
        except UNREADABLE as error:
            wrong.append(f"shard {shard}: {_reason(error)}")
            continue
        bad = ~x0.isfinite().all(1) | (x0.std(1) == 0)
        rows = bad.nonzero().flatten().tolist()
        wrong += [f"shard {shard}, latent {row} is constant or not finite" for row in rows[:3]]
    detail = "; ".join(wrong[:3]) or "finite, none constant"
    return _result("latents", not wrong, detail, "Delete that shard and collect again.")


# --- runs ---------------------------------------------------------------------------------------


def _check_run(folder: Path, pipeline: Any) -> Iterator[CheckResult]:
    config, checkpoints = load_config(folder / CONFIG), Checkpoints(folder, keep=1)
    steps = checkpoints.steps()
    results: list[CheckResult] = []
    for step in steps:
        results += _check_checkpoint(checkpoints.path(step), config.lora)
    results += _check_ledger(folder, checkpoints)
    results += [
        _check_evaluation(path) for path in sorted(folder.glob("evaluations/*.safetensors"))
    ]
    if (folder / FILE).exists():
        results += _check_lora(folder, config.lora)
    yield from results
    if not steps:
        yield _warning("replay", "the run has no checkpoint to compute an iteration from")
    elif all(result.state != "problem" for result in results):
        try:
            yield from _replay(config, folder, steps, pipeline)
        except Exception as error:  # a reward of one's own may raise anything
            yield _result("replay", False, f"{type(error).__name__}: {_reason(error)}")


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


def _replay(
    config: Config, folder: Path, steps: Sequence[int], pipeline: Any
) -> Iterator[CheckResult]:
    """Compute the iteration after a checkpoint again, in a folder of its own."""
    logged = {row["step"]: row for row in read_rows(folder) if "loss" in row}
    start = next((step for step in reversed(steps) if step + 1 in logged), None)
    first = steps[-1] if start is None else start
    state = load_state(Checkpoints(folder, keep=1).path(first) / STATE)
    with tempfile.TemporaryDirectory() as scratch:
        section = config.run.model_copy(update={"output_dir": scratch, "trackers": []})
        config = config.model_copy(update={"run": section})
        provided = ProvidedObjects(pipeline=pipeline)
        runtime = Runtime(device=config.pipeline.device)
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        needed = prompts_of_iterations(config, provided, first + 1, first)
        learner = build_learner(config, runtime, provided, needed=needed)
        with closing(learner.specs):
            yield _check_exported(learner, steps[-1], folder)
            run = build_run(config, learner, None, state, resumed=True)
            run.begin(learner.policy, learner.optimizer)
            if start is None:
                yield _warning("replay", f"no iteration after {first} was logged to compare with")
                return
            with run.report or nullcontext():
                _, metrics = learner.iterate(start)
    yield _compare(start + 1, metrics, logged[start + 1])


def _check_exported(learner: Any, newest: int, folder: Path) -> CheckResult:
    """Compare the LoRA at the root with the newest checkpoint, layer by layer."""
    remedy, policy = "Export the run again: flowrl export RUN.", learner.policy
    if not (folder / FILE).exists():
        return _result("lora", False, f"there is no {FILE} beside the recipe", remedy)
    try:
        policy.start_from(read_lora(folder)[0])
    except UserError as error:
        return _result("lora", False, str(error), remedy)
    state = load_state(Checkpoints(folder, keep=1).path(newest) / STATE)
    saved = state["policy"]["adapters"][policy.export_adapter]
    pairs = zip(policy.parameters(), saved, strict=True)
    same = sum(torch.equal(a.data.cpu(), b.cpu().to(a.dtype)) for a, b in pairs)
    detail = f"{same} of {len(saved)} tensors equal the newest checkpoint's"
    return _result("lora", same == len(saved), detail, remedy)


def _compare(step: int, metrics: dict[str, float], logged: dict[str, Any]) -> CheckResult:
    """Compare an iteration's metrics with the logged ones, except times.

    Images of remote workers came back in 8 bits, which changes their brightness and contrast.
    """
    skipped = ("time/", "workers/", *(("image/",) if "workers/joined" in logged else ()))
    names = [name for name in logged if name != "step" and not name.startswith(skipped)]
    changes = {name: _change(logged[name], metrics.get(name, math.nan)) for name in names}
    worst = max(changes, key=lambda name: changes[name], default="")
    equal = sum(change == 0 for change in changes.values())
    detail = f"iteration {step} again: {equal} of {len(names)} metrics equal in every bit"
    if equal == len(names):
        return _result("replay", True, detail)
    detail += f", {worst} differs by {changes[worst]:.1e}"
    if changes[worst] < OTHER_MACHINE:
        return _warning("replay", detail, "Another machine, thread count or library does that.")
    remedy = "Recipe, prompts, reward, checkpoint or code have changed."
    return _result("replay", False, detail, remedy)


def _change(before: float | None, now: float) -> float:
    if before is None or not math.isfinite(now):
        return 0.0 if before is None and not math.isfinite(now) else math.inf
    return abs(now - before) / max(abs(before), abs(now), 1e-12)
