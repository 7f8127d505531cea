"""Draw the charts of a page: each measure against its cost, and gold against the trained proxy."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flowrl.utils.plots import LIGHT, new_figure, plot_line, png_bytes, style_axes
from scripts.compare import intervals
from scripts.compare.data import Line
from scripts.compare.results import COSTS, Results, costs
from scripts.compare.turning import turn

AXES = {
    "iterations": "iterations",
    "seconds": "seconds of training",
    "forwards": "forwards, of candidates, rollouts and training",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture of a page."""

    title: str
    file: str
    draw: Callable[[], bytes]  # a PNG file


def charts(results: Results) -> list[Chart]:
    """Return the charts of a page.

    Curves of a measure that all runs have at more than their ends; gold against the proxy where a
    page asks where gold turns.
    """
    page, found = results.page, []
    if page.judge:
        title = "gold against proxy"
        found.append(Chart(title=title, file="gold-proxy.png", draw=lambda: gold_chart(results)))
    for name, cost in costs(results).items():
        for measure in dict.fromkeys((page.score, page.gold, page.proxy)):
            curves = [c for m in results.lines for c in results.curves(m, measure, cost)]
            if min(map(len, curves)) > 2:
                found.append(
                    Chart(
                        title=f"{measure} against {COSTS[name]}",
                        file=f"{measure}-{name}.png",
                        draw=partial(curves_chart, results, measure, cost, AXES[name]),
                    )
                )
    return found


def curves_chart(
    results: Results, measure: str, cost: Callable[[Line], float], x_label: str
) -> bytes:
    """Draw the mean over seeds of each method, with its t-interval as a band."""
    page, theme = results.page, LIGHT
    figure = new_figure(9, 4.5, theme)
    axes = figure.subplots()
    title = f"{measure}, mean over seeds and 95 % interval"
    style_axes(axes, theme, title=title, x_label=x_label, y_label="score")
    for i, method in enumerate(results.lines):
        curves = results.curves(method, measure, cost)
        if not all(curves):
            continue
        each = [intervals.over_seeds([s for _, s in at]) for at in zip(*curves, strict=True)]
        points = intervals.mean_curve(curves)
        band = [(e.low, e.high) for e in each] if len(curves) > 1 else None
        style = {"linestyle": "--"} if i >= len(theme.lines) else {}
        plot_line(axes, points, theme.lines[i % len(theme.lines)], band, label=method, **style)
    if page.baseline in results.lines:
        level = intervals.over_seeds(results.last(page.baseline, measure)).mean
        axes.axhline(level, color=theme.soft, linestyle=":", linewidth=1)
    figure.legend(loc="outside right upper", frameon=False, labelcolor=theme.ink, fontsize=8)
    return png_bytes(figure)


def gold_chart(results: Results) -> bytes:
    """Draw the mean gold score of each method against its proxy, evaluation by evaluation.

    A method begins where all do, its turn is a star, and its end a dot.
    """
    page, theme = results.page, LIGHT
    figure = new_figure(9, 5, theme)
    axes = figure.subplots()
    labels = {"x_label": f"{page.proxy}, trained on", "y_label": f"{page.gold}, never trained on"}
    style_axes(axes, theme, title="gold against proxy over training, mean over seeds", **labels)
    for i, (method, runs) in enumerate(results.lines.items()):
        at = list(zip(*runs.values(), strict=True))
        each = [
            [intervals.mean([line.scores[name] for line in lines]) for lines in at]
            for name in (page.proxy, page.gold)
        ]
        points = list(zip(*each, strict=True))
        found = turn(list(runs.values()), page)
        color = theme.lines[i % len(theme.lines)]
        plot_line(axes, points, color, label=method)
        axes.plot(*points[-1], color=color, marker="o", markersize=6)
        axes.plot(found.proxy, found.gold.mean, color=color, marker="*", markersize=13)
    figure.legend(loc="outside right upper", frameon=False, labelcolor=theme.ink, fontsize=8)
    return png_bytes(figure)
