"""A run on disk: what is restored before the loop, kept during it, and handed over after it."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.lora_files import save_lora
from flowrl.backbones.policy import Policy
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.quantization.linear import exact
from flowrl.scoring.spec import RewardSpec, trained
from flowrl.training.checkpoint import Checkpoints, random_state, restore_random_state
from flowrl.training.evaluate import Evaluation, Evaluator, is_hacking, measured
from flowrl.training.tracking import Report
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import Steps

# --- When to stop: the trained reward still rises, and one that is only measured falls ---------


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Stop after `patience` evaluations in a row that look like hacking, see `is_hacking`.

    held_out: name of the reward that is only measured; sign: -1 where less of it is better.
    margin: how far it must have fallen, in its own units.
    """

    held_out: str
    patience: int
    margin: float = 0.0
    sign: float = 1.0

    def score(self, evaluation: Evaluation) -> float:
        """The held-out mean, higher is better; NaN when no image has it."""
        return self.sign * evaluation.mean(self.held_out)

    def reason(self, history: Mapping[int, tuple[float, float]]) -> str:
        """Why to stop, for people, or "" to go on.

        history: (trained score, `score`) of evaluations by their iteration.
        """
        steps = [step for step in sorted(history) if not any(map(math.isnan, history[step]))]
        scores, held_out = ([history[step][i] for step in steps] for i in (0, 1))
        if not is_hacking(scores, held_out, self.patience, margin=self.margin):
            return ""
        best, last = max(steps, key=lambda step: (history[step][1], step)), steps[-1]
        values = [self.sign * history[step][1] for step in (best, last)]
        return (
            f"Stopped at iteration {last} by run.stop_when_hacking: since iteration {best} the "
            f"trained reward went from {history[best][0]:.4g} to {history[last][0]:.4g}, while the "
            f"held-out {self.held_out} went from {values[0]:.4g} to {values[1]:.4g}."
        )


def stop_rule(
    specs: Sequence[RewardSpec],
    prompts: Sequence[PromptRecord],
    *,
    held_out: str,
    patience: int,
    margin: float,
) -> StopRule:
    """The rule of run.stop_when_hacking. prompts: those of evaluation.

    Raises UserError unless `held_out` names a reward that is held out and applies to some of
    them, and every trained reward does, too: without its score nothing could be compared.
    """
    option = "run.stop_when_hacking.held_out"
    spec = measured(specs, prompts, held_out, option)
    if not spec.held_out:
        raise UserError(
            f"{option} is {held_out!r}, which is trained: name a reward that is only measured, "
            "with held_out: true"
        )
    for other in trained(specs):
        if other.whole_groups:  # never measured there
            continue
        if not any(other.applies(p.text, p.metadata) for p in prompts):
            raise UserError(
                f"run.stop_when_hacking compares the trained rewards, but {other.name!r} applies "
                f"to none of the {len(prompts)} held-out prompts: give evaluation.prompts that it "
                "can judge, or more evaluation.images, or set the rule to null"
            )
    sign = -1.0 if spec.weight < 0 else 1.0
    return StopRule(held_out=held_out, patience=patience, margin=margin, sign=sign)


# --- A run on disk -----------------------------------------------------------------------------

SHOWN = 16  # images on a sample sheet
OPTIONS = ("lr", "betas", "weight_decay")  # of the optimiser, that a recipe sets


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How often a run saves, evaluates and shows: the options of the same names under `run`."""

    iterations: int
    max_minutes: float | None
    checkpoint_every: int
    evaluate_every: int
    sample_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGrid:
    """What is shown of a rollout, which is gone by then: images (n, 3, H, W), n captions."""

    images: Tensor
    captions: list[str]

    @classmethod
    def of(cls, rollout: Rollout) -> "SampleGrid":
        """Its first images; none of a stored one, which has none."""
        prompts = [rollout.prompts[i] for i in rollout.tree.prompt_of_leaves()[:SHOWN].tolist()]
        return cls(images=rollout.images[:SHOWN].clone(), captions=prompts)


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run in one folder. Only the main process writes; all take part in decisions.

    `evaluator` is None when there is nothing held out. `score` turns an evaluation into the
    number that training raises; its highest value is the best checkpoint. With `stop`, a rule that
    compares it with a held-out score at the evaluations during training, the highest value of that
    one is the best.
    """

    folder: Path
    settings: RunSettings
    runtime: Runtime
    checkpoints: Checkpoints
    evaluator: Evaluator | None
    score: Callable[[Evaluation], float]
    report: Report | None  # None on other processes
    steps: Steps | None
    stop: StopRule | None = None
    resume: dict[str, Any] | None = None  # a checkpoint's state
    done: int = 0  # iterations
    elapsed: float = 0.0  # seconds of training in earlier sessions
    best: tuple[float, int] | None = None
    saved: int = -1
    stopped: str = ""  # why the rule ended the run, for people
    _policy: Policy = field(init=False)
    _optimizer: torch.optim.Optimizer = field(init=False)
    _began: float = field(init=False, default_factory=time.monotonic)
    _asked_to_stop: bool = field(init=False, default=False)
    _history: dict[int, tuple[float, float]] = field(init=False, default_factory=dict)
    _latest: tuple[int, Evaluation] | None = field(init=False, default=None)

    # --- before -----------------------------------------------------------------------------

    def begin(self, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
        """Restore or evaluate the base pipeline -> the iteration to go on with.

        A run that its stop rule has ended goes on with none: it stays as it ended.
        """
        self._policy, self._optimizer = policy, optimizer
        if self.resume is not None:
            self._restore(self.resume)
            self.runtime.wait()  # all have read their checkpoint
            if self.runtime.is_main:
                self.checkpoints.remove_after(self.done)
        else:
            self.save()  # from here on the run can be resumed
        self._recall()
        if self.evaluator is not None and not self._base_is_known(self.evaluator):
            with policy.disabled():
                self._evaluate(0)
        every = self.settings.evaluate_every
        if self.done and every and self.done % every == 0 and self._unmeasured(self.done):
            self.evaluate_policy()  # the session before was stopped by it
        self._judge()
        self._began = time.monotonic()
        return self.settings.iterations if self.stopped else self.done

    def _base_is_known(self, evaluator: Evaluator) -> bool:
        """Whether the base was evaluated as this run evaluates; a resumed run may do it anew."""
        path = self.evaluation_path(0)
        return path.exists() and Evaluation.load(path).key == evaluator.key

    def _unmeasured(self, step: int) -> bool:
        due = self.evaluator is not None and step < self.settings.iterations
        return due and not self.evaluation_path(step).exists()

    def _recall(self) -> None:
        """What earlier sessions measured at the evaluations up to here, for the stop rule."""
        if self.stop is None or self.evaluator is None:
            return
        for step in range(0, self.done + 1, self.settings.evaluate_every):
            path = self.evaluation_path(step)
            if path.exists():
                evaluation = Evaluation.load(path)
                if evaluation.key == self.evaluator.key:
                    self._history[step] = self.score(evaluation), self.stop.score(evaluation)

    def _restore(self, state: dict[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        settings = [{k: g[k] for k in OPTIONS} for g in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        # The moments are the checkpoint's; what the recipe sets is the recipe's, changed or not.
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.runtime.load_state_dict(state["runtime"])
        restore_random_state(state["random"])
        self.done, self.elapsed, self.saved = (
            state["iteration"],
            state["elapsed"],
            state["iteration"],
        )
        if state["best"] and state.get("best_by") == self._best_by:
            self.best = tuple(state["best"])  # type: ignore[assignment]

    @property
    def _best_by(self) -> str | None:
        """What the best checkpoint is best by: a held-out reward, or None for what is trained."""
        return None if self.stop is None else self.stop.held_out

    # --- during -----------------------------------------------------------------------------

    def after(self, iteration: int, sheet: SampleGrid, metrics: dict[str, float]) -> None:
        """Report an iteration; save, evaluate and show when it is time."""
        self.done, s = iteration + 1, self.settings
        if self.report is not None:
            self.report.log(self.done, metrics)
            shown = s.sample_every and self.done % s.sample_every == 0
            if shown and len(sheet.images):
                self.report.images(self.done, sheet.images, sheet.captions)
        if self.steps is not None:
            shown = {"reward": metrics["reward/mean"], "no signal": metrics["groups/no_signal"]}
            self.steps.advance(shown)
        if s.evaluate_every and self.done % s.evaluate_every == 0 and self.done < s.iterations:
            self.evaluate_policy()
            self._judge()
        if self.done % s.checkpoint_every == 0:
            self.save()

    def evaluate_policy(self) -> Evaluation | None:
        """Score the weights that the run would hand over now, and remember the best."""
        if self.evaluator is None:
            return None
        if self._latest is not None and self._latest[0] == self.done:
            return self._latest[1]
        with self._policy.using(self._policy.best_name):
            evaluation = self._evaluate(self.done)
        self._latest = self.done, evaluation
        score = self.score(evaluation) if self.stop is None else self.stop.score(evaluation)
        # NaN is no score: as the first one it would stay the best for good.
        if not math.isnan(score) and (self.best is None or score > self.best[0]):
            self.best = (score, self.done)
            self.saved = -1  # a checkpoint of this step, if there is one, knows an older best
            self.save()
        return evaluation

    def _evaluate(self, step: int) -> Evaluation:
        assert self.evaluator is not None
        # Its own backbone: the same network, with the guidance of evaluation; and the weights
        # that the LoRA meets elsewhere, whatever it was trained beside.
        try:
            with exact(self._policy.network):
                evaluation = self.evaluator(self.evaluator.backbone.velocity, self.runtime)
        except UserError:
            self.save()  # what was learned outlives what cannot be measured
            raise
        if self.runtime.is_main:
            measures = evaluation.measures(self.evaluator.quality)
            scores = {f"eval/{name}": values.nanmean().item() for name, values in measures.items()}
            # The line first: a resumed run evaluates the base again only if the file is missing.
            if self.report is not None:
                self.report.log(step, scores)
            evaluation.save(self.evaluation_path(step))
        if self.stop is not None:
            self._history[step] = self.score(evaluation), self.stop.score(evaluation)
        return evaluation

    def _judge(self) -> None:
        """End the run when the rule says so, and tell; the scores are those of all processes."""
        if self.stop is None or self.done >= self.settings.iterations:
            return
        self.stopped = self.stop.reason(self._history)
        if self.stopped and self.best is not None:
            best = self.checkpoints.path(self.best[1]).name
            self.stopped += f" The best checkpoint by that reward is {best}."
        if self.stopped and self.steps is not None:
            console = self.steps.console
            console.print(self.stopped, highlight=False, markup=False, soft_wrap=True)

    def evaluation_path(self, step: int) -> Path:
        return self.folder / "evaluations" / f"step-{step:06d}.safetensors"

    def save(self) -> None:
        """A checkpoint to resume from, and the LoRA at the root.

        The state comes last: once it is there, a resumed run takes the rest for written.
        """
        if self.saved == self.done:
            return
        if self.runtime.is_main:
            state = {
                "policy": self._policy.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "runtime": self.runtime.state_dict(),
                "random": random_state(),
                "iteration": self.done,
                "elapsed": self.seconds(),
                "best": list(self.best) if self.best else None,
                "best_by": self._best_by,
            }
            pipeline, adapter = self._policy.backbone.pipeline, self._policy.best_name
            for folder in (self.checkpoints.path(self.done), self.folder):
                save_lora(pipeline, folder, adapter=adapter)
            best = self.best[1] if self.best else None
            self.checkpoints.save(self.done, state, best=best)
        self.saved = self.done
        self.runtime.wait()

    # --- the end ----------------------------------------------------------------------------

    def seconds(self) -> float:
        """Seconds of training, earlier sessions included."""
        return self.elapsed + time.monotonic() - self._began

    def should_stop(self) -> bool:
        """Whether the time is up, a signal came or the rule says so; the same on every process."""
        limit = self.settings.max_minutes
        late = limit is not None and self.seconds() >= 60 * limit
        return self.runtime.any(late or self._asked_to_stop or bool(self.stopped))

    @property
    def interrupted(self) -> bool:
        """Whether a signal came, to any process; all must ask together."""
        return self.runtime.any(self._asked_to_stop)

    def finish(self) -> None:
        self.save()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around the loop: the progress bar, the report's files, and what Ctrl-C does.

        Ctrl-C and SIGTERM let the iteration end and save; a second one stops at once.
        """

        def ask(number: int, frame: FrameType | None) -> None:
            if self._asked_to_stop:
                raise KeyboardInterrupt
            self._asked_to_stop = True

        main_thread = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if main_thread else ()
        before = {number: signal.signal(number, ask) for number in signals}
        try:
            with self.report or nullcontext(), self.steps or nullcontext():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
