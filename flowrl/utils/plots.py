"""Draw charts with matplotlib, as the bytes of a PNG file.

Only its `Figure` is used: pyplot would keep figures and a backend for the whole process.
"""

import io
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (x, y), x ascending, all finite

DPI = 144
PANEL = (6.0, 2.75)  # inches
SHARE = 20  # the running mean covers one point in so many


# Colours, as matplotlib reads them.
PAPER, INK, SOFT, RULE = "#ffffff", "#1f2328", "#59636e", "#d1d9e0"
LINES = (
    "#0952b2", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#1f2328", "#14a0aa", "#c850a0",
    "#8a5a2b", "#78be3c",
)  # fmt: skip


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor=PAPER)


def png_bytes(figure: "Figure") -> bytes:
    """Return the figure as a PNG file without date or version in it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def draw_curves(curves: Mapping[str, Points]) -> bytes:
    """Draw each curve in a panel of its own, two panels a row; one without points stays empty.

    Args:
        curves: scores over iterations, by the panel's title. Long curves are drawn thin below their
            running mean.
    """
    across = min(2, len(curves))
    down = math.ceil(len(curves) / across)
    figure = new_figure(PANEL[0] * across, PANEL[1] * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, points) in zip(panels, curves.items(), strict=False):
        style_axes(axes, title=name, x_label="iteration", y_label="score")
        if not points:
            axes.text(0.5, 0.5, "no values", color=SOFT, ha="center", transform=axes.transAxes)
        else:
            _smoothed(axes, points)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    return png_bytes(figure)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of `window` centred neighbours, of fewer at the ends."""
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _smoothed(axes: "Axes", points: Points) -> None:
    window = 2 * (len(points) // SHARE // 2) + 1
    if window == 1:
        return plot_line(axes, points, LINES[0], marker=".")
    (xs, ys), color = zip(*points, strict=True), LINES[0]
    axes.plot(xs, ys, color=color, alpha=0.35, linewidth=0.8, label="each")
    means = list(zip(xs, running_mean(ys, window), strict=True))
    plot_line(axes, means, color, label=f"mean of {window}")
    axes.legend(loc="best", frameon=False, labelcolor=SOFT, fontsize=8)


def plot_line(axes: "Axes", points: Points, color: str, **style: Any) -> None:
    """Plot a line; ticks are whole numbers where all its x are."""
    from matplotlib.ticker import MaxNLocator

    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=color, linewidth=1.8, markersize=4, **style)
    if all(float(x).is_integer() for x in xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def style_axes(axes: "Axes", *, title: str, x_label: str, y_label: str) -> None:
    """Set title, labels and colours."""
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel(x_label, color=SOFT, fontsize=9)
    axes.set_ylabel(y_label, color=SOFT, fontsize=9)
    axes.set_facecolor(PAPER)
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0, labelsize=9)
    axes.spines[:].set_visible(False)
