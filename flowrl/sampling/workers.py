"""Run sampling jobs on remote workers that may crash, hang, leave or join.

A rollout is cut into jobs: the batches of trees that this process would sample itself. The result
of a job depends on the job, the weights and the recipe alone, so that the job of a worker that died
goes to another one and no bit changes. Workers are Ray actors, which Ray places and restarts; see
`flowrl/assembly/worker.py`. Nothing imports Ray before a pool starts.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from flowrl.backbones.policy import Policy
from flowrl.errors import MachineFailure, UserError
from flowrl.sampling.rollout import (
    Images,
    RolloutGenerator,
    RolloutRequest,
    Timer,
    decode,
    sample_request,
    submit_images,
)
from flowrl.scoring.scorer import HEARTBEAT, Scoring
from flowrl.scoring.spec import RewardResult
from flowrl.trajectory import Conditioning, Tree
from flowrl.trees.plan import TreePlan
from flowrl.trees.presets import ode
from flowrl.utils.digests import digest

LOG = logging.getLogger(__name__)
TRIES = 3  # workers that may die of one job before the run ends
PAUSE = 0.5  # seconds between two looks for a first worker


# --- a job ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Which generator of a recipe samples, and which rewards it asks."""

    precision: str | None = None  # of candidates; None: the network of images to learn from
    num_inference_steps: int
    rewards: tuple[str, ...]  # names


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """R trees that are sampled together."""

    request: RolloutRequest  # with their prompts alone
    plan: TreePlan
    cond: Conditioning  # of the request's prompts, on the CPU
    rows: int  # of each call of the network
    stage: Stage
    adapter: str  # digest of the weights that sample
    keep: bool = True  # return trees and images, and not their scores alone


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that has loaded everything and sampled the probe."""

    where: str  # host and process, for people
    machine: str  # device and versions
    digest: str  # of the probe's latents


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a worker made of a job."""

    worker: WorkerInfo
    result: RewardResult  # of the stage's rewards
    tree: Tree | None  # on the CPU; `prompt` counts in the job's prompts
    levels: Tensor | None  # (R * leaves, 3, H, W) uint8, the images as rewards see them


def sample_job(generator: RolloutGenerator, job: Job) -> tuple[Tree, Tensor, Scoring]:
    """Sample a job as its generator samples a batch; return trees, images and their scoring."""
    scoring = Scoring(specs=generator.specs, phase="rollout")
    cond = job.cond.to(generator.backbone.device)
    with torch.no_grad(), generator.network() as velocity:
        tree = sample_request(
            generator.backbone, velocity, cond, job.request, job.plan, generator.schedule(),
            job.rows,
        )  # fmt: skip
        images = decode(generator.backbone, tree.leaves(), generator.decode_batch)
        return tree, submit_images(scoring, images, job.request, len(tree.leaf)), scoring


def tree_digest(tree: Tree) -> str:
    """Return a digest of a tree's latents and of the means that they were sampled around."""
    return digest(pack_weights([tree.x, tree.mean_old]))


def pack_weights(tensors: Sequence[Tensor]) -> bytes:
    """Return an adapter's weights as a safetensors file."""
    plain = (tensor.detach().cpu().contiguous() for tensor in tensors)
    return save({f"{i:06d}": tensor for i, tensor in enumerate(plain)})


def unpack_weights(data: bytes) -> list[Tensor]:
    """Return the tensors of `pack_weights`, in their order."""
    tensors = load(data)
    return [tensors[name] for name in sorted(tensors)]


def on_device(tree: Tree, device: torch.device | str) -> Tree:
    """Return a tree with all its tensors on a device."""
    names = [f.name for f in fields(Tree) if f.type is Tensor]
    return replace(tree, **{name: getattr(tree, name).to(device) for name in names})


# --- the pool, in the training process -----------------------------------------------------------


class Cluster(Protocol):
    """Where workers run."""

    def start(self) -> None: ...

    def launch(self, probe: Job, weights: list[Any]) -> Any:
        """Return the handle of a new worker, which may have to wait for a place.

        Its methods are those of `flowrl.assembly.worker.Worker`, and return references.
        """
        ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Remote:
    number: int
    actor: Any
    joining: Any  # reference of its WorkerInfo; None once it has joined
    info: WorkerInfo | None = None
    jobs: int = 0  # in flight

    def __str__(self) -> str:
        return f"worker {self.number}" + (f" ({self.info.where})" if self.info else "")


@dataclass(slots=True, kw_only=True)
class PendingJob:
    """A job that a worker has, until its result is here."""

    job: Job
    weights: list[Any]  # reference of the packed weights; in a list, so that Ray leaves it alone
    what: str  # for people
    worker: _Remote
    reference: Any
    deaths: int = 0  # of workers that had it
    result: JobResult | None = None


class WorkerPool:
    """Workers that sample for this process, from the first rollout on while it is entered.

    Args:
        count: how many workers; those without a place wait until a machine joins.
        timeout: seconds without an answer, or without any worker, after which the run ends.
    """

    def __init__(self, cluster: Cluster, *, count: int, timeout: float):
        self.cluster, self.count, self.timeout = cluster, count, timeout
        self.restarts = 0
        self._workers: list[_Remote] = []
        self._expected: str | None = None  # digest of the probe's latents
        self._weights: tuple[str, list[Any]] = "", []  # digest and reference, the newest

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *error: object) -> None:
        if self.started:
            self._workers.clear()  # Ray ends actors that nobody can reach
            self.cluster.close()

    @property
    def started(self) -> bool:
        return bool(self._workers)

    def start(self, probe: Job, packed: bytes, expected: str | None) -> None:
        """Start the workers. One that samples the probe with another digest gets no work.

        expected: the digest; None takes that of the first worker.
        """
        self.cluster.start()
        self._expected = expected
        weights = self.put(probe.adapter, packed)
        for number in range(self.count):
            actor = self.cluster.launch(probe, weights)
            self._workers.append(_Remote(number=number, actor=actor, joining=actor.info.remote()))

    def put(self, adapter: str, packed: bytes) -> list[Any]:
        """Send packed weights to Ray's object store, once; return their reference in a list."""
        import ray

        if adapter != self._weights[0]:
            self._weights = adapter, [ray.put(np.frombuffer(packed, dtype=np.uint8))]
        return self._weights[1]

    def submit(self, job: Job, weights: list[Any], what: str) -> PendingJob:
        """Send a job to the worker with the fewest; wait for one where there is none."""
        worker, reference = self._send(job, weights)
        return PendingJob(job=job, weights=weights, what=what, worker=worker, reference=reference)

    def wait(self, jobs: Sequence[PendingJob]) -> list[JobResult]:
        """Return the results of jobs.

        Raises:
            MachineFailure: nothing came for `timeout` seconds, or several workers died of a job.
            UserError: a job cannot be sampled or scored, as its worker says.
        """
        import ray

        open_jobs, heard = {job.reference: job for job in jobs}, time.monotonic()
        while open_jobs:
            done, _ = ray.wait(list(open_jobs), timeout=min(HEARTBEAT, self.timeout))
            for reference in done:
                job, heard = open_jobs.pop(reference), time.monotonic()
                job.result = self._result(job)
                if job.result is None:
                    job.worker, job.reference = self._send(job.job, job.weights)
                    open_jobs[job.reference] = job
            silent = time.monotonic() - heard
            if not done:
                names = sorted({str(job.worker) for job in open_jobs.values()})
                LOG.warning("waiting for %s, for %.0f s", " and ".join(names), silent)
                if silent >= self.timeout:
                    raise MachineFailure(
                        "peer",
                        f"no answer of {' and '.join(names)} for {self.timeout:g} s "
                        "(rollout.workers.timeout): frozen, cut off, or a reward does not return",
                    )
        return [job.result for job in jobs if job.result is not None]

    def metrics(self) -> dict[str, float]:
        """Return how many workers have joined, and how often one had to be replaced."""
        joined = sum(worker.info is not None for worker in self._workers)
        return {"workers/joined": float(joined), "workers/restarts": float(self.restarts)}

    def _send(self, job: Job, weights: list[Any]) -> tuple[_Remote, Any]:
        worker = min(self._joined(), key=lambda one: one.jobs)
        worker.jobs += 1
        return worker, worker.actor.sample.remote(job, weights)

    def _result(self, job: PendingJob) -> JobResult | None:
        """Return a job's result, None if its worker died and another one must take it."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        job.worker.jobs -= 1
        try:
            result: Any = ray.get(job.reference)
        except RayTaskError:  # a mistake in the program
            raise
        except RayError as error:
            LOG.warning("%s is lost with %s: %s", job.worker, job.what, _first_line(error))
            self._lost(job.worker)
            job.deaths += 1
            if job.deaths > TRIES:
                raise MachineFailure("peer", f"{job.deaths} workers died of {job.what}") from error
            return None
        if isinstance(result, str):
            raise UserError(f"{job.worker}: {result}")
        # Ray may have restarted it on another machine, between two jobs.
        return result if self._accepts(job.worker, result.worker) else None

    def _lost(self, worker: _Remote) -> None:
        """Wait for a worker's next process, which Ray starts."""
        if worker.info is not None:
            self.restarts += 1
            worker.info, worker.joining = None, worker.actor.info.remote()

    def _joined(self) -> list[_Remote]:
        """Return the workers that are ready; wait for the first one.

        Raises MachineFailure when none comes, and UserError when none can work.
        """
        import ray

        began = noticed = time.monotonic()
        while True:
            joining = {one.joining: one for one in self._workers if one.joining is not None}
            if joining:
                ready, _ = ray.wait(list(joining), num_returns=len(joining), timeout=0)
                for reference in ready:
                    self._join(joining[reference])
            if joined := [one for one in self._workers if one.info is not None]:
                return joined
            now = time.monotonic()
            if now - began > self.timeout:
                raise MachineFailure(
                    "peer",
                    f"none of {self.count} workers is ready after {self.timeout:g} s "
                    "(rollout.workers.timeout)",
                )
            if now - noticed > HEARTBEAT:
                noticed = now
                LOG.warning("waiting for a worker to load or to find a place: %.0f s", now - began)
            time.sleep(PAUSE)

    def _join(self, worker: _Remote) -> None:
        import ray
        from ray.exceptions import RayError

        try:
            info: Any = ray.get(worker.joining)
        except RayError as error:  # it died while it loaded, or its machine is out of reach
            LOG.warning("%s: %s", worker, _first_line(error))
            worker.joining = worker.actor.info.remote()
            return
        if isinstance(info, str):
            self._dismiss(worker, f"{worker} cannot load: {info}")
        elif self._accepts(worker, info):
            worker.info, worker.joining = info, None

    def _accepts(self, worker: _Remote, info: WorkerInfo) -> bool:
        """Return whether a worker has the expected bits; dismiss it otherwise."""
        self._expected = self._expected or info.digest
        if info.digest == self._expected:
            return True
        self._dismiss(
            worker,
            f"worker {worker.number} ({info.where}) samples other numbers for the same job: it is "
            f"{info.machine}. Use one kind of GPU and the same versions everywhere",
        )
        return False

    def _dismiss(self, worker: _Remote, why: str) -> None:
        """Go on without a worker. Raises UserError if it was the last one."""
        if self._workers == [worker]:
            raise UserError(why)
        if worker in self._workers:
            LOG.warning("%s; the run continues without it", why)
            self._workers.remove(worker)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


# --- what the trainer samples with ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGenerator(RolloutGenerator):
    """A generator whose batches are jobs for workers; texts are encoded in this process.

    A job may cut a group, so rewards work in this process if one of them compares whole groups.
    """

    pool: WorkerPool
    policy: Policy
    adapter: str  # that samples
    draws_alike: bool  # this process's network has the workers' bits, so that it can check them
    precision: str | None = None  # of candidates, see `Stage`

    def start(
        self, request: RolloutRequest, trees: Tensor, plan: TreePlan, cond: Conditioning, keep: bool
    ) -> Callable[[Timer], tuple[Images, RewardResult]]:
        local = any(spec.whole_groups for spec in self.specs)
        stage = Stage(
            precision=self.precision,
            num_inference_steps=self.num_inference_steps,
            rewards=() if local else tuple(spec.name for spec in self.specs),
        )
        mine, (together, rows) = request.take(trees), self.batch_shape(request, plan)
        packed = pack_weights(self.policy.weights(self.adapter))
        adapter = digest(packed)
        parts = [mine.only(part) for part in torch.arange(len(trees)).split(together) if len(part)]
        jobs = [
            Job(
                request=part.take(torch.arange(len(part.prompt))),
                plan=plan,
                cond=cond.take(part.prompt.unique()).to("cpu"),
                rows=rows,
                stage=stage,
                adapter=adapter,
                keep=keep or local,
            )
            for part in parts
        ]
        if not self.pool.started:
            self._start(jobs[0], packed)
        weights, of = self.pool.put(adapter, packed), f"of {len(jobs)} of iteration"
        pending = [
            self.pool.submit(job, weights, f"job {i + 1} {of} {request.iteration}")
            for i, job in enumerate(jobs)
        ]
        return functools.partial(self._wait, parts, pending, local)

    def _start(self, job: Job, packed: bytes) -> None:
        """Start the pool, with two steps of the first job as the probe: it has its shapes."""
        stage = Stage(num_inference_steps=2, rewards=())
        probe, expected = replace(job, plan=ode(2, 1), stage=stage, keep=False), None
        if self.draws_alike:
            tree, _, _ = sample_job(replace(self, specs=(), num_inference_steps=2), probe)
            expected = tree_digest(tree)
        self.pool.start(probe, packed, expected)

    def _wait(
        self, requests: Sequence[RolloutRequest], jobs: Sequence[PendingJob], local: bool,
        timer: Timer,
    ) -> tuple[Images, RewardResult]:  # fmt: skip
        """Wait for the jobs; score their images here if `local`."""
        began = time.perf_counter()
        results = self.pool.wait(jobs)
        waited = time.perf_counter() - began
        timer.lap(self.times[0])
        waited += timer.seconds.get("workers/waited", 0.0)  # of an iteration's first stage
        timer.seconds |= self.pool.metrics() | {"workers/waited": waited}
        scoring, parts = Scoring(specs=self.specs if local else (), phase="rollout"), []
        for request, one in zip(requests, results, strict=True):
            if one.tree is None or one.levels is None:
                continue
            tree = on_device(replace(one.tree, prompt=request.prompt), self.backbone.device)
            images = one.levels.float().div_(255)
            if local:
                submit_images(scoring, images.split(self.decode_batch), request, len(tree.leaf))
            parts.append((tree, images))
        scored = [one.result for one in results]
        return parts, RewardResult.cat(scored) if scored and not local else scoring.result()
