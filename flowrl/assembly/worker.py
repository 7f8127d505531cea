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

from flowrl import __version__
from flowrl.assembly.backbone import build_backbone, build_pipeline, set_precision
from flowrl.assembly.learner import (
    PRECISION,
    ProvidedObjects,
    build_policy,
    build_rewards,
    starting_lora,
)
from flowrl.assembly.rollout import (
    WHERE,
    RolloutParts,
    build_generator,
    build_preview_generator,
    preview_layers,
)
from flowrl.backbones.text_cache import TextCache
from flowrl.config import Config, parse_config
from flowrl.config.rollout import WorkerOptions
from flowrl.errors import UserError, as_failure
from flowrl.quantization.backends import capability_of, resolve
from flowrl.sampling.rollout import RolloutGenerator
from flowrl.sampling.workers import (
    Job,
    JobResult,
    Stage,
    WorkerInfo,
    WorkerPool,
    on_device,
    sample_job,
    tree_digest,
    unpack_weights,
)
from flowrl.scoring.executors.base import to_levels
from flowrl.utils.digests import digest
from flowrl.utils.distributed import Runtime

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
        probe: a job whose latents show that this machine has the trainer's bits.
        weights: reference of the probe's packed weights, in a list.
    """

    def __init__(self, recipe: str, threads: int, probe: Job, weights: list[Any]):
        torch.set_num_threads(threads)
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-worker-")
        self._adapter = ""  # digest of the weights that it has
        self._generators: dict[tuple[str | None, int], RolloutGenerator] = {}
        self._sampling, self._scoring = threading.Lock(), threading.Lock()
        try:
            self._parts = _build_parts(_for_worker(parse_config(json.loads(recipe)), self._folder))
            self._set_weights(probe.adapter, weights)
            tree, _, _ = sample_job(self._generator(probe.stage), probe)
            self._info: WorkerInfo | str = WorkerInfo(
                where=f"{platform.node()}, process {os.getpid()}",
                machine=machine(self._parts.runtime),
                digest=tree_digest(tree),
            )
        except Exception as error:
            self._info = _sentence(error)

    def info(self) -> WorkerInfo | str:
        """Return what this worker is, or why it cannot work."""
        return self._info

    def sample(self, job: Job, weights: list[Any]) -> JobResult | str:
        """Return the result of a job, or why there is none."""
        if isinstance(self._info, str):
            return self._info
        try:
            with self._sampling:
                self._set_weights(job.adapter, weights)
                tree, images, scoring = sample_job(self._generator(job.stage), job)
            with self._scoring:
                result = scoring.result()
        except Exception as error:
            if as_failure(error) is None:
                raise
            return _sentence(error)
        return JobResult(
            worker=self._info,
            result=result,
            tree=on_device(tree, "cpu") if job.keep else None,
            levels=to_levels(images) if job.keep else None,
        )

    def _set_weights(self, adapter: str, weights: list[Any]) -> None:
        import ray

        if adapter == self._adapter:
            return
        packed: Any = ray.get(weights[0])  # an array of bytes, in the memory of this machine
        data = packed.tobytes()
        if digest(data) != adapter:
            raise RuntimeError("the weights that came are not those of the job")
        self._parts.policy.set_weights(self._parts.adapter, unpack_weights(data))
        self._adapter = adapter

    def _generator(self, stage: Stage) -> RolloutGenerator:
        """Return the generator of a stage, with the rewards that it asks."""
        parts, key = self._parts, (stage.precision, stage.num_inference_steps)
        if key not in self._generators:
            if stage.precision is not None:  # one copy of the network at a time
                self._generators = {k: g for k, g in self._generators.items() if k[0] is None}
            self._generators[key] = _build_generator(parts, stage)
        specs = [spec for spec in parts.specs if spec.name in stage.rewards]
        return replace(self._generators[key], specs=specs)


def _build_generator(parts: RolloutParts, stage: Stage) -> RolloutGenerator:
    exact = build_generator(parts)
    if stage.precision is not None:
        capability = capability_of(parts.runtime.device)
        resolved = resolve(stage.precision, capability, where=WHERE)
        exact = build_preview_generator(parts, exact, *preview_layers(parts, resolved))
    return replace(exact, num_inference_steps=stage.num_inference_steps)


def _sentence(error: Exception) -> str:
    failure = as_failure(error)
    return f"{type(error).__name__}: {error}" if failure is None else str(failure)


def machine(runtime: Runtime) -> str:
    """Return what decides the last bits of a network's output, for people."""
    gpu = "" if runtime.gpu is None else f"{torch.cuda.get_device_name(runtime.gpu)}, "
    return f"{gpu}{platform.machine()}, torch {torch.__version__}, flowrl {__version__}"


def _for_worker(config: Config, folder: "tempfile.TemporaryDirectory[str]") -> Config:
    """Return the recipe without what jobs bring, or only the trainer does."""

    def changed(section: str, **options: Any) -> Any:
        return getattr(config, section).model_copy(update=options)

    rewards = [entry for entry in config.rewards if entry.when != "evaluation"]
    return config.model_copy(
        update={
            "rewards": rewards,
            "lora": changed("lora", init_from=None),
            "ema": changed("ema", decay=None),
            "rollout": changed("rollout", workers=None),
            "run": changed("run", output_dir=folder.name),  # where precisions are recorded
            "memory": changed("memory", prompt_cache=None, text_encoders="keep"),
        }
    )


def _build_parts(config: Config) -> RolloutParts:
    p, r = config.pipeline, config.rollout
    runtime = Runtime(device=p.device, mixed_precision=PRECISION[p.dtype], seed=config.run.seed)
    start = starting_lora(config)
    pipeline = build_pipeline(config, runtime.device, runtime=runtime)
    backbone = build_backbone(p, pipeline, guidance=r.guidance_scale)
    set_precision(config, backbone, runtime)
    needs = config.objective.build(r.kernel).needs
    return RolloutParts(
        config=config,
        runtime=runtime,
        specs=build_rewards(config, gpu=runtime.gpu),
        policy=build_policy(config, backbone, start, keep_old=needs.old is not None),
        backbone=backbone,
        needs=needs,
        text_cache=TextCache(backbone),  # never used: jobs bring their conditioning
    )


# --- Ray -----------------------------------------------------------------------------------------


class RayCluster:
    """Ray on this machine, started and stopped here, or a cluster at an address, which stays.

    Args:
        gpu: number of the trainer's GPU, which workers on this machine leave to it where there are
            more; None without CUDA.
    """

    def __init__(self, options: WorkerOptions, recipe: str, gpu: int | None):
        self.options, self.recipe, self.gpu = options, recipe, gpu
        self._share = 0.0 if gpu is None else 1.0  # of a GPU, for one worker
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
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            where = self.options.address or "this machine"
            raise UserError(
                f"rollout.workers: Ray at {where} does not answer: {str(error).strip()}. Start it "
                "with ray start, or set rollout.workers.address to null"
            ) from error

    def _start_here(self, quiet: dict[str, Any]) -> None:
        import ray

        gpus, visible = self._worker_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
        root = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="ray-", dir=root if len(root) < SOCKET_PATH else "/tmp"
        )
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        try:
            ray.init(
                address="local", num_cpus=self.options.count, num_gpus=len(gpus or ()),
                include_dashboard=False, _temp_dir=self._folder, **quiet,
            )  # fmt: skip
        finally:
            if visible is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
            elif gpus is not None:
                del os.environ["CUDA_VISIBLE_DEVICES"]

    def _worker_gpus(self) -> Sequence[str] | None:
        """Return the GPUs of this machine for workers; the trainer's where it is the only one."""
        if self.gpu is None:
            return None
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
        free = [name for number, name in enumerate(every) if number != self.gpu]
        if not free:
            self._share = 1.0 / self.options.count
            return every
        if len(free) < self.options.count:
            raise UserError(
                f"rollout.workers.count is {self.options.count}, but this machine has "
                f"{len(free)} GPUs beside the trainer's: set it to {len(free)}"
            )
        return free

    def launch(self, probe: Job, weights: list[Any]) -> Any:
        import ray

        placed = ray.remote(Worker).options(
            num_cpus=1, num_gpus=self._share, max_restarts=-1, max_concurrency=IN_FLIGHT,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        return placed.remote(self.recipe, torch.get_num_threads(), probe, weights)

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
    cluster = RayCluster(options, config.model_dump_json(), runtime.gpu)
    return WorkerPool(cluster, count=options.count, timeout=options.timeout)
