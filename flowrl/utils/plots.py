"""Draw charts and grids of images with matplotlib, as the bytes of a PNG file.

Only its `Figure` is used: pyplot would keep figures and a backend for the whole process.
"""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

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
RED, GREEN = LINES[1:3]
CELL, GAP, TEXT_LINE = 1.6, 0.1, 0.15  # inches, of an image, between images, and of a line of text
LETTERS, CAPTION_LINES = 27, 3  # of a line below or above an image; of its caption


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


# --- grids of images -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a grid: a caption, images below each other, then short notes."""

    caption: str
    images: "Sequence[Image.Image]"
    notes: Sequence[tuple[str, str]] = ()  # text of at most LETTERS, and its colour


def draw_grid(
    columns: Sequence[Column],
    *,
    heading: Sequence[str] = (),
    rows: Sequence[str] = (),
    across: int = 8,
) -> bytes:
    """Draw columns side by side, `across` in a band, with a heading above.

    rows: names of the rows of images, in the left margin.
    """
    across, left = min(across, len(columns)), 0.7 if rows else GAP
    deep = max(len(column.images) for column in columns)
    noted = max(len(column.notes) for column in columns)
    width, above = left + across * (CELL + GAP), CAPTION_LINES * TEXT_LINE + GAP
    letters = round(width / CELL * LETTERS)
    head = [line for text in heading for line in wrap(text, letters, max_lines=6)]
    band = above + deep * (CELL + GAP) + noted * TEXT_LINE + GAP
    top = (len(head) + bool(head)) * TEXT_LINE
    height = top + math.ceil(len(columns) / across) * band
    figure = new_figure(width, height)

    def write(x: float, y: float, text: str, color: str = INK, **style: Any) -> None:
        # Formulas are text: a prompt may have two dollars.
        style = {"va": "top", "color": color, "fontsize": 8, "parse_math": False} | style
        figure.text(x / width, 1 - y / height, text, **style)

    write(GAP, GAP / 2, "\n".join(head))
    for number, column in enumerate(columns):
        x, y = left + number % across * (CELL + GAP), top + number // across * band + above
        caption = wrap(column.caption, LETTERS, max_lines=CAPTION_LINES, placeholder="…")
        write(x, y - GAP / 2, "\n".join(caption), va="bottom")
        for row, image in enumerate(column.images):
            low = y + row * (CELL + GAP) + CELL
            axes = figure.add_axes((x / width, 1 - low / height, CELL / width, CELL / height))
            axes.imshow(image)
            axes.set_axis_off()
            if rows and not number % across:
                write(left - GAP, low - CELL / 2, rows[row], SOFT, ha="right", va="center")
        for line, (text, color) in enumerate(column.notes):
            write(x, y + deep * (CELL + GAP) + line * TEXT_LINE, text, color)
    figure.set_layout_engine("none")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # letters of no typeface
        return png_bytes(figure)
