"""Build a rollout worker from a recipe, and the Ray cluster that runs several of them.

Nothing imports Ray unless `rollout.workers` is set. A worker loads the pipeline by its name
and the rewards; all else comes with the jobs.
"""

import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl import __version__
from flowrl.assembly.backbone import build_backbone, build_pipeline, set_precision
from flowrl.assembly.learner import (
    PRECISION,
    ProvidedObjects,
    build_policy,
    build_rewards,
)
from flowrl.assembly.rollout import RolloutParts, build_generator, build_preview_generator
from flowrl.backbones.text_cache import TextCache
from flowrl.config import Config, parse_config
from flowrl.config.rollout import ReferenceOptions, WorkerOptions
from flowrl.errors import UserError, as_failure
from flowrl.sampling.rollout import RolloutGenerator
from flowrl.sampling.workers import Job, JobResult, WorkerPool, sample_job
from flowrl.scoring.executors.base import to_levels
from flowrl.utils.distributed import Runtime

TRIES = 3  # of a job whose worker dies of it
IN_FLIGHT = 2  # jobs of one worker: one is sampled while the rewards of the other work
SOCKET_PATH = 40  # most characters of a folder for Ray's sockets, whose whole paths have 107
# Read when Ray is imported: nothing is reported to anybody; Ray's own places for GPUs; and a
# cluster on this machine alone listens on loopback, as Ray does on other systems than Linux.
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


# --- in the worker's process ---------------------------------------------------------------------


class Worker:
    """Samples and scores jobs of one recipe. Two threads may call it: one samples, one scores.

    What it fails at is returned as text, so that no exception has to travel.

    Args:
        recipe: the recipe as JSON.
        threads: of the CPU, as the trainer has, since sums depend on them.
        like: the trainer's `machine`; on another one the last bits would differ.
    """

    def __init__(self, recipe: str, threads: int, like: str):
        torch.set_num_threads(threads)
        self._name = f"{platform.node()}, process {os.getpid()}"
        self._problem, self._version = "", 0  # of the weights that it has
        self._generators: dict[bool, RolloutGenerator] = {}  # by whether it samples candidates
        self._sampling, self._scoring = threading.Lock(), threading.Lock()
        try:
            self._parts = _build_parts(_for_worker(parse_config(json.loads(recipe))))
            here = machine(self._parts.runtime)
            if here != like:
                self._problem = (
                    f"{self._name} is {here}, and the trainer {like}: use one kind of GPU and the "
                    "same versions everywhere, or the bits of a rollout depend on who samples it"
                )
        except Exception as error:
            self._problem = _sentence(error)

    def load(self) -> tuple[str, str]:
        """Return its name once all is loaded, and why it cannot work, "" if it can."""
        return self._name, self._problem

    def sample(self, job: Job, weights: Sequence[Tensor]) -> JobResult | str:
        """Return the result of a job, or why there is none."""
        if self._problem:
            return self._problem
        try:
            with self._sampling:
                if job.version != self._version:
                    self._parts.policy.set_weights(self._parts.adapter, weights)
                    self._version = job.version
                tree, images, scoring = sample_job(self._generator(job), job)
            with self._scoring:
                result = scoring.result()
        except Exception as error:
            if as_failure(error) is None:
                raise
            return _sentence(error)
        return JobResult(
            worker=self._name,
            result=result,
            tree=tree.to("cpu") if job.keep or job.plan.continuation is not None else None,
            levels=to_levels(images if job.keep else images[:0]),
        )

    def _generator(self, job: Job) -> RolloutGenerator:
        """Return the generator of a job, with the rewards that it names."""
        parts, preview = self._parts, job.preview
        if preview not in self._generators:
            generator = build_generator(parts)
            if preview:
                generator = build_preview_generator(parts, generator)
            self._generators[preview] = generator
        specs = [spec for spec in parts.specs if spec.name in job.rewards]
        return replace(self._generators[preview], specs=specs)


def _sentence(error: Exception) -> str:
    failure = as_failure(error)
    return f"{type(error).__name__}: {error}" if failure is None else str(failure)


def machine(runtime: Runtime) -> str:
    """Return what decides the last bits of a network's output, for people."""
    gpu = "" if runtime.gpu is None else f"{torch.cuda.get_device_name(runtime.gpu)}, "
    return f"{gpu}{platform.machine()}, torch {torch.__version__}, flowrl {__version__}"


def _for_worker(config: Config) -> Config:
    """Return the recipe without what jobs bring, or only the trainer does."""
    # The rest scores evaluations, or compares groups: then all rewards work in the trainer.
    rewards = [e for e in config.rewards if e.trained or e.when in ("rollout", "both")]
    config = config.model_copy(update={"rewards": rewards, "reference": ReferenceOptions()})
    config = config.changed("lora", init_from=None).changed("ema", decay=None)
    config = config.changed("memory", prompt_cache=None, text_encoders="keep")
    return config.changed("rollout", workers=None)


def _build_parts(config: Config) -> RolloutParts:
    p, r = config.pipeline, config.rollout
    runtime = Runtime(device=p.device, mixed_precision=PRECISION[p.dtype], seed=config.run.seed)
    pipeline = build_pipeline(config, runtime.device, runtime=runtime)
    backbone = build_backbone(p, pipeline, guidance=r.guidance_scale)
    set_precision(config, backbone, runtime)
    needs = config.objective.build(r.kernel).needs
    return RolloutParts(
        config=config,
        runtime=runtime,
        specs=build_rewards(config, gpu=runtime.gpu),
        policy=build_policy(config, backbone, keep_old=needs.old is not None),
        backbone=backbone,
        needs=needs,
        text_cache=TextCache(backbone),  # never used: jobs bring their conditioning
    )


# --- Ray -----------------------------------------------------------------------------------------


class RayCluster:
    """Ray on this machine, started and stopped here, or a cluster at an address, which stays.

    Args:
        runtime: the trainer's. Workers on its machine leave its GPU to it where there are more.
    """

    def __init__(self, options: WorkerOptions, recipe: str, runtime: Runtime):
        self.options, self.recipe, self.runtime = options, recipe, runtime
        self._share = 0.0 if runtime.gpu is None else 1.0  # of a GPU, for one worker
        self._folder: str | None = None  # of a Ray that was started here
        self._joined = False

    def start(self) -> None:
        """Start Ray, or connect to it.

        Raises UserError without Ray, and where no cluster answers.
        """
        here = self.options.address is None
        variables = RAY_VARIABLES | (LOOPBACK if here else {})
        if (Path.home() / ".ray" / "auth_token").exists() or "RAY_AUTH_TOKEN" in os.environ:
            variables |= {"RAY_AUTH_MODE": "token"}  # as `ray start` does
        if "ray" not in sys.modules:
            os.environ.update(variables | os.environ)
        try:
            import ray
        except ImportError as error:
            raise UserError(
                'rollout.workers needs Ray: pip install "flowrl-diffusion[ray]", or set it to null'
            ) from error
        if ray.is_initialized():  # by who calls flowrl as a library
            return
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if here:
                self._start_here(quiet)
            else:
                ray.init(address=self.options.address, **quiet)
                self._joined = True
        except UserError:
            raise
        except Exception as error:  # Ray raises bare ones, too
            where = self.options.address or "this machine"
            raise UserError(
                f"rollout.workers: Ray at {where} does not answer: {str(error).strip()}. Start it "
                "with ray start, or set rollout.workers.address to null"
            ) from error

    def _start_here(self, quiet: dict[str, Any]) -> None:
        import ray

        gpus, root = self._worker_gpus(), tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="ray-", dir=root if len(root) < SOCKET_PATH else "/tmp"
        )
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpus is not None:  # Ray's processes inherit it
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        try:
            ray.init(
                address="local", num_cpus=self.options.count, num_gpus=len(gpus or ()),
                include_dashboard=False, _temp_dir=self._folder, **quiet,
            )  # fmt: skip
        finally:
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
            elif gpus is not None:
                del os.environ["CUDA_VISIBLE_DEVICES"]

    def _worker_gpus(self) -> Sequence[str] | None:
        """Return the GPUs of this machine for workers; the trainer's where it is the only one."""
        if self.runtime.gpu is None:
            return None
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
        free = [name for number, name in enumerate(every) if number != self.runtime.gpu]
        if not free:
            self._share = 1.0 / self.options.count
            return every
        if len(free) < self.options.count:
            raise UserError(
                f"rollout.workers.count is {self.options.count}, but this machine has "
                f"{len(free)} GPUs beside the trainer's: set it to {len(free)}"
            )
        return free

    def launch(self) -> Any:
        """Return the handle of a new `Worker`, which may have to wait for a place."""
        import ray

        placed = ray.remote(Worker).options(
            num_cpus=1, num_gpus=self._share, max_restarts=-1, max_task_retries=TRIES - 1,
            max_concurrency=IN_FLIGHT, scheduling_strategy="SPREAD",
        )  # fmt: skip
        return placed.remote(self.recipe, torch.get_num_threads(), machine(self.runtime))

    def close(self) -> None:
        import ray

        if self._joined or self._folder is not None:
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def build_pool(config: Config, runtime: Runtime, provided: ProvidedObjects) -> WorkerPool | None:
    """Return the pool of a recipe's workers, which starts with the first rollout; None without.

    Raises UserError for what workers could not load, and on several processes.
    """
    options = config.rollout.workers
    if options is None:
        return None
    for name, objects in (("pipeline", provided.pipeline), ("rewards", provided.rewards)):
        if objects is not None:
            raise UserError(
                f"rollout.workers load everything by its name, but `align` got a {name} object: "
                "name it in the recipe, or set rollout.workers to null"
            )
    if runtime.world_size > 1:
        raise UserError(
            f"rollout.workers sample for one training process, and {runtime.world_size} were "
            "started: start one, or set rollout.workers to null"
        )
    cluster = RayCluster(options, config.model_dump_json(), runtime)
    return WorkerPool(cluster, count=options.count, timeout=config.runtime.timeout)
