"""Run folders to look at, made without training; a server of the page and a browser."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.training.evaluate import Evaluation
from flowrl.training.ledger import Ledger
from flowrl.utils.journal import seal_line

RECIPE = {
    "pipeline": {"path": "tiny-sd3"},
    "objective": {"kind": "grpo"},
    "optim": {"lr": 1e-3},
    "run": {"iterations": 8},
}


@pytest.fixture(scope="session")
def make_folder_in() -> Callable[..., Path]:
    """A run folder of 4 iterations with two evaluations, and a checkpoint at 4, below a folder.

    stop: the content of its last event, None for a run without one.
    """

    def make(
        root: Path, name: str = "run", *, stop: dict | None = None,
        prompts: tuple[str, ...] = ("a red circle",), recipe: dict | None = None,
    ) -> Path:  # fmt: skip
        folder = root / name
        folder.mkdir(parents=True)
        ledger = Ledger(folder)
        ledger.append("start", flowrl="0", step=None, recipe=recipe or RECIPE, facts={}, changed={})
        lines = [{"step": 0, "eval/brightness": 0.25}]
        lines += [{"step": i, "reward/mean": i / 10, "loss": 0.5} for i in range(1, 5)]
        lines += [{"step": 4, "eval/brightness": 0.75}]
        text = "".join(seal_line(line).decode() + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "config.yaml").write_text("run:\n  iterations: 8\n")
        for step in (0, 4):
            images = torch.full((len(prompts), 3, 4, 4), 50 * (step + 1), dtype=torch.uint8)
            evaluation = Evaluation(
                scores=torch.full((len(prompts), 1), step / 8), names=("brightness",),
                images=images, prompts=prompts, draws=(0,) * len(prompts), key="",
                prompt=torch.arange(len(prompts)),
                statistics=torch.empty(0), thumbnails=torch.empty(0),
            )  # fmt: skip
            evaluation.save(folder / "evaluations" / f"step-{step:06d}.safetensors")
        (folder / "samples").mkdir()
        Image.new("RGB", (8, 4), "red").save(folder / "samples" / "step-000004.png")
        (folder / "checkpoints" / "step-000004").mkdir(parents=True)
        (folder / "checkpoints" / "step-000004" / "state.safetensors").touch()
        if stop is not None:
            ledger.append("stop", step=4, seconds=2.0, **stop)
        return folder

    return make


@pytest.fixture
def make_folder(make_folder_in: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The same below `runs` of the test's own folder."""
    return partial(make_folder_in, tmp_path / "runs")


@pytest.fixture(scope="session")
def serve_app(serving: Callable[..., Any]) -> Callable[[Any], Any]:
    """A context manager that serves an app whose token is "a-token"; yields its page's address."""

    @contextlib.contextmanager
    def serve(app: Any) -> Iterator[str]:
        with serving(app) as address:
            yield f"{address}/#token=a-token"

    return serve


@pytest.fixture(scope="session")
def serve(serve_app: Callable[[Any], Any]) -> Callable[[Path], Any]:
    """A context manager that serves the runs below a folder and yields the page's address."""
    from flowrl.web.app import make_app

    return lambda root: serve_app(make_app(root, token="a-token", host="127.0.0.1"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of the system; names resolve to nothing in it."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: .[test]")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs Chromium, as Debian's package chromium")
    arguments = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
    arguments.append("--disable-dev-shm-usage")  # which containers give little room
    if getattr(os, "geteuid", lambda: 1)() == 0:
        arguments.append("--no-sandbox")  # Chromium has none for root
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in a context of its own, which notes its requests and its faults."""
    page = browser.new_page(viewport={"width": 1366, "height": 900})
    page.set_default_timeout(60_000)
    page.faults, page.asked = [], []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    page.close()
