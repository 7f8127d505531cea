"""Is a run what its folder says? Its files are read, and one iteration is executed again."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flowrl.assembly.learner import (
    ProvidedObjects,
    build_learner,
    build_run,
    prompts_of_iterations,
)
from flowrl.backbones.lora_files import read_lora
from flowrl.backbones.lora_formats import FILE
from flowrl.config import Config, load_config
from flowrl.errors import CheckResult, UserError
from flowrl.scoring.spec import closing
from flowrl.training.checkpoint import CONFIG, STATE, Checkpoints
from flowrl.training.ledger import Ledger
from flowrl.training.loop import Learner
from flowrl.training.tracking import read_rows
from flowrl.utils.digests import sealed_digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state
from flowrl.verify.figures import failed, guarded, judged, passed, unsure
from flowrl.verify.files import check_checkpoint, check_evaluation, check_lora

CLOSE = 1e-3  # relative: of another machine's arithmetic


def verify_run(folder: Path, *, pipeline: Any = None) -> Iterator[CheckResult]:
    """Check a run's files, and compare one iteration, executed again, with what it logged.

    pipeline: a loaded one in place of the recipe's, without adapters.
    """
    config = load_config(folder / CONFIG)
    yield passed("recipe", f"{config.objective.kind}, {config.run.iterations} iterations")
    results: list[CheckResult] = []
    steps = Checkpoints(folder, keep=1).steps()
    for step in steps:
        results += check_checkpoint(Checkpoints(folder, keep=1).path(step), config.lora)
    results += _check_ledger(folder)
    for path in sorted(folder.glob("evaluations/*.safetensors")):
        results += check_evaluation(path)
    if (folder / FILE).exists():
        results += check_lora(folder, config.lora)
    yield from results
    if not steps:
        yield unsure("checkpoints", "there is none yet")
    elif config.rollout.store is not None and config.rollout.store.refresh_every is not None:
        yield unsure("replay", "a run that renews its store is not executed again")
    elif all(result.state != "problem" for result in results):
        yield from guarded("replay", lambda: _replayed(config, folder, steps, pipeline))


def _check_ledger(folder: Path) -> Iterator[CheckResult]:
    """Compare the files of checkpoints with the digests that the ledger has of them."""
    same, other = 0, []
    written = {e["step"]: e for e in Ledger(folder).events() if e["event"] == "checkpoint"}
    for step, event in written.items():
        place = Checkpoints(folder, keep=1).path(step)
        for name, digest in event["digests"].items():
            if (place / name).is_file():
                equal = sealed_digest(place / name) == digest
                same, other = same + equal, other + [f"{place.name}/{name}"] * (not equal)
    if written:
        yield judged(
            "ledger", not other, f"{same} files are those that were saved" if not other else
            f"other files than were saved: {', '.join(other[:3])}",
            "Somebody else wrote them: go on from another checkpoint.",
        )  # fmt: skip


def _replayed(
    config: Config, folder: Path, steps: list[int], pipeline: Any
) -> Iterator[CheckResult]:
    logged = read_metrics(folder)
    start = next((step for step in reversed(steps) if step + 1 in logged), None)
    first = steps[-1] if start is None else start
    state = load_state(Checkpoints(folder, keep=1).path(first) / STATE)
    with tempfile.TemporaryDirectory() as scratch:
        section = config.run.model_copy(update={"output_dir": scratch, "trackers": []})
        config = config.model_copy(update={"run": section})
        given, runtime = ProvidedObjects(pipeline=pipeline), Runtime(device=config.pipeline.device)
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        needed = prompts_of_iterations(config, given, first + 1, first)
        learner = build_learner(config, runtime, given, needed=needed)
        with closing(learner.specs):
            newest = load_state(Checkpoints(folder, keep=1).path(steps[-1]) / STATE)
            yield from _check_exported(learner, newest, folder)
            run = build_run(config, learner, None, state, resumed=True)
            run.begin(learner.policy, learner.optimizer)
            if start is None:
                yield unsure("replay", f"no iteration after {first} was logged to compare with")
                return
            with run.report or nullcontext():
                _, metrics = learner.iterate(start)
    yield _compared(start + 1, metrics, logged[start + 1])


def _check_exported(
    learner: Learner, newest: dict[str, Any], folder: Path
) -> Iterator[CheckResult]:
    """Compare the LoRA at the root with the newest checkpoint, layer by layer."""
    policy = learner.policy
    if not (folder / FILE).exists():
        yield failed("lora", f"there is no {FILE} beside the recipe", "Run flowrl export RUN.")
        return
    state, _ = read_lora(folder)
    try:
        policy.start_from(state)  # names and shapes are those of this recipe's layers
    except UserError as error:
        yield failed("lora", str(error), "It is another run's, or damaged: export the run again.")
        return
    kept = newest["policy"]["adapters"][policy.export_adapter]
    own = [parameter.data.cpu() for parameter in policy.parameters()]
    same = sum(torch.equal(a, b.cpu().to(a.dtype)) for a, b in zip(own, kept, strict=True))
    yield judged(
        "lora", same == len(kept),
        f"{same} of {len(kept)} tensors on all layers are the newest checkpoint's",
        "It is not the LoRA of the newest checkpoint: export the run again.",
    )  # fmt: skip


def read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what was logged of training, by the number of iterations done."""
    return {row["step"]: row for row in read_rows(folder) if "loss" in row}


def _compared(step: int, found: dict[str, float], logged: dict[str, Any]) -> CheckResult:
    """Compare an iteration's metrics with those that it had, but for what it took in time.

    Images that workers drew came back in 8 bits, of which their brightness and contrast were taken.
    """
    apart: dict[str, float] = {}
    others = ("time/", "workers/", *(("image/",) if "workers/joined" in logged else ()))
    names = [name for name in logged if name != "step" and not name.startswith(others)]
    for name in names:
        was, now = logged[name], found.get(name, math.nan)
        if was is None or not math.isfinite(now):
            apart[name] = 0.0 if was is None and not math.isfinite(now) else math.inf
        else:
            apart[name] = abs(now - was) / max(abs(was), abs(now), 1e-12)
    equal = [name for name, by in apart.items() if by == 0]
    worst = max(apart, key=lambda name: apart[name], default="")
    detail = f"iteration {step} again: {len(equal)} of {len(names)} metrics equal in every bit"
    if len(equal) == len(names):
        return passed("replay", detail)
    detail += f", {worst} by {apart[worst]:.1e} apart"
    if apart[worst] < CLOSE:
        return unsure("replay", detail, "Another machine, thread count or library computes so.")
    return failed("replay", detail, "Recipe, prompts, reward, checkpoint or code have changed.")
