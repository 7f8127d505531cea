"""Build a rollout worker from a recipe, and the pool that asks workers through Ray.

Nothing imports Ray unless `rollout.workers` is set. A worker loads the pipeline by its name,
without text encoders, and the rewards; all else comes with the units.
"""

import json
import logging
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
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
from flowrl.backbones.loading import pipeline_path
from flowrl.backbones.offload import free_encoders
from flowrl.backbones.text_cache import TextCache, encoder_names, index_file
from flowrl.config import Config, parse_config
from flowrl.config.rollout import WorkerOptions
from flowrl.errors import MachineFailure, UserError, as_failure
from flowrl.quantization.backends import capability_of, resolve
from flowrl.sampling.rollout import RolloutGenerator
from flowrl.sampling.units import Stage, Unit, UnitAnswer, sample_unit, tree_digest, unpack_weights
from flowrl.sampling.workers import IN_FLIGHT, Joined, WorkerPool
from flowrl.scoring.executors.base import to_levels
from flowrl.utils.digests import digest
from flowrl.utils.distributed import Runtime

LOG = logging.getLogger(__name__)
SOCKET_PATH = 40  # most characters of a folder for Ray's sockets, whose whole paths have 107


# --- in the worker's process ---------------------------------------------------------------------


class Worker:
    """Draws and scores units of one recipe. Two threads may call it: one draws, the other scores.

    Args:
        recipe: the recipe as JSON.
        threads: of the CPU, as the trainer has, since sums depend on them.
    """

    def __init__(self, recipe: str, threads: int):
        config = parse_config(json.loads(recipe))
        torch.set_num_threads(threads)
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-worker-")
        self.config = _for_worker(config, self._folder.name)
        self._parts: RolloutParts | None = None
        self._version = ""  # digest of the weights that it has
        self._generators: dict[tuple[str | None, int], RolloutGenerator] = {}
        self._drawing, self._scoring = threading.Lock(), threading.Lock()

    def join(self, probe: bytes, fetch: Callable[[], bytes]) -> Joined:
        """Load everything and draw the probe; arguments as in `draw`."""
        self._parts = _build_parts(self.config)
        answer = self._draw(Unit.from_bytes(probe), digest(probe), fetch)
        return Joined(
            where=f"{platform.node()}, process {os.getpid()}",
            machine=machine(self._parts.runtime),
            digest=answer.digest,
        )

    def draw(self, data: bytes, fetch: Callable[[], bytes]) -> bytes:
        """Return the `UnitAnswer` of a unit.

        fetch: returns the weights of the unit's adapter; called only for a new version.
        Raises UserError, which is a MachineFailure where another machine may succeed.
        """
        return self._draw(Unit.from_bytes(data), digest(data), fetch).to_bytes()

    def _draw(self, unit: Unit, key: str, fetch: Callable[[], bytes]) -> UnitAnswer:
        began = time.perf_counter()
        assert self._parts is not None
        with self._drawing:
            self._take_weights(unit.adapter, fetch)
            tree, images, scoring = sample_unit(self._generator(unit.stage), unit)
        with self._scoring:
            result = scoring.result()
        return UnitAnswer(
            key=key,
            digest=tree_digest(tree),
            seconds=time.perf_counter() - began,
            result=result,
            tree=tree if unit.keep else None,
            levels=to_levels(images) if unit.keep else None,
        )

    def _take_weights(self, adapter: str, fetch: Callable[[], bytes]) -> None:
        if adapter == self._version:
            return
        weights = fetch()
        if digest(weights) != adapter:
            raise RuntimeError("the weights that came are not those of the unit")
        assert self._parts is not None
        self._parts.policy.set_weights(self._parts.adapter, unpack_weights(weights))
        self._version = adapter

    def _generator(self, stage: Stage) -> RolloutGenerator:
        """Return the generator of a stage, with the rewards that it asks."""
        parts = self._parts
        assert parts is not None
        key = stage.precision, stage.num_inference_steps
        if key not in self._generators:
            if stage.precision is not None:  # one copy of the network at a time
                self._generators = {k: g for k, g in self._generators.items() if k[0] is None}
            self._generators[key] = self._build_generator(parts, stage)
        specs = [spec for spec in parts.specs if spec.name in stage.rewards]
        return replace(self._generators[key], specs=specs)

    def _build_generator(self, parts: RolloutParts, stage: Stage) -> RolloutGenerator:
        exact = build_generator(parts)
        if stage.precision is not None:
            capability = capability_of(parts.runtime.device)
            resolved = resolve(stage.precision, capability, where=WHERE)
            exact = build_preview_generator(parts, exact, *preview_layers(parts, resolved))
        return replace(exact, num_inference_steps=stage.num_inference_steps)


def machine(runtime: Runtime) -> str:
    """Return what decides the last bits of a network's output, for people."""
    gpu = "" if runtime.gpu is None else f"{torch.cuda.get_device_name(runtime.gpu)}, "
    return f"{gpu}{platform.machine()}, torch {torch.__version__}, flowrl {__version__}"


def _for_worker(config: Config, folder: str) -> Config:
    """Return the recipe without what units bring, or only the trainer does."""

    def changed(section: str, **options: Any) -> Any:
        return getattr(config, section).model_copy(update=options)

    asked = [entry for entry in config.rewards if entry.when != "evaluation"]
    return config.model_copy(
        update={
            "rewards": asked,
            "lora": changed("lora", init_from=None),
            "ema": changed("ema", decay=None),
            "rollout": changed("rollout", workers=None),
            "run": changed("run", output_dir=folder),  # where precisions are recorded
            "memory": changed("memory", prompt_cache=None, text_encoders="free"),
        }
    )


def _build_parts(config: Config) -> RolloutParts:
    p, r = config.pipeline, config.rollout
    runtime = Runtime(
        device=p.device, mixed_precision=PRECISION[p.dtype], seed=config.run.seed
    )
    index = index_file(pipeline_path(p.path), p.revision)
    without = encoder_names(index) if index is not None else []
    start = starting_lora(config)
    loaded = dict.fromkeys(without)
    pipeline = build_pipeline(config, runtime.device, loaded=loaded, runtime=runtime)
    free_encoders(pipeline)
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
        text_cache=TextCache(backbone),  # never asked: units bring their conditioning
    )


# --- Ray -----------------------------------------------------------------------------------------


class RayActor:
    """What Ray runs: a `Worker` that gets weights out of its machine's object store.

    What it fails at is answered as text, so that no exception has to travel.
    """

    def __init__(self, recipe: str, threads: int):
        self.worker = Worker(recipe, threads)

    def join(self, probe: bytes, weights: list[Any]) -> dict[str, Any]:
        return _caught(lambda: asdict(self.worker.join(probe, lambda: _fetched(weights))))

    def draw(self, unit: bytes, weights: list[Any]) -> dict[str, Any]:
        return _caught(lambda: self.worker.draw(unit, lambda: _fetched(weights)))


def _fetched(weights: list[Any]) -> bytes:
    import ray

    data: Any = ray.get(weights[0])
    return data.tobytes()


def _caught(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"answer": work()}
    except Exception as error:
        failure = as_failure(error)
        if failure is None:
            raise
        cause = failure.cause if isinstance(failure, MachineFailure) else None
        return {"failure": str(failure), "cause": cause}


def _answered(said: dict[str, Any]) -> Any:
    """Return what an actor answered. Raises the UserError that it met."""
    if "answer" in said:
        return said["answer"]
    if said["cause"] is None:
        raise UserError(said["failure"])
    failure = MachineFailure(said["cause"], "")
    failure.args = (said["failure"],)
    raise failure


class RayWorker:
    """An actor, as `flowrl.sampling.workers.Remote` has it."""

    def __init__(self, actor: Any):
        self.actor = actor

    def join(self, probe: bytes, weights: Any) -> "Future[Joined]":
        return _then(self.actor.join.remote(probe, [weights]), lambda said: Joined(**said))

    def draw(self, unit: bytes, weights: Any) -> "Future[bytes]":
        return _then(self.actor.draw.remote(unit, [weights]), bytes)

    def kill(self) -> None:
        import ray

        with suppress(Exception):  # it may be dead, or its machine out of reach
            ray.kill(self.actor)


def _then(reference: Any, read: Callable[[Any], Any]) -> Future:
    """Return the future of what Ray will have, as `read` makes it of an answer."""
    found: Future = Future()

    def take(done: Future) -> None:
        try:
            found.set_result(read(_answered(done.result())))
        except Exception as error:
            found.set_exception(error)

    reference.future().add_done_callback(take)
    return found


class RayCluster:
    """Ray on this machine, started and stopped here, or a cluster at an address, which stays.

    Args:
        gpu: number of the trainer's GPU, which workers on this machine leave to it where there are
            others; None without CUDA.
    """

    def __init__(self, options: WorkerOptions, recipe: str, gpu: int | None):
        self.options, self.recipe, self.gpu = options, recipe, gpu
        self._share = 0.0 if gpu is None else 1.0  # of a GPU, for one worker
        self._folder: str | None = None  # of a Ray that was started here
        self._joined = False

    def start(self) -> None:
        """Raises UserError without Ray, and where no cluster answers."""
        # Read when Ray is imported: nothing is reported to anybody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if (Path.home() / ".ray" / "auth_token").exists() or "RAY_AUTH_TOKEN" in os.environ:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # as `ray start` does
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
            if self.options.address is not None:
                ray.init(address=self.options.address, **quiet)
                self._joined = True
            else:
                self._start_here(quiet)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            where = self.options.address or "this machine"
            raise UserError(
                f"rollout.workers: Ray at {where} does not answer: {str(error).strip()}. Start it "
                "with ray start, or set rollout.workers.address to null"
            ) from error

    def _start_here(self, quiet: dict[str, Any]) -> None:
        import ray

        gpus = self._other_gpus()
        root = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="ray-", dir=root if len(root) < SOCKET_PATH else "/tmp"
        )
        visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with _environment(visible):
            ray.init(
                address="local",
                num_cpus=self.options.count,
                num_gpus=len(gpus or ()),
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=self._folder,
                **quiet,
            )

    def _other_gpus(self) -> list[str] | None:
        """Return the GPUs of this machine for workers; the trainer's own where it is alone."""
        if self.gpu is None:
            return None
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
        others = [name for number, name in enumerate(every) if number != self.gpu]
        if not others:
            self._share = 1.0 / self.options.count
            return every
        if len(others) < self.options.count:
            raise UserError(
                f"rollout.workers.count is {self.options.count}, but this machine has "
                f"{len(others)} GPUs beside the trainer's: set it to {len(others)}"
            )
        return others

    def put(self, data: bytes) -> Any:
        import ray

        return ray.put(np.frombuffer(data, dtype=np.uint8))

    def launch(self, number: int) -> RayWorker:
        import ray

        placed = ray.remote(RayActor).options(
            num_cpus=1,
            num_gpus=self._share,
            max_concurrency=IN_FLIGHT,
            scheduling_strategy="SPREAD",
        )
        return RayWorker(placed.remote(self.recipe, torch.get_num_threads()))

    def close(self) -> None:
        import ray

        if self._joined or self._folder is not None:
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for what is started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def build_pool(config: Config, runtime: Runtime, given: ProvidedObjects) -> WorkerPool | None:
    """Return the pool of a recipe's workers, which starts with the first rollout; None without.

    Raises UserError for what workers could not load, and on several processes.
    """
    options = config.rollout.workers
    if options is None:
        return None
    for name, objects in (("pipeline", given.pipeline), ("rewards", given.rewards)):
        if objects is not None:
            raise UserError(
                f"rollout.workers load everything by its name, but a {name} object was given: name "
                f"it in the recipe, or set rollout.workers to null"
            )
    if runtime.world_size > 1:
        raise UserError(
            f"rollout.workers draw for one training process, and {runtime.world_size} were "
            "started: start one, or set rollout.workers to null"
        )
    cluster = RayCluster(options, config.model_dump_json(), runtime.gpu)
    return WorkerPool(
        cluster,
        count=options.count,
        slow_after=options.slow_after,
        timeout=options.timeout,
        join_timeout=options.join_timeout,
    )
