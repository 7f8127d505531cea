"""The default tests need a CPU and nothing else: no network, no weights, no patience."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch and huggingface_hub are imported, which read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than free cores is far slower
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from flowrl.config import Config
    from flowrl.training.loop import Learner
    from flowrl.training.run import Run

ROOT = Path(__file__).parents[1]
QUICK, SLOW = 25, 100  # cases of a property, by default and with --slow
settings.register_profile(
    "flowrl", deadline=None, derandomize=True, database=None, max_examples=QUICK
)
settings.register_profile("slow", settings.get_profile("flowrl"), max_examples=SLOW)
settings.load_profile("flowrl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--weights", action="store_true", help="also run tests that download weights")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("slow" if config.getoption("--slow") else "flowrl")
    config.option.showlocals = True  # a test that loops over cases names the one that fails
    if not config.getoption("--weights"):
        os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    missing = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA device"}
    for name in ("slow", "weights"):
        if not config.getoption(f"--{name}"):
            missing[name] = f"marked {name}: run with --{name}"
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


# --- a pipeline to train -----------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny networks lose time on more; and the order of sums, hence every bit, stays the same."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_pipeline_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The built-in tiny SD3 with the first and the last of its blocks alone: half the work."""
    import shutil

    from safetensors.torch import load_file, save_file

    from flowrl.backbones.loading import pipeline_path

    folder = tmp_path_factory.mktemp("pipelines") / "tiny-sd3"
    shutil.copytree(pipeline_path("tiny-sd3"), folder)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    last = f"transformer_blocks.{config['num_layers'] - 1}."
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    kept = {
        name.replace(last, "transformer_blocks.1."): tensor
        for name, tensor in load_file(path).items()
        if not name.startswith("transformer_blocks.")
        or name.startswith(("transformer_blocks.0.", last))
    }
    save_file(kept, path, {"format": "pt"})
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 2}))
    return str(folder)


@pytest.fixture(scope="session")
def load_tiny(tiny_pipeline_path: str) -> Callable[..., Any]:
    """A pipeline with a transformer of its own at each call: training changes what it is given.

    family: sd3, or flux and sana for their built-in ones.
    """
    import copy
    import functools

    from flowrl.backbones.loading import load_pipeline

    loaded = functools.cache(lambda dtype, path: load_pipeline(path, dtype=dtype, device="cpu"))

    def load(dtype: str = "fp32", family: str = "sd3") -> Any:
        path = f"tiny-{family}" if family in ("flux", "sana") else tiny_pipeline_path
        parts = loaded(dtype, path).components
        pipeline = type(loaded(dtype, path))(
            **parts | {name: copy.deepcopy(parts[name]) for name in ("transformer", "scheduler")}
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return load


@pytest.fixture(scope="session")
def plain_cards() -> Iterator[None]:
    """Cards of runs show a square in place of their curves, which take a second to draw."""
    from PIL import Image

    square = io.BytesIO()
    Image.new("RGB", (300, 300)).save(square, "PNG")
    with pytest.MonkeyPatch.context() as patch:
        draw = "flowrl.export.model_card.draw_curves"
        patch.setattr(draw, lambda *_, **__: square.getvalue())
        yield


@pytest.fixture(scope="session")
def tiny_config(tiny_pipeline_path: str, plain_cards: None) -> Callable[..., Config]:
    """A complete configuration of a very small run, with changes as `section={key: value}`."""
    from flowrl.config import parse_config

    def make(**changes: dict[str, Any] | list[Any]) -> Config:
        base: dict[str, Any] = {
            "pipeline": {"device": "cpu", "max_sequence_length": 12},
            "lora": {"rank": 4, "alpha": 6},
            "prompts": {"train": "tiny:colors:train", "allow_overlap": True},
            "rollout": {
                "prompts_per_iteration": 2,
                "group_size": 4,
                "num_inference_steps": 4,
                "batch_size": 8,
            },
            "optim": {"lr": 1e-2, "micro_batch": 8},
            "rewards": [{"name": "brightness"}],
            "run": {"iterations": 2, "checkpoint_every": 1, "sample_every": 0, "trackers": []},
        }
        for section, value in changes.items():
            base[section] = base.get(section, {}) | value if isinstance(value, dict) else value
        base["pipeline"] = dict(base["pipeline"])
        family = base["pipeline"].pop("family", "sd3")
        path = f"tiny-{family}" if family in ("flux", "sana") else tiny_pipeline_path
        base["pipeline"] = {"path": path} | base["pipeline"]
        return parse_config(base)

    return make


@pytest.fixture(scope="session")
def make_learner(
    tiny_config: Callable[..., Config], load_tiny: Callable[..., Any]
) -> Callable[..., Learner]:
    """A learner on a fresh tiny pipeline, changed as `tiny_config` is."""
    from flowrl.assembly.learner import ProvidedObjects, build_learner
    from flowrl.utils.distributed import Runtime

    def make(
        *, rewards: dict[str, Any] | None = None, specs: list[Any] | None = None, **changes: Any
    ) -> Learner:
        """rewards: callables by name; specs: the configuration's section, instead."""
        config = tiny_config(**changes | ({"rewards": specs} if specs else {}))
        given = ProvidedObjects(
            pipeline=load_tiny(config.pipeline.dtype, config.pipeline.path.removeprefix("tiny-")),
            rewards=rewards,
        )
        return build_learner(config, Runtime(device="cpu"), given)

    return make


@pytest.fixture
def make_run(
    tiny_config: Callable[..., Config], load_tiny: Callable[..., Any], tmp_path: Path
) -> Callable[..., tuple[Config, Learner, Run]]:
    """(configuration, learner, run) in the folder `run`, changed as `tiny_config` is.

    resume: the state of the checkpoint that it goes on from; evaluator: in place of its own.
    """
    from flowrl.assembly.learner import ProvidedObjects, build_evaluator, build_learner, build_run
    from flowrl.config import config_yaml
    from flowrl.training.checkpoint import CONFIG
    from flowrl.utils.distributed import Runtime

    def make(
        resume: dict[str, Any] | None = None, *, evaluator: Any = None, **changes: Any
    ) -> tuple[Config, Learner, Run]:
        own = {"iterations": 4, "checkpoint_every": 100, "output_dir": str(tmp_path / "run")}
        config = tiny_config(**changes | {"run": own | changes.get("run", {})})
        given = ProvidedObjects(pipeline=load_tiny())
        learner = build_learner(config, Runtime(device="cpu"), given)
        evaluator = evaluator or build_evaluator(config, given.pipeline, learner.specs, given)
        run = build_run(config, learner, evaluator, resume, resumed=resume is not None)
        (run.folder / CONFIG).write_text(config_yaml(config))
        return config, learner, run

    return make


# --- plans ---------------------------------------------------------------------------------------


@pytest.fixture
def even_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with activations in proportion to images and pixels, whose counting takes seconds."""
    from flowrl.planning.activations import Activations

    def sampled(rows: int, height: int, width: int, *, learn: bool = False) -> Activations:
        size = 100 * rows * height * width
        return Activations(peak=size * (8 if learn else 1), held=0, operations=10_000.0 * size)

    def transformer(forward: Any, *, gradients: bool, checkpointing: bool = False) -> Activations:
        return sampled(forward.rows, forward.height, forward.width, learn=gradients)

    def decoder(
        spec: Any, rows: int, height: int, width: int, dtype: Any, *, tiling: bool = False
    ) -> Activations:
        return sampled(rows, height, width)

    for module in ("activations", "memory"):
        monkeypatch.setattr(f"flowrl.planning.{module}.count_forward", transformer)
        monkeypatch.setattr(f"flowrl.planning.{module}.count_decode", decoder)


# --- commands ------------------------------------------------------------------------------------


@pytest.fixture
def flowrl(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run the program with these words: (exit code, stdout, stderr)."""
    from flowrl.cli import main

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


# --- processes ---------------------------------------------------------------------------------


@pytest.fixture
def launch() -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Start a script in two processes of one group, which are killed at the end of the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(*words: object) -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(2):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
            running.append(
                subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    env=os.environ | {name: str(value) for name, value in place.items()},
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
        return running

    yield begin
    for process in running:
        process.kill()
        process.communicate()


# --- servers and folders of images -------------------------------------------------------------


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[str]]:
    """(app, limit of its connections) -> a context with the address of its real server."""
    from flowrl.utils.serving import make_server

    @contextmanager
    def serve(app: Any, **limits: Any) -> Iterator[str]:
        listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        server = make_server(app, **limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

    return serve


@pytest.fixture(scope="session")
def write_images() -> Callable[..., Path]:
    """Write a folder of images in GenEval's layout: some of each prompt."""
    from PIL import Image

    def write(folder: Path, texts: Sequence[str], images: int = 3) -> Path:
        for index, text in enumerate(texts):
            place = folder / f"{index:05d}"
            (place / "samples").mkdir(parents=True)
            (place / "metadata.jsonl").write_text(json.dumps({"prompt": text}))
            for k in range(images):
                color = (60 * k % 256, 40 * index % 256, 90)
                Image.new("RGB", (20, 16), color).save(place / "samples" / f"{k:04d}.png")
        return folder

    return write
