"""Compare methods over seeds, keep the data, and render the pages of the gallery.

    python -m scripts.compare                              render every page from its data
    python -m scripts.compare --tune                       try each method's values (validation)
    python -m scripts.compare --run --seeds 5 --jobs 2 --background
    python -m scripts.compare --guidance                   the bases with guidance

Runs stop by iterations and never by minutes, so that they may share the machine; a run that is
finished is skipped, and one that was interrupted goes on. `--output` has a folder for each page,
with its data and its README.md, `--runs` the folders of runs.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.compare.data import IMAGES
from scripts.compare.page import Page, load_page, page_names
from scripts.compare.report import render
from scripts.compare.runs import collect, jobs_of, run_all, score_bases, tune


def main(words: list[str] | None = None) -> None:
    asked = _parser().parse_args(words)
    if asked.background:
        _in_background(asked)
        return
    for name in asked.page or page_names():
        page = load_page(name)
        data = asked.output / name
        failed = _measure(asked, page, data)
        if (data / IMAGES).is_file():  # pages of earlier versions have none, and stay as they are
            print(render(page, data))
        elif asked.page:
            print(f"{name}: no data in {data} yet, add --run")
        if failed:
            raise SystemExit(f"{len(failed)} runs did not finish: {', '.join(failed)}")


def _measure(asked: argparse.Namespace, page: Page, data: Path) -> list[str]:
    """Run and measure what is asked for; return the names of runs that failed."""
    runs, seeds = asked.runs / page.name, asked.seeds or page.seeds
    some = page.only(asked.method) if asked.method else page
    failed: list[str] = []
    if asked.tune:
        failed += tune(page, some, runs, data, at_once=asked.jobs)
    if asked.run:
        failed += run_all(jobs_of(some, runs, data, seeds), at_once=asked.jobs)
    if asked.guidance:
        score_bases(some, runs, data)
    if asked.run or asked.collect:
        print(f"{page.name}: data of {collect(page, runs, data, seeds)} runs")
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--page", action="append", choices=page_names(), help="may be repeated")
    parser.add_argument(
        "--method", action="append", help="tune, run or time this one alone; may be repeated"
    )
    parser.add_argument("--seeds", type=int, help="runs of each method; the page's own by default")
    parser.add_argument("--output", type=Path, default=Path("gallery"), help="folder of the pages")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"), help="folder of runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--tune", action="store_true", help="try values on validation prompts")
    parser.add_argument("--run", action="store_true", help="train what is not finished")
    parser.add_argument("--collect", action="store_true", help="read the data of finished runs")
    parser.add_argument("--guidance", action="store_true", help="score the bases with guidance")
    parser.add_argument("--background", action="store_true", help="detach; RUNS/compare.log")
    return parser


def _in_background(asked: argparse.Namespace) -> None:
    """Start the same command again, detached from this terminal."""
    asked.runs.mkdir(parents=True, exist_ok=True)
    words = [word for word in sys.argv[1:] if word != "--background"]
    log = asked.runs / "compare.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.compare", *words],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    print(f"process {process.pid}, see {log}")


if __name__ == "__main__":
    main()
