"""Run sampling jobs on remote workers, which Ray places, restarts and sends their jobs again.

A rollout is cut into jobs: the batches of trees that this process would sample itself. The result
of a job depends on the job, the weights and the recipe alone, so that no bit changes when a worker
dies and its job is run again. `flowrl/assembly/worker.py` has the worker itself. Nothing imports
Ray before a pool starts.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
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

LOG = logging.getLogger(__name__)


# --- a job, and what a worker makes of it ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """R trees that are sampled together."""

    request: RolloutRequest  # with their prompts alone
    plan: TreePlan
    cond: Conditioning  # of the request's prompts, on the CPU
    rows: int  # of each call of the network
    preview: bool  # of candidates; else of images to learn from
    rewards: tuple[str, ...]  # names of those that score the images
    version: int  # of the weights that sample
    keep: bool  # return trees and images; else scores alone, and trees that will go on


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The samples and scores of a job."""

    worker: str  # host and process, for people
    result: RewardResult  # of the job's rewards
    tree: Tree | None  # on the CPU; `prompt` counts in the job's prompts
    levels: Tensor  # (R * leaves, 3, H, W) uint8, the images as rewards see them, or none


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


# --- the pool, in the training process ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job that a worker has."""

    worker: int
    reference: Any  # of its result
    name: str  # for people


class WorkerPool:
    """Workers that sample for this process, from the first rollout on while it is entered.

    Args:
        cluster: starts Ray and workers, see `flowrl.assembly.worker.RayCluster`.
        count: how many workers; those without a place wait until a machine joins.
        timeout: seconds without an answer, or without any worker, after which the run ends.
    """

    def __init__(self, cluster: Any, *, count: int, timeout: float):
        self.cluster, self.count, self.timeout = cluster, count, timeout
        self._actors: dict[int, Any] = {}
        self._loading: dict[Any, int] = {}  # by the reference of what `load` will return
        self._processes: dict[int, list[str]] = {}  # of the workers that have loaded, oldest first
        self._weights: tuple[int, list[Tensor], Any] = 0, [], None  # version, tensors, reference

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *error: object) -> None:
        if self._actors:
            self._actors.clear()  # Ray ends actors that nobody can reach
            self.cluster.close()

    def put(self, weights: Sequence[Tensor]) -> int:
        """Send weights to Ray's object store if they have changed; return their version.

        The first call starts Ray and the workers.
        """
        if not self._actors:
            self.cluster.start()
            self._actors = {number: self.cluster.launch() for number in range(self.count)}
            self._loading = {actor.load.remote(): n for n, actor in self._actors.items()}
        import ray

        version, before, _ = self._weights
        tensors = [tensor.cpu() for tensor in weights]
        if not before or not all(map(torch.equal, tensors, before)):
            self._weights = version + 1, tensors, ray.put(tensors)
        return self._weights[0]

    def submit(self, jobs: Sequence[Job], name: str) -> list[PendingJob]:
        """Deal jobs in turn to the workers that have loaded; wait for one where there is none."""
        workers, weights, pending = self._loaded(), self._weights[2], []
        for number, job in enumerate(jobs):
            worker = workers[number % len(workers)]
            reference = self._actors[worker].sample.remote(job, weights)
            title = f"job {number + 1} of {len(jobs)} {name}"
            pending.append(PendingJob(worker=worker, reference=reference, name=title))
        return pending

    def wait(self, jobs: Sequence[PendingJob]) -> list[JobResult]:
        """Return the results of jobs.

        Raises:
            MachineFailure: nothing came for `timeout` seconds, or a worker died of a job each time.
            UserError: a job cannot be sampled or scored, as its worker says.
        """
        import ray

        waiting, heard = {job.reference: job for job in jobs}, time.monotonic()
        results: dict[Any, JobResult] = {}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=min(HEARTBEAT, self.timeout))
            for reference in done:
                heard = time.monotonic()
                results[reference] = self._result(waiting.pop(reference))
            if not done:
                silent = time.monotonic() - heard
                numbers = sorted({job.worker for job in waiting.values()})
                names = " and ".join(map(self._name, numbers))
                LOG.warning("waiting for %s, for %.0f s", names, silent)
                if silent >= self.timeout:
                    raise MachineFailure(
                        "peer",
                        f"no answer of {names} for {self.timeout:g} s (runtime.timeout): "
                        "frozen, cut off, without a machine, or a reward does not return",
                    )
        return [results[job.reference] for job in jobs]

    def metrics(self) -> dict[str, float]:
        """Return how many workers have loaded, and how often one had to be restarted."""
        restarts = sum(len(processes) - 1 for processes in self._processes.values())
        return {
            "workers/joined": float(len(self._processes)),
            "workers/restarts": float(restarts),
        }

    def _result(self, job: PendingJob) -> JobResult:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            result: Any = ray.get(job.reference)
        except RayTaskError:  # a mistake in the program
            raise
        except RayError as error:
            raise MachineFailure(
                "peer", f"{self._name(job.worker)} was lost with {job.name}, at every try"
            ) from error
        if isinstance(result, str):
            raise UserError(f"{self._name(job.worker)}: {result}")
        processes = self._processes[job.worker]
        if result.worker not in processes:
            LOG.warning("%s was restarted as %s", self._name(job.worker), result.worker)
            processes.append(result.worker)
        return result

    def _loaded(self) -> list[int]:
        """Return the workers that have loaded; wait for the first one.

        Raises MachineFailure when none comes, and UserError when none can work.
        """
        import ray

        began = time.monotonic()
        while self._loading:
            first = not self._processes  # later ones join when they can
            done, _ = ray.wait(
                list(self._loading),
                num_returns=1 if first else len(self._loading),
                timeout=min(HEARTBEAT, self.timeout) if first else 0,
            )
            for reference in done:
                self._join(self._loading.pop(reference), reference)
            if not first:
                break
            waited = time.monotonic() - began
            if not self._processes and waited >= self.timeout:
                raise MachineFailure(
                    "peer",
                    f"none of {self.count} workers is ready after {self.timeout:g} s "
                    "(runtime.timeout)",
                )
            if not done:
                LOG.warning("waiting for a worker to load or to find a place: %.0f s", waited)
        return sorted(self._processes)

    def _join(self, worker: int, reference: Any) -> None:
        """Let a worker that has loaded take jobs. Raises UserError if none is left that can."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            process, problem = ray.get(reference)
        except RayTaskError:  # a mistake in the program
            raise
        except RayError as error:
            process, problem = "", str(error).strip().partition("\n")[0]
        if not problem:
            self._processes[worker] = [process]
            return
        text = f"worker {worker} cannot sample: {problem}"
        del self._actors[worker]
        if not self._actors:
            raise UserError(text)
        LOG.warning("%s; the run continues without it", text)

    def _name(self, worker: int) -> str:
        return f"worker {worker} ({self._processes[worker][-1]})"


# --- what the trainer samples with ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGenerator(RolloutGenerator):
    """A generator whose batches are jobs for workers; texts are encoded in this process.

    A job may cut a group, so rewards work in this process if one of them compares whole groups.
    """

    pool: WorkerPool
    policy: Policy
    adapter: str  # that samples
    preview: bool = False  # samples candidates

    def start(
        self,
        request: RolloutRequest,
        local: RolloutRequest,
        plan: TreePlan,
        cond: Conditioning,
        keep: bool,
    ) -> Callable[[Timer], tuple[Images, RewardResult]]:
        score_here = any(spec.whole_groups for spec in self.specs)
        together, rows = self.batch_shape(request, plan, local.stopped)
        version = self.pool.put(self.policy.weights(self.adapter))
        index = torch.arange(len(local.prompt)).split(together)
        parts = [local.only(part) for part in index if len(part)]
        jobs = [
            Job(
                request=part.take(torch.arange(len(part.prompt))),
                plan=plan,
                cond=cond.take(part.prompt.unique()).to("cpu"),
                rows=rows,
                preview=self.preview,
                rewards=() if score_here else tuple(spec.name for spec in self.specs),
                version=version,
                keep=keep or score_here,
            )
            for part in parts
        ]
        pending = self.pool.submit(jobs, f"of iteration {request.iteration}")
        return functools.partial(self._wait, parts, pending, score_here)

    def _wait(
        self, requests: Sequence[RolloutRequest], jobs: Sequence[PendingJob], score_here: bool,
        timer: Timer,
    ) -> tuple[Images, RewardResult]:  # fmt: skip
        """Wait for the jobs, and with `score_here` for the scores of their images."""
        began = time.perf_counter()
        results = self.pool.wait(jobs)
        waited = time.perf_counter() - began
        timer.lap(self.times[0])
        waited += timer.seconds.get("workers/waited", 0.0)  # of an iteration's first stage
        timer.seconds |= self.pool.metrics() | {"workers/waited": waited}
        scoring, parts = Scoring(specs=self.specs if score_here else (), phase="rollout"), []
        for request, one in zip(requests, results, strict=True):
            if one.tree is None:
                continue
            tree = replace(one.tree, prompt=request.prompt)
            if len(one.levels):  # trees without images go back to workers
                tree = tree.to(self.backbone.device)
            images = one.levels.float().div_(255)
            if score_here:
                submit_images(scoring, images.split(self.decode_batch), request, len(tree.leaf))
            parts.append((tree, images))
        scored = [one.result for one in results]
        return parts, scoring.result() if score_here or not scored else RewardResult.cat(scored)
