"""Rollout workers: units are asked of processes elsewhere, which may be slow, die, leave and come.

`WorkerPool` keeps so many workers, asks each unit of one of them, and of another one when that one
dies or is slow: an answer is a function of its unit, so that the first one counts and the others
are dropped. `RemoteGenerator` is a `RolloutGenerator` that asks a pool. Who the workers are is told
by a `Cluster`; Ray's is in `flowrl/assembly/worker.py`.
"""

import functools
import logging
import queue
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl.backbones.policy import Policy
from flowrl.errors import MachineFailure, UserError
from flowrl.sampling.rollout import (
    Parts,
    RolloutGenerator,
    RolloutRequest,
    Timer,
    submit_images,
)
from flowrl.sampling.units import (
    Stage,
    Unit,
    UnitAnswer,
    pack_weights,
    sample_unit,
    tree_digest,
    with_prompts,
)
from flowrl.scoring.scorer import HEARTBEAT, Scoring
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.trajectory import Conditioning
from flowrl.trees.plan import TreePlan
from flowrl.trees.presets import ode
from flowrl.utils.digests import digest

LOG = logging.getLogger(__name__)
TICK = 0.25  # seconds between looks for slow workers
IN_FLIGHT = 2  # units of one worker: one is drawn while the other's rewards work
LEAST = 5.0  # seconds that a unit may take before it counts as slow
UNKNOWN = 60.0  # the same, before any unit of the run was answered
REMEMBERED = 50  # times of units, for their median
TRIES = 3  # answers that are errors of a worker's machine, before the run ends
DEATHS = 20  # workers that die of one unit, before the run ends
LAUNCHES = 5  # of one worker that end before any can work, before the run ends
REST = 60.0  # most seconds between tries to begin
ADAPTERS = 3  # versions of the weights that are kept for workers
TABLE = 60.0  # seconds between tables in the log


class Remote(Protocol):
    """A worker elsewhere. Futures raise what ended it; a UserError is an answer that failed."""

    def join(self, probe: bytes, weights: Any) -> "Future[Joined]":
        """Load everything and draw the probe unit."""
        ...

    def draw(self, unit: bytes, weights: Any) -> "Future[bytes]":
        """Return an `UnitAnswer`."""
        ...

    def kill(self) -> None: ...


class Cluster(Protocol):
    """Where workers run."""

    def start(self) -> None: ...

    def put(self, data: bytes) -> Any:
        """Return what stands for the data in questions; it is sent to each machine once."""
        ...

    def launch(self, number: int) -> Remote:
        """Begin a worker, which may have to wait for a place."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a worker says when it is ready."""

    where: str  # address and process, for people
    machine: str  # device and versions
    digest: str  # of the probe's latents


@dataclass(slots=True, kw_only=True)
class WorkerStats:
    """One line of the table of workers; a worker that is replaced keeps its line."""

    number: int
    where: str = ""
    state: str = "waits for a place"
    units: int = 0
    seconds: float = 0.0  # of drawing and scoring
    failures: int = 0  # deaths, errors and units that another one answered after it was slow


@dataclass(slots=True, kw_only=True)
class _Worker:
    stats: WorkerStats
    remote: Remote | None = None
    joined: bool = False
    asked: dict[str, float] = field(default_factory=dict)  # key -> when
    launches: int = 0  # in a row that ended before it joined
    rest_until: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Question:
    unit: bytes
    weights: Any
    what: str  # for people
    future: "Future[UnitAnswer]"
    asked: dict[int, float] = field(default_factory=dict)  # number of a worker -> when
    tries: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of the weights that sample."""

    digest: str
    weights: Any  # what `Cluster.put` returned


class WorkerPool:
    """Keeps workers and asks units of them, from a thread of its own, while it is entered.

    Args:
        count: how many workers; those without a place wait until a machine joins.
        slow_after: a unit is asked of another worker, too, after this many times the median time.
        timeout: seconds after which a worker that does not answer is ended and replaced.
        join_timeout: seconds without any worker after which the run ends.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        count: int,
        slow_after: float,
        timeout: float,
        join_timeout: float,
    ):
        self.cluster, self.slow_after = cluster, slow_after
        self.timeout, self.join_timeout = timeout, join_timeout
        self._workers = [_Worker(stats=WorkerStats(number=i)) for i in range(count)]
        self._questions: dict[str, _Question] = {}
        self._answered: OrderedDict[str, str] = OrderedDict()  # key -> digest, the last ones
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._probe: tuple[Unit, Adapter] | None = None
        self._expected: str | None = None
        self._ever_joined = False
        self._alone_since = time.monotonic()
        self._failure: UserError | None = None  # that ended it
        self._told = 0.0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- called by the trainer ----------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self, probe: Unit, adapter: Sequence[Tensor], expected: str | None) -> None:
        """Start the workers. One that answers the probe with another digest gets no work.

        expected: the digest; None takes that of the first worker.
        """
        self.cluster.start()
        self._probe, self._expected = (probe, self.adapter(adapter)), expected
        self._alone_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rollout workers", daemon=True)
        self._thread.start()

    def adapter(self, tensors: Sequence[Tensor]) -> Adapter:
        """Return a version of the weights, which is sent once for all units."""
        data = pack_weights(tensors)
        key = digest(data)
        if key not in self._adapters:
            self._adapters[key] = Adapter(digest=key, weights=self.cluster.put(data))
            while len(self._adapters) > ADAPTERS:
                self._adapters.popitem(last=False)
        return self._adapters[key]

    def ask(self, unit: Unit, adapter: Adapter, what: str) -> "Future[UnitAnswer]":
        """Return the future answer of a unit. It raises UserError when there will be none."""
        data, future = unit.to_bytes(), Future()
        question = _Question(unit=data, weights=adapter.weights, what=what, future=future)
        self._events.put(functools.partial(self._add, digest(data), question))
        return future

    def wait(self, futures: Sequence["Future[UnitAnswer]"]) -> list[UnitAnswer]:
        """Return the answers; say every `HEARTBEAT` who is waited for."""
        began, found = time.monotonic(), []
        for future in futures:
            while True:
                try:
                    found.append(future.result(timeout=HEARTBEAT))
                    break
                except TimeoutError:
                    seconds = time.monotonic() - began
                    LOG.warning("waiting for %s, for %.0f s", self.missing(), seconds)
        if time.monotonic() - self._told > TABLE:
            self._told = time.monotonic()
            self.tell()
        return found

    def missing(self) -> str:
        """Say which workers are waited for, with what."""
        now, names = time.monotonic(), []
        if not any(worker.joined for worker in self._workers):
            return f"a worker to join ({self._workers[0].stats.state})"
        for question in list(self._questions.values()):
            who = [
                f"worker {n} ({self._workers[n].stats.where}) since {now - at:.0f} s"
                for n, at in sorted(question.asked.items())
            ]
            names.append(f"{question.what}: {' and '.join(who) or 'no worker is free'}")
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        return "; ".join(names[:3]) + more or "the last answer"

    def table(self) -> list[WorkerStats]:
        """Return a line for each worker."""
        return [worker.stats for worker in self._workers]

    def metrics(self) -> dict[str, float]:
        """Return what the workers did so far, as metrics."""
        found = {"workers/joined": float(sum(worker.joined for worker in self._workers))}
        for stats in self.table():
            own = f"workers/{stats.number}"
            found |= {f"{own}/units": float(stats.units), f"{own}/seconds": stats.seconds}
            found[f"{own}/failures"] = float(stats.failures)
        return found

    def tell(self) -> None:
        """Log the table."""
        lines = [
            f"  {s.number:>6}  {s.units:>5}  {s.seconds:>8.1f}  {s.failures:>8}  {s.state}"
            + f", {s.where}" * bool(s.where)
            for s in self.table()
        ]
        LOG.info("%s", "\n".join(["  worker  units   seconds  failures  state", *lines]))

    def close(self) -> None:
        """End the workers, and what was started for them."""
        if self._thread is None:
            return
        self.tell()
        self._events.put(None)
        self._thread.join(30.0)
        self._thread = None
        self.cluster.close()

    # --- the thread, which alone changes the state below ---------------------------------------

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=TICK)
                if event is None:
                    break
                event()
                self._tick()
            except queue.Empty:
                self._tick()
            except Exception as error:  # a mistake here must not leave the trainer waiting
                LOG.exception("the thread that asks workers fails")
                self._fail_all(UserError(f"workers cannot be asked any more: {error}"))
        for worker in self._workers:
            if worker.remote is not None:
                worker.remote.kill()

    def _tick(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.remote is None and now >= worker.rest_until and self._failure is None:
                self._launch(worker)
            elif worker.joined and worker.asked and now - min(worker.asked.values()) > self.timeout:
                self._lose(worker, f"did not answer for {self.timeout:g} s")
        self._assign(now)
        self._ask_again(now)
        if any(worker.joined for worker in self._workers):
            self._alone_since = now
        elif self._questions and now - self._alone_since > self.join_timeout:
            waited = f"no worker joined for {self.join_timeout:g} s (rollout.workers.join_timeout)"
            self._fail_all(MachineFailure("peer", waited))

    def _add(self, key: str, question: _Question) -> None:
        if self._failure is not None:
            question.future.set_exception(self._failure)
        elif key in self._questions:  # asked twice is answered once
            self._questions[key].future.add_done_callback(
                functools.partial(_pass_on, question.future)
            )
        else:
            self._questions[key] = question

    def _launch(self, worker: _Worker) -> None:
        assert self._probe is not None
        probe, adapter = self._probe
        remote = worker.remote = self.cluster.launch(worker.stats.number)
        worker.stats.state, worker.stats.where = "waits for a place", ""
        joining = remote.join(probe.to_bytes(), adapter.weights)
        joining.add_done_callback(self._event(self._join, worker, remote))

    def _event(self, handle: Callable[..., None], *args: Any) -> Callable[[Future], None]:
        return lambda future: self._events.put(functools.partial(handle, *args, future))

    def _join(self, worker: _Worker, remote: Remote, future: "Future[Joined]") -> None:
        if worker.remote is not remote:
            return
        try:
            said = future.result()
            self._check(worker, said)
        except Exception as error:
            self._cannot_begin(worker, error)
            return
        worker.joined, worker.launches, self._ever_joined = True, 0, True
        worker.stats.where, worker.stats.state = said.where, "works"

    def _check(self, worker: _Worker, said: Joined) -> None:
        """Raise UserError for a worker that would draw other numbers."""
        self._expected = self._expected or said.digest
        if said.digest != self._expected:
            raise UserError(
                f"worker {worker.stats.number} ({said.where}) draws other numbers for the same "
                f"unit, so that results would depend on who draws: it is {said.machine}. Use one "
                "kind of GPU and the same versions everywhere"
            )

    def _cannot_begin(self, worker: _Worker, error: Exception) -> None:
        """Try again later; end the run where no worker ever began and none will."""
        worker.launches += 1
        why = (str(error).strip() or repr(error)).splitlines()[-1]
        LOG.warning("worker %d cannot begin: %s", worker.stats.number, why)
        known = isinstance(error, UserError) and not isinstance(error, MachineFailure)
        hopeless = known and all(other.launches for other in self._workers)
        if not self._ever_joined and (hopeless or worker.launches >= (2 if known else LAUNCHES)):
            own = error if isinstance(error, UserError) else None
            self._fail_all(own or UserError(f"workers cannot begin: {why}"))
        self._lose(worker, f"cannot begin: {why}", rest=min(REST, 2.0**worker.launches / 2))

    def _assign(self, now: float) -> None:
        """Ask what nobody is asked, the workers with least to do first."""
        for key, question in self._questions.items():
            if question.asked:
                continue
            free = [w for w in self._workers if w.joined and len(w.asked) < IN_FLIGHT]
            if not free:
                return
            self._ask(min(free, key=lambda w: len(w.asked)), key, question, now)

    def _ask_again(self, now: float) -> None:
        """Ask what takes too long of a worker that has nothing to do."""
        known = statistics.median(self._times) if self._times else None
        limit = UNKNOWN if known is None else max(LEAST, self.slow_after * known)
        for key, question in self._questions.items():
            if not question.asked or now - max(question.asked.values()) < limit:
                continue
            idle = [
                w
                for w in self._workers
                if w.joined and not w.asked and w.stats.number not in question.asked
            ]
            if idle:
                for number in question.asked:
                    self._workers[number].stats.failures += 1
                self._ask(idle[0], key, question, now)

    def _ask(self, worker: _Worker, key: str, question: _Question, now: float) -> None:
        remote = worker.remote
        assert remote is not None
        worker.asked[key] = question.asked[worker.stats.number] = now
        answer = remote.draw(question.unit, question.weights)
        answer.add_done_callback(self._event(self._take, worker, remote, key))

    def _take(self, worker: _Worker, remote: Remote, key: str, future: "Future[bytes]") -> None:
        """Take an answer: the first one counts."""
        asked = worker.asked.pop(key, None) if worker.remote is remote else None
        question = self._questions.get(key)
        try:
            answer = UnitAnswer.from_bytes(future.result())
        except Exception as error:
            if worker.remote is remote:
                self._failed(worker, question, error)
            return
        now = time.monotonic()
        worker.stats.units += 1
        worker.stats.seconds += answer.seconds
        if asked is not None:
            self._times.append(now - asked)
        if question is None:
            self._compare(worker, key, answer)
            return
        if answer.key != key:
            raise RuntimeError(f"asked for {key}, got {answer.key}")
        del self._questions[key]
        self._answered[key] = answer.digest
        while len(self._answered) > REMEMBERED:
            self._answered.popitem(last=False)
        question.future.set_result(answer)

    def _compare(self, worker: _Worker, key: str, answer: UnitAnswer) -> None:
        if self._answered.get(key, answer.digest) != answer.digest:
            LOG.warning(
                "worker %d (%s) answered a unit with other latents than another worker: results "
                "depend on who draws",
                worker.stats.number, worker.stats.where,
            )  # fmt: skip

    def _failed(self, worker: _Worker, question: _Question | None, error: Exception) -> None:
        """Ask elsewhere, unless the unit itself is what fails."""
        number = worker.stats.number
        worker.stats.failures += 1
        if question is not None:
            question.asked.pop(number, None)
        if not isinstance(error, UserError):
            self._lose(worker, f"died ({type(error).__name__})", counted=True)
            if question is None:
                return
            question.deaths += 1
            if question.deaths >= DEATHS:
                text = f"{DEATHS} workers died of {question.what}, the last with: {error}"
                self._end(question, UserError(text))
            return
        if question is None:
            return
        question.tries += 1
        if not isinstance(error, MachineFailure) or question.tries >= TRIES:
            error.add_note(f"So says worker {number} ({worker.stats.where}).")
            self._end(question, error)

    def _end(self, question: _Question, error: Exception) -> None:
        key = next(k for k, q in self._questions.items() if q is question)
        del self._questions[key]
        question.future.set_exception(error)

    def _lose(self, worker: _Worker, why: str, *, rest: float = 0.0, counted: bool = False) -> None:
        """Give up a worker; another one takes its line, and others what it was asked."""
        stats = worker.stats
        if worker.joined:
            LOG.warning("worker %d (%s) %s: others go on", stats.number, stats.where, why)
        stats.failures += not counted
        stats.state, worker.joined = why, False
        worker.rest_until = time.monotonic() + rest
        if worker.remote is not None:
            worker.remote.kill()
        worker.remote = None
        worker.asked.clear()
        for question in self._questions.values():
            question.asked.pop(stats.number, None)

    def _fail_all(self, error: UserError) -> None:
        self._failure = error
        for question in self._questions.values():
            question.future.set_exception(error)
        self._questions.clear()


def _pass_on(to: Future, of: Future) -> None:
    error = of.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(of.result())


# --- what the trainer samples with ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGenerator(RolloutGenerator):
    """A generator whose batches are units for workers; texts are encoded in this process.

    Rewards that compare whole groups, which a unit may cut, are asked in this process, too.
    """

    pool: WorkerPool
    policy: Policy
    adapter: str  # that samples
    draws_alike: bool  # this process's network has the workers' bits, so that it can draw a probe
    precision: str | None = None  # of candidates, see `Stage`

    def _begin(
        self, request: RolloutRequest, own: Tensor, plan: TreePlan, cond: Conditioning, keep: bool
    ) -> Callable[[Timer], tuple[Parts, RewardResult]]:
        mine, (together, rows) = request.take(own), self.batch_shape(request, plan)
        here = [spec for spec in self.specs if spec.whole_groups]
        elsewhere = [spec for spec in self.specs if not spec.whole_groups]
        stage = Stage(
            precision=self.precision,
            num_inference_steps=self.num_inference_steps,
            rewards=tuple(spec.name for spec in elsewhere),
        )
        parts = [mine.only(part) for part in torch.arange(len(own)).split(together) if len(part)]
        if not self.pool.started:
            self._start(parts[0], cond, rows)
        adapter, asked = self.pool.adapter(self.policy.weights(self.adapter)), []
        for number, part in enumerate(parts):
            unit = Unit(
                request=part.take(torch.arange(len(part.prompt))),
                plan=plan,
                cond=cond.take(part.prompt.unique()),
                rows=rows,
                stage=stage,
                adapter=adapter.digest,
                keep=keep or bool(here),
            )
            what = f"unit {number + 1} of {len(parts)} of iteration {request.iteration}"
            asked.append(self.pool.ask(unit, adapter, what))
        return functools.partial(self._wait, parts, asked, elsewhere, here)

    def _start(self, part: RolloutRequest, cond: Conditioning, rows: int) -> None:
        """Start the pool, with two steps of the first batch as the probe.

        It has the shapes of the rollout, and its texts are those that are encoded now.
        """
        weights = self.policy.weights(self.adapter)
        probe = Unit(
            request=part.take(torch.arange(len(part.prompt))),
            plan=ode(2, 1),
            cond=cond.take(part.prompt.unique()),
            rows=rows,
            stage=Stage(num_inference_steps=2, rewards=()),
            adapter=digest(pack_weights(weights)),
            keep=False,
        )
        expected = None
        if self.draws_alike:
            tree, _, _ = sample_unit(replace(self, specs=(), num_inference_steps=2), probe)
            expected = tree_digest(tree)
        self.pool.start(probe, weights, expected)

    def _wait(
        self,
        requests: Sequence[RolloutRequest],
        asked: Sequence["Future[UnitAnswer]"],
        elsewhere: Sequence[RewardSpec],
        here: Sequence[RewardSpec],
        timer: Timer,
    ) -> tuple[Parts, RewardResult]:
        """Wait for the units; ask the rewards that compare groups."""
        began = time.perf_counter()
        answers = self.pool.wait(asked)
        waited = time.perf_counter() - began
        timer.lap(self.times[0])
        waited += timer.seconds.get("workers/waited", 0.0)  # of an iteration's first stage
        timer.seconds |= self.pool.metrics() | {"workers/waited": waited}
        scoring, parts = Scoring(specs=here, phase="rollout"), []
        for request, answer in zip(requests, answers, strict=True):
            if answer.tree is None or answer.levels is None:
                continue
            tree = with_prompts(answer.tree, request.prompt, self.backbone.device)
            images = answer.levels.float().div_(255)
            submit_images(scoring, images.split(self.decode_batch), request, len(tree.leaf))
            parts.append((tree, images))
        results = [answer.result for answer in answers]
        own = RewardResult.cat(results) if results else None
        return parts, self._joined(own, elsewhere, scoring.result(), here)

    def _joined(
        self,
        own: RewardResult | None,
        elsewhere: Sequence[RewardSpec],
        groups: RewardResult,
        here: Sequence[RewardSpec],
    ) -> RewardResult:
        """Return the scores of workers and of this process, in the order of the rewards."""
        if own is None or not here:
            return own or groups
        order = [spec.name for spec in [*elsewhere, *here]]
        columns = torch.tensor([order.index(spec.name) for spec in self.specs])
        both: Mapping[str, Tensor] = {
            name: torch.cat([getattr(own, name), getattr(groups, name)], 1)[:, columns]
            for name in ("scores", "valid", "applicable")
        }
        return RewardResult(
            **both,
            names=tuple(spec.name for spec in self.specs),
            errors=own.errors | groups.errors,
            seconds=own.seconds | groups.seconds,
        )
