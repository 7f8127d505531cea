"""The page of rewards that can be gamed: the trained proxy rises, and gold?"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from flowrl.functional.contrasts import Interval
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.plots import LINES, new_figure, png_bytes, style_axes
from scripts.arena.proxies import NamedColor, Vivid
from scripts.arena.report import NEW_FAMILIES, NEW_REQUESTS, Scores, interval_text
from scripts.arena.runs import GOLD, RUNS, Run
from scripts.compare.data import CURVES, lines_of, read_curves, read_rows, write_curves
from scripts.compare.intervals import over_seeds

PROXIES = (Vivid.name, NamedColor.name)


def collect_curves(runs: Sequence[Run], data: Path) -> None:
    """Write every evaluation of the finished runs; those of other runs stay."""
    finished = [run for run in runs if run.finished]
    lines = [k for run in finished for k in lines_of(run.folder, run.arm, run.seed)]
    here = {(run.arm, run.seed) for run in finished}
    if (data / CURVES).is_file():
        lines += [k for k in read_curves(data) if (k.method, k.seed) not in here]
    write_curves(data, lines)


def changes(data: Path, arm: str) -> tuple[dict[str, Interval], Interval]:
    """Return an arm's change of each proxy over its runs, and of gold over runs and requests."""
    rows = [row for row in read_rows(data / RUNS) if row["arm"] == arm]
    proxies = {
        name: over_seeds([float(row[name]) - float(row[f"base {name}"]) for row in rows])
        for name in PROXIES
        if rows and all(row.get(name) for row in rows)
    }
    scores = Scores.read(data)
    new = scores.where("split", NEW_REQUESTS)
    families = scores.where("split", NEW_FAMILIES)
    both = {world: new[world] | families[world] for world in new}
    return proxies, scores.interval(scores.gains(arm), both)


def render_gamed(data: Path) -> Path:
    """Write the page and its chart from the data; return the page."""
    rows = read_rows(data / RUNS)
    runs = Counter(row["arm"] for row in rows)
    arms = list(runs)
    lines = [
        "# Rewards that can be gamed", "",
        "`vivid` is the mean saturation of the pixels, `named_color` the share of them in a colour "
        "that the prompt names; neither looks at shapes or numbers. Each method trains on one of "
        "them, and beside it on the default rewards at the same rate, which is therefore not too "
        "high. *Plus geneval* adds the strict score of all demands to the proxy; *gated by "
        "geneval* counts the proxy for images that have it, at equal weights. *Rolled back* and "
        "*KL raised* are `run.on_hacking` with the strict score held out and patience 1, evaluated "
        "every 2 iterations: they return to the weights that it rated highest. Gold is a judge "
        "that is never trained on. The rates were chosen on other worlds: SFT's is half of what "
        "was tried first. The weights of the sums were checked in one run on world 1. Made by "
        "`python -m scripts.arena "
        f"--gamed --world {' '.join(sorted({row['world'] for row in rows}))} --seeds "
        f"{max(runs.values())}`.", "",
        "![gold against iterations](gold.png)", "",
        "| method | runs | vivid | named_color | gold |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for arm in arms:
        proxies, gold = changes(data, arm)
        cells = [interval_text(proxies[name]) if name in proxies else "" for name in PROXIES]
        lines.append(f"| {arm} | {runs[arm]} | {' | '.join(cells)} | {interval_text(gold)} |")
    lines += [
        "", "Changes from the base to the last iteration. A proxy's interval is over runs (t), "
        "gold's is crossed over runs and requests of the test.",
    ]  # fmt: skip
    write_bytes(data / "gold.png", _chart(data, arms))
    path = data / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def _chart(data: Path, arms: Sequence[str]) -> bytes:
    """Draw the mean gold score of each method over its iterations."""
    figure, curves = new_figure(8, 4.5), read_curves(data)
    axes = figure.subplots()
    style_axes(axes, title="gold, mean over runs", x_label="iteration", y_label="gold")
    for number, arm in enumerate(arms):
        seeds = sorted({line.seed for line in curves if line.method == arm})
        # The last score of an iteration: that of weights that came back. A run that ended keeps it.
        runs = [
            {k.iteration: k.scores[GOLD] for k in curves if (k.method, k.seed) == (arm, seed)}
            for seed in seeds
        ]
        xs = sorted(set().union(*runs))
        ys = [mean(run[max(i for i in run if i <= x)] for run in runs) for x in xs]
        axes.plot(xs, ys, color=LINES[number % len(LINES)], label=arm)
    axes.legend(frameon=False, fontsize=7)
    return png_bytes(figure)
