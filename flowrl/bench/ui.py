"""What `flowrl ui` costs over many long runs: first paint, curves, and memory as time goes on.

A real Chromium looks at synthetic runs, while one of them grows.
"""

import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flowrl.errors import UserError
from flowrl.utils.journal import seal_line

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BODIES = 400  # different lines of a run, which repeat
WAIT_MS = 300_000
MB = 2**20

Row = dict[str, Any]


def find_chromium() -> str | None:
    """Return the path of the system's Chromium, None where there is none."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """Yield a headless Chromium of the system, driven by playwright; names resolve to nothing.

    Raises UserError where either is missing.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise UserError("a browser is driven by playwright: pip install playwright") from error
    path = find_chromium()
    if path is None:
        raise UserError(f"found no browser ({', '.join(BROWSERS)}): install the package chromium")
    given = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", *arguments]
    given.append("--disable-dev-shm-usage")  # which containers give little room
    if getattr(os, "geteuid", lambda: 1)() == 0:
        given.append("--no-sandbox")  # Chromium has none for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=given)
        try:
            yield browser
        finally:
            browser.close()


def write_run(folder: Path, steps: int, metrics: int, seed: int) -> None:
    """Write the metrics of a run: `metrics` values an iteration, held-out scores every 100."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {{iterations: {steps}}}\n")
    bodies = [_body(metrics, seed, number) for number in range(BODIES)]
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(steps + 1):
            if step % 100 == 0:
                row = {"step": step, "eval/geneval": 0.4 + step / steps / 4}
                file.write(seal_line(row).decode() + "\n")
            if step:
                file.write(_line(step, bodies[step % BODIES]))


def _line(step: int, body: str) -> str:
    return seal_line(json.loads(f'{{"step": {step}, {body}')).decode() + "\n"


def _body(metrics: int, seed: int, number: int) -> str:
    draw = random.Random(f"{seed} {number}")
    names = ["reward/mean", "reward/std_in_group", "groups/no_signal", "policy/kl", "grad/norm"]
    names += [f"policy/ratio_std/step_{i}" for i in range(metrics - len(names))]
    return json.dumps({name: draw.gauss(0.5, 0.1) for name in names[:metrics]})[1:]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run `flowrl ui` in a process of its own; yield its address and the process."""
    command = [sys.executable, "-m", "flowrl", "ui", str(folder), "--port", "0", "--token-env"]
    environment = os.environ | {"FLOWRL_UI_TOKEN": secrets.token_urlsafe(24)}
    with subprocess.Popen(
        [*command, "FLOWRL_UI_TOKEN"], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            assert child.stdout is not None
            address = child.stdout.readline().split()[-1]
            yield address, psutil.Process(child.pid)
        finally:
            child.terminate()


def bench_ui(*, runs: int, steps: int, metrics: int, seconds: float, samples: int) -> list[Row]:
    """Return rows of what was measured, with what is expected where anything is.

    Args:
        metrics: values of an iteration.
        seconds: for which one run grows by 10 iterations a second while its page is open.
        samples: how often memory is measured in that time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(runs):
            write_run(folder / f"run-{number:02d}", steps, metrics, number)
        size = sum(path.stat().st_size for path in folder.rglob("*.jsonl"))
        with served(folder) as (address, server), chromium("--js-flags=--expose-gc") as browser:
            page = browser.new_page(viewport={"width": 1366, "height": 900})
            page.set_default_timeout(WAIT_MS)
            rows = [_row(f"{runs} runs of {steps} iterations", size / MB, "MB")]
            rows += _first_paint(page, address, runs)
            rows += _all_curves(page, runs)
            return rows + _growth(page, server, folder / "run-00", steps, metrics, seconds, samples)


def _row(what: str, value: float, unit: str, expected: str = "") -> Row:
    return {"what": what, "is": value, "unit": unit, "expected": expected}


def _first_paint(page: Any, address: str, runs: int) -> list[Row]:
    page.goto(address)
    page.wait_for_function(f"() => document.querySelectorAll('tbody tr').length >= {runs}")
    shown = page.evaluate("performance.now()")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return [
        _row("first paint", paint / 1000, "s", "< 1"),
        _row("all runs listed", shown / 1000, "s"),
    ]


def _all_curves(page: Any, runs: int) -> list[Row]:
    """Measure the comparison of all runs: it draws what it has, and reads the rest."""
    began = time.perf_counter()
    page.evaluate("location.hash = '#/compare'")
    page.wait_for_selector('[data-metric="reward/mean"] .value')
    first = time.perf_counter() - began
    page.wait_for_function(
        "n => document.querySelectorAll('.charts').length"
        " && document.querySelector('.bar .muted').hidden"
        " && document.querySelectorAll('[data-metric=\"reward/mean\"] .value').length >= n",
        arg=runs,
    )
    return [
        _row("first curves of all runs", first, "s"),
        _row("all of them read", time.perf_counter() - began, "s"),
    ]


def _growth(
    page: Any,
    server: psutil.Process,
    run: Path,
    steps: int,
    metrics: int,
    seconds: float,
    samples: int,
) -> list[Row]:
    """Measure memory while one run grows, its page being open."""
    page.evaluate("name => { location.hash = '#/run?run=' + name; }", run.name)
    page.wait_for_selector('[data-metric="reward/mean"] .value')
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    found: list[tuple[float, float]] = []
    step, body = steps, _body(metrics, 0, 0)
    for number in range(samples + 1):
        until = time.monotonic() + (seconds / samples if number else 3)  # first it comes to rest
        while time.monotonic() < until:
            step += 1
            with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(_line(step, body))
            page.wait_for_timeout(100)
        devtools.send("HeapProfiler.collectGarbage")
        values = {m["name"]: m["value"] for m in devtools.send("Performance.getMetrics")["metrics"]}
        found.append((server.memory_info().rss / MB, values["JSHeapUsedSize"] / MB))
    rows = []
    for name, column in zip(("server", "page"), zip(*found, strict=True), strict=True):
        rows.append(_row(f"memory of the {name}, first", column[0], "MB"))
        rows.append(_row(f"memory of the {name}, last", column[-1], "MB", "as the first"))
        rows.append(_row(f"memory of the {name}, most", max(column), "MB"))
    return [*rows, _row("iterations that came meanwhile", step - steps, "")]
