"""Run a bench many times and print how far its ratios spread: (largest - least) / median.

    python scripts/bench_spread.py --runs 20 rollout --batch 8 --steps 4
    python scripts/bench_spread.py --runs 20 --same-process iteration --size sd3.5-medium \\
        --device cpu --layers 2 --pixels 64 --prompts 1 --group-size 2 --steps 3

Every run is a process of its own, or all of them are one after another in this process, which takes
less time. What is behind the bench's name goes to it as it is. Ctrl-C ends it with what it has.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# The ratios that benches print, and what names a row of theirs.
RATIOS = (
    "ratio", "wall ratio", "of counts", "q", "phi", "measured", "predicted", "of_predicted",
    "to_uncompiled_peft", "forward_share", "forward_share_with_decoding", "in_forwards",
    "training_by_bare",
)  # fmt: skip
NAMES = ("job", "part", "phase", "size", "plan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--same-process", action="store_true")
    parser.add_argument("bench", nargs=argparse.REMAINDER, help="rollout, tree, solrl or iteration")
    given = parser.parse_args()
    words = ["bench", *given.bench, "--json"]
    found: dict[str, list[float]] = {}
    try:
        for _ in range(given.runs):
            text = printed_here(words) if given.same_process else printed_by_a_process(words)
            for line in text.splitlines():
                for name, value in ratios(json.loads(line)):
                    found.setdefault(name, []).append(value)
    finally:
        print("runs  least   median  largest  spread  ratio")
        for name, values in found.items():
            least, middle, most = min(values), statistics.median(values), max(values)
            figures = f"{least:.4f}  {middle:.4f}  {most:.4f}   {spread(values):6.1%}"
            print(f"{len(values):4d}  {figures}  {name}")


def printed_by_a_process(words: Sequence[str]) -> str:
    command = [sys.executable, "-m", "flowrl", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def printed_here(words: Sequence[str]) -> str:
    from flowrl.cli import main as flowrl

    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            flowrl(words)
        except SystemExit as ended:
            if ended.code:
                raise
    return text.getvalue()


def spread(values: Sequence[float]) -> float:
    """Return the distance of the largest and the least by the median."""
    return (max(values) - min(values)) / statistics.median(values)


def ratios(found: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Yield each ratio of a bench's JSON by its row and name, in order."""
    if isinstance(found, Mapping):
        own = next((str(found[name]) for name in NAMES if name in found), "")
        where = " ".join(filter(None, (where, own)))
        for name, value in found.items():
            if name in RATIOS and value:  # 0 and None where there is nothing to compare
                yield f"{where}: {name}".removeprefix(": "), float(value)
            elif isinstance(value, list):
                yield from ratios(value, where)
    elif isinstance(found, list):
        for row in found:
            yield from ratios(row, where)


if __name__ == "__main__":
    main()
