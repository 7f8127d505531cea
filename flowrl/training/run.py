"""A training run on disk: restored before the loop, saved, evaluated and stopped during it."""

import json
import logging
import math
import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.lora_files import FILE, save_lora
from flowrl.backbones.policy import Policy
from flowrl.config.sections import RunOptions
from flowrl.errors import DamagedFile, Interrupted, UserError, as_failure, in_phase, phase
from flowrl.quantization.linear import exact_weights
from flowrl.training.checkpoint import (
    STATE,
    Checkpoints,
    check_finite,
)
from flowrl.training.evaluate import Evaluation, Evaluator, evaluation_file
from flowrl.training.hacking import HackingRule, Judged
from flowrl.training.ledger import Ledger
from flowrl.training.radar import HackingScore
from flowrl.training.tracking import Report
from flowrl.trajectory import Rollout
from flowrl.utils.digests import sealed_digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import parse_state, write_bytes
from flowrl.utils.progress import Steps
from flowrl.utils.stopping import StopRequest, signal_source, when_done

LOG = logging.getLogger(__name__)
GRID_IMAGES = 16
TIME_LIMIT = "run.max_minutes"
MOST_RAISES = 3  # of the KL penalty, after which hacking ends the run
RECIPE_OPTIONS = ("lr", "weight_decay")  # of the optimizer, that a recipe sets


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run in one folder. Only the main process writes; all take part in decisions."""

    folder: Path
    options: RunOptions
    evaluate_every: int  # iterations; 0 is only at the start and the end
    runtime: Runtime
    checkpoints: Checkpoints
    ledger: Ledger
    evaluator: Evaluator | None  # None without held-out prompts
    score: Callable[[Evaluation], float]  # what training raises; its highest value is the best
    radar: Callable[[Evaluation, Evaluation], HackingScore]  # of the base and another evaluation
    report: Report | None  # None on other processes
    steps: Steps
    hacking: HackingRule | None = None  # with it, the highest `quality` is the best
    resume: dict[str, Any] | None = None  # a checkpoint's state
    done: int = 0  # iterations
    elapsed: float = 0.0  # seconds of training in earlier sessions
    best: tuple[float, int] | None = None  # (score, iteration)
    # (iteration whose weights came back, iteration where they did), by run.on_hacking
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    ended_by_rollback: bool = False
    saved: int = -1  # iteration of the last checkpoint
    stopped: str = ""  # a sentence: why the run ended early, by the stop rule or the time limit
    _policy: Policy = field(init=False)
    _optimizer: torch.optim.Optimizer = field(init=False)
    _memories: Mapping[str, Any] = field(init=False, default_factory=dict)  # see `begin`
    _began: float = field(init=False, default_factory=time.monotonic)
    _request: StopRequest = field(init=False, default_factory=StopRequest)
    # of the evaluations by iteration, on the main process
    _history: dict[int, Judged] = field(init=False, default_factory=dict)
    _latest: tuple[int, Evaluation] | None = field(init=False, default=None)
    _base: Evaluation | None = field(init=False, default=None)  # read once
    out_of_time: bool = field(init=False, default=False)

    # --- before the loop --------------------------------------------------------------------

    def begin(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        memories: Mapping[str, Any] | None = None,
    ) -> int:
        """Restore the checkpoint or evaluate the base; return the iteration to continue with.

        A run that its stop rule has ended returns the last one: it stays as it ended.

        memories: what checkpoints hold besides, by name, see `Learner.memories`.
        """
        self._policy, self._optimizer, self._memories = policy, optimizer, memories or {}
        policy.whole = True
        if self.resume is not None:
            self._restore(self.resume)
            if self.runtime.is_main:
                self._renew_lora()
        else:
            self.save()  # from here on the run can be resumed
        if self.evaluator is not None and not (
            self._main_finds(self._base_is_evaluated) or self._main_finds(self._take_base)
        ):
            with policy.disabled():
                self._evaluate(0, whole=True)
        self._load_history()
        if self.hacking is not None and self.best is None:
            self._find_best()
        if self.resume is not None and self.runtime.is_main:
            self.checkpoints.prune(self.best[1] if self.best else None)
        every = self.evaluate_every
        due = every and self.done and self.done % every == 0
        if due and self.done < self.options.iterations:
            if not self._main_finds(lambda: self.evaluation(self.done) is not None):
                self.evaluate_policy()  # the session before was stopped during it
        self._apply_hacking_rule()
        self._began = time.monotonic()
        return self.options.iterations if self.runtime.any(bool(self.stopped)) else self.done

    def _find_best(self) -> None:
        """Take the best of the earlier evaluations whose checkpoint is there.

        The base is one of them, unless the run began with a LoRA, which was not evaluated.
        """

        def find() -> bytes:
            saved, history = self.checkpoints.steps(), self._current_history()
            scored = [
                (judged.quality, step)
                for step, judged in history.items()
                if step in saved and (step or self._policy.starts_at_base)
                and not math.isnan(judged.quality)
            ]  # fmt: skip
            return json.dumps(max(scored, default=None)).encode()

        best = json.loads(self.runtime.from_main(find))
        self.best = None if best is None else (best[0], best[1])

    def _main_finds(self, look: Callable[[], bool]) -> bool:
        """Return what the main process finds in the folder, which others may not see."""
        return self.runtime.any(self.runtime.is_main and look())

    def _base_is_evaluated(self) -> bool:
        """Return whether the base was evaluated as this run does; a resumed run may differ."""
        evaluation, evaluator = self.evaluation(0), self.evaluator
        return evaluation is not None and evaluator is not None and evaluation.key == evaluator.key

    def _take_base(self) -> bool:
        """Take the base's evaluation of a run beside this one; return whether one has it.

        Of the same recipe's evaluation by `key`, and of the same weights and code by `origin`.
        """
        assert self.evaluator is not None
        wanted = self.evaluator.key, self.evaluator.origin
        paths = evaluation_file(self.folder.parent / "*", 0).relative_to(self.folder.parent)
        for path in sorted(self.folder.parent.glob(str(paths))) if wanted[1] else ():
            try:
                evaluation = Evaluation.load(path)
            except (OSError, UserError):  # damaged, or its run is being removed
                continue
            whole = not any(one.errors for one in (evaluation, *evaluation.at_steps))
            if whole and (evaluation.key, evaluation.origin) == wanted:
                self._print(f"The base's scores are those of {path.parents[1]}.")
                self._record(0, evaluation)
                return True
        return False

    def _load_history(self) -> None:
        """Load what earlier sessions measured as this one does, for the stop rule."""
        if self.hacking is None or self.evaluator is None or not self.runtime.is_main:
            return
        for step in range(0, self.done + 1, self.evaluate_every):
            evaluation = self.evaluation(step)
            if evaluation is not None and evaluation.key == self.evaluator.key:
                self._history[step] = self._judge(step, evaluation)

    def _judge(self, step: int, evaluation: Evaluation) -> Judged:
        """Compare an evaluation with the base's, on the main process, which has the files."""
        if step and self._base is None:
            self._base = self.evaluation(0)
        trained, base, hacking = self.score(evaluation), self._base, HackingScore()
        if step and base is not None and base.key == evaluation.key:
            hacking = self.radar(base, evaluation)
        rule = self.hacking
        quality = trained if rule is None else rule.quality(evaluation, trained, hacking)
        return Judged(trained=trained, quality=quality, hacking=hacking)

    def _renew_lora(self) -> None:
        """Put the checkpoint's LoRA at the root, where that of a later iteration may lie."""
        saved, root = self.checkpoints.path(self.done) / FILE, self.folder / FILE
        if saved.is_file() and not (root.is_file() and root.read_bytes() == saved.read_bytes()):
            write_bytes(root, saved.read_bytes())

    def _restore(self, state: dict[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        self._restore_optimizer(state)
        self._restore_memories(state)
        self.runtime.load_state_dict(state["runtime"])
        self.done = self.saved = state["iteration"]
        self.elapsed = state["elapsed"]
        self.rollbacks = [(best, at) for best, at in state["rollbacks"]]
        self.ended_by_rollback = state["ended_by_rollback"]
        if state["best"] and state.get("best_by") == self._best_by:
            self.best = tuple(state["best"])  # type: ignore[assignment]

    def _restore_optimizer(self, state: dict[str, Any]) -> None:
        settings = [{k: g[k] for k in RECIPE_OPTIONS} for g in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        # The moments are the checkpoint's; what the recipe sets is the recipe's, changed or not.
        for group, setting in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(setting)

    def _restore_memories(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint remembers of prompts and steps, if it remembers any."""
        for name, memory in self._memories.items():
            if state.get(name) is not None:
                memory.load_state_dict(state[name])

    @property
    def _best_by(self) -> str | None:
        """What the rule decides the best checkpoint by, None for the trained score."""
        return None if self.hacking is None else self.hacking.best_by

    # --- in the loop ------------------------------------------------------------------------

    def after(self) -> None:
        """Evaluate and save after an iteration when it is time."""
        every, o = self.evaluate_every, self.options
        if every and self.done % every == 0 and self.done < o.iterations:
            self.evaluate_policy()
            self._apply_hacking_rule()
        if self.done % o.checkpoint_every == 0:
            self.save()

    def log(self, iteration: int, rollout: Rollout, metrics: dict[str, float]) -> None:
        """Log an iteration that is done: its metrics, and some images when it is time."""
        self.done, self._policy.whole = iteration + 1, True
        every = self.options.sample_every
        if self.report is not None:
            self.report.log(self.done, metrics)
            images = rollout.images[:GRID_IMAGES]  # none of stored groups
            if every and self.done % every == 0 and len(images):
                rows = rollout.tree.prompt_of_leaves()[:GRID_IMAGES].tolist()
                self.report.log_images(self.done, images, [rollout.prompts[i] for i in rows])
        shown = {"reward": metrics["reward/mean"]}
        if metrics["groups/no_signal"] and "book" not in self._memories:
            shown["groups without signal"] = metrics["groups/no_signal"]
        if "workers/joined" in metrics:
            shown["workers"] = int(metrics["workers/joined"])
        self.steps.advance(shown)

    def evaluate_policy(self, *, whole: bool = False) -> Evaluation | None:
        """Score the weights that the run would export now, and remember the best.

        whole: at every number of steps that evaluation names, not at the first alone.
        """
        if self.evaluator is None:
            return None
        if self._latest is not None and self._latest[0] == self.done:
            evaluation = self._latest[1]
            if not whole or len(evaluation.at_steps) == len(self.evaluator.at_steps):
                return evaluation
        with self._policy.using(self._policy.export_adapter):
            self._evaluate_refined("both")
            evaluation = self._evaluate(self.done, whole=whole)
        with self._policy.disabled():
            self._evaluate_refined("refiner")
        self._latest = self.done, evaluation
        # The main process knows, which has the base's evaluation.
        judged = self.runtime.from_main(
            lambda: json.dumps(self._history[self.done].quality).encode()
        )
        score = json.loads(judged)
        # NaN is no score: as the first one it would stay the best for good.
        if not math.isnan(score) and (self.best is None or score > self.best[0]):
            self.best = (score, self.done)
            self.saved = -1  # a checkpoint of this step, if there is one, knows an older best
            self.save()
        return evaluation

    def _evaluate(self, step: int, *, whole: bool) -> Evaluation:
        assert self.evaluator is not None
        # Its own backbone: the same network, with the guidance of evaluation; and the weights
        # that the LoRA meets elsewhere, whatever it was trained beside.
        network = self._policy.network
        of = f"the LoRA of iteration {step}" if step else "the base"
        with phase("evaluate"), exact_weights(network):
            velocity = self._policy.stepwise(self.evaluator.backbone.velocity)
            evaluation = self.evaluator(velocity, self.runtime, of, whole=whole)
        if self.runtime.is_main:
            self._record(step, evaluation)
        return evaluation

    def _evaluate_refined(self, name: str) -> None:
        """Log the scores, against the prompts' own words, of images of a refiner's words."""
        rewording = self._memories.get("refiner")
        if rewording is None or self.evaluator is None:
            return
        with phase("evaluate"), exact_weights(self._policy.network):
            prompts = rewording.best(self.evaluator.prompts)
            evaluator = replace(self.evaluator, prompts=prompts)
            velocity = self._policy.stepwise(evaluator.backbone.velocity)
            evaluation = evaluator(velocity, self.runtime, "refined prompts", whole=False)
        if self.report is not None:
            self.report.log(
                self.done, {f"eval/{name}/{n}": evaluation.mean(n) for n in evaluation.names}
            )

    def _record(self, step: int, evaluation: Evaluation) -> None:
        """Log and save an evaluation, on the main process."""
        measures = evaluation.measures()
        scores = {f"eval/{name}": values.nanmean().item() for name, values in measures.items()}
        if step == 0:
            self._base = evaluation
        judged = self._history[step] = self._judge(step, evaluation)
        scores |= judged.hacking.metrics()
        # The line first: a resumed run evaluates the base again only if the file is missing.
        if self.report is not None:
            self.report.log(step, scores)
            self.report.sync()
        evaluation.save(self.evaluation_path(step))
        if judged.hacking.reasons:
            if self.ledger.last("hacking") is None:
                self._print(f"Iteration {step} may be hacking its reward. {judged.hacking}")
            self.ledger.append("hacking", step=step, detail=str(judged.hacking))

    # --- what follows hacking ---------------------------------------------------------------

    def _apply_hacking_rule(self) -> None:
        """Do what run.on_hacking says. The main process decides, which knows all evaluations."""
        if self.hacking is None or self.done >= self.options.iterations:
            return
        if self.ended_by_rollback:
            self.stopped = f"Ended at iteration {self.done} by run.on_hacking."
            return
        reason = self.hacking.reason(self._current_history()) if self.runtime.is_main else ""
        if not self.runtime.any(bool(reason)):
            return
        action, best = self.hacking.options.action, self.best
        if action == "warn":
            self._print(f"Iteration {self.done}, run.on_hacking: {reason}")
            return
        if action == "raise_kl" and len(self.rollbacks) >= MOST_RAISES:
            action = "rollback"
        if best is None or not self._main_finds(lambda: best[1] in self.checkpoints.steps()):
            self._end(reason)  # there is nothing to return to
            return
        name = self.checkpoints.path(best[1]).name
        if action == "stop":
            by = "by that reward" if self.hacking.options.held_out else "before that"
            self._end(f"{reason} The best checkpoint {by} is {name}.")
            return
        self._roll_back(best[1])
        reason = f"{reason} The weights are again those of {name}."
        if action == "rollback":
            self.ended_by_rollback = True
            self._end(reason)
            return
        text = f"Iteration {self.done}, run.on_hacking: {reason}"
        self._print(f"{text} objective.kl_coef is {self.kl_coef:g} now.")

    def _end(self, reason: str) -> None:
        self.stopped = f"Stopped at iteration {self.done} by run.on_hacking: {reason}"
        self._print(self.stopped)

    def _current_history(self) -> dict[int, Judged]:
        """Return the evaluations of the weights that today's came from."""
        return {
            step: judged
            for step, judged in self._history.items()
            if not any(best < step <= at for best, at in self.rollbacks)
        }

    def _roll_back(self, step: int) -> None:
        """Take weights and optimizer of a checkpoint; iterations are counted on."""
        path = self.checkpoints.path(step) / STATE
        state = parse_state(self.runtime.from_main(path.read_bytes), path)
        self._policy.load_adapters(state["policy"])
        self._restore_optimizer(state)
        self._restore_memories(state)
        self.rollbacks.append((step, self.done))
        if self.runtime.is_main:
            self.ledger.append("rollback", step=self.done, to=step, kl_coef=self.kl_coef)
        self._latest, self.saved = None, -1  # both are of the weights that are gone

    @property
    def kl_coef(self) -> float | None:
        """The weight of the KL penalty after run.on_hacking raised it; None is the recipe's."""
        if self.hacking is None or self.hacking.options.action != "raise_kl":
            return None
        return self.hacking.kl_coef(len(self.rollbacks))

    def evaluation_path(self, step: int) -> Path:
        return evaluation_file(self.folder, step)

    def evaluation(self, step: int) -> Evaluation | None:
        """Return what was measured after an iteration; None where nothing or a damaged file is."""
        path = self.evaluation_path(step)
        if not path.exists():
            return None
        try:
            return Evaluation.load(path)
        except DamagedFile as error:
            LOG.warning("%s: it is made again where its weights are, and left out elsewhere", error)
            return None

    def save(self) -> None:
        """Write a checkpoint to resume from, and the LoRA at the root. All call it together."""
        if self.saved == self.done:
            return
        with phase("save"):
            self._check_finite()
            memories = self._memory_states()
            if self.runtime.is_main:
                self._write(memories)
            self.saved = self.done
            self.runtime.wait()

    def _memory_states(self) -> dict[str, Any]:
        """Return the states of all memories. All processes call it together."""
        return {name: memory.state_dict() for name, memory in self._memories.items()}

    def _write(self, memories: dict[str, Any]) -> None:
        """Write the files of a checkpoint.

        The state comes last: once it is there, a resumed run takes the rest for written.
        """
        if self.report is not None:
            self.report.sync()
        state = {
            "policy": self._policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "runtime": self.runtime.state_dict(),
            "iteration": self.done,
            "elapsed": self.seconds(),
            "best": list(self.best) if self.best else None,
            "best_by": self._best_by,
            "rollbacks": [list(rollback) for rollback in self.rollbacks],
            "ended_by_rollback": self.ended_by_rollback,
        } | memories
        pipeline, adapter = self._policy.backbone.pipeline, self._policy.export_adapter
        folder = self.checkpoints.path(self.done)
        for place in (folder, self.folder):
            save_lora(pipeline, place, adapter=adapter)
        best = self.best[1] if self.best else None
        self.checkpoints.save(self.done, state, best=best)
        digests = {name: sealed_digest(folder / name) for name in (STATE, FILE)}
        self.ledger.append("checkpoint", step=self.done, digests=digests)

    def _check_finite(self) -> None:
        """Raise UserError for weights that must not be saved, the same on all processes."""
        state = {"policy": self._policy.state_dict(), "optimizer": self._optimizer.state_dict()}
        try:
            check_finite(state, self.checkpoints.path(self.done))
        except DamagedFile as error:
            steps = self.checkpoints.steps()
            last = f"{self.checkpoints.path(steps[-1])} is the last" if steps else "there is none"
            raise UserError(
                f"the policy or its optimizer is not finite after iteration {self.done}, so no "
                f"checkpoint and no LoRA was saved ({last}): lower optim.lr, and resume from there"
            ) from error

    def record_stop(self) -> None:
        """Write in the ledger how the run ended, once everything that ends it is written."""
        interrupted = self.interrupted
        if interrupted:  # without the last evaluation
            reason = "interrupted"
        elif self.done >= self.options.iterations:
            reason = "finished"
        else:
            reason = "time" if self.out_of_time else "hacking"
        self._write_stop(reason, complete=not interrupted, detail=self.stopped)

    def _write_stop(self, reason: str, *, complete: bool, detail: str) -> None:
        if self.runtime.is_main:
            self.ledger.append("stop", step=self.done, seconds=self.seconds(), reason=reason,
                               complete=complete, detail=detail)  # fmt: skip

    def seconds(self) -> float:
        """Return the seconds of training, earlier sessions included."""
        return self.elapsed + time.monotonic() - self._began

    def should_stop(self) -> bool:
        """Return whether time is up, a signal came or the rule stops; the same on all processes."""
        limit, total = self.options.max_minutes, self.options.iterations
        late = self.runtime.any(limit is not None and self.seconds() >= 60 * limit)
        stopped, interrupted = self.runtime.any(bool(self.stopped)), self.interrupted
        if late and not stopped and not interrupted and self.done < total:
            self.out_of_time = True
            self.stopped = (
                f"Stopped by {TIME_LIMIT} after {self.done} of {total} iterations; continue: "
                f"flowrl train --resume {shlex.quote(str(self.folder))} {TIME_LIMIT}=null"
            )
        return late or interrupted or stopped

    @property
    def interrupted(self) -> bool:
        """Whether a signal came to any process; all must ask together."""
        return self.runtime.any(bool(self._request.name))

    @contextmanager
    def session(self) -> Iterator[None]:
        """Show progress, keep the report's files open and handle signals inside the block.

        Ctrl-C, SIGTERM and SIGHUP let the iteration end and save; a second one stops at once. When
        an error ends the block, what is whole is saved, and a note on the error says what.
        """
        with when_done(self._heed) as self._request:
            with self.report or nullcontext(), self.steps:
                try:
                    yield
                except BaseException as error:
                    if isinstance(error, Exception | KeyboardInterrupt | Interrupted):
                        error.add_note(self._rescue(error))
                    with suppress(OSError):  # such as of a full disk, which is what `error` says
                        detail = f"{type(error).__name__}: {error}"
                        self._write_stop("error", complete=False, detail=detail)
                    raise
                if self._request.name:
                    source = signal_source(self._request.number)
                    self._print(f"Stopped by {source}. {self._go_on()}")

    def _heed(self, request: StopRequest) -> None:
        """Print that a signal came; a terminal that hung up takes no more text."""
        if not self.runtime.is_main:
            return
        if request.name == "SIGHUP" and self.steps.console.is_terminal:
            self.steps.console.quiet = True
        work = "evaluation" if in_phase("evaluate") else "iteration"
        source = signal_source(request.number)
        text = f"{source}: ends after this {work}; a second one ends at once.\n"
        text = "\n" + text if self.steps.console.is_terminal else text  # below the bar
        with suppress(OSError):
            os.write(2, text.encode())  # whatever this signal has interrupted may be printing

    # --- after an error ---------------------------------------------------------------------

    def _rescue(self, error: BaseException) -> str:
        """Save unless a part of an iteration would be; return a sentence on what is saved.

        This process alone does it: the others may be lost.
        """
        if getattr(as_failure(error), "cause", "") == "memory":
            for one in (error, error.__cause__):
                traceback.clear_frames(one and one.__traceback__)  # which hold the tensors
        try:
            policy = self._policy
        except AttributeError:  # before `begin`
            return "Nothing was done yet, and nothing is changed."
        if self.saved == self.done or not self.runtime.is_main:
            return self._go_on()
        if not policy.whole:
            return f"Iteration {self.done + 1} had begun to train and is not saved. {self._go_on()}"
        try:
            with phase("save"):
                self._check_finite()
                self._write(self._memory_states())
            self.saved = self.done
        except Exception as second:
            return f"Iteration {self.done} cannot be saved ({second}). {self._go_on()}"
        return self._go_on()

    def _go_on(self) -> str:
        """Return a sentence on the newest checkpoint."""
        steps = self.checkpoints.steps()
        if not steps:
            return "No checkpoint is saved."
        return (
            f"Saved: {self.checkpoints.path(steps[-1])}, after {steps[-1]} of "
            f"{self.options.iterations} iterations. The same command continues it."
        )

    def _print(self, text: str) -> None:
        self.steps.console.print(text, highlight=False, markup=False)
