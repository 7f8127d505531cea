"""Line charts with Pillow: one panel a metric, each value thin, their running mean thick."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from flowrl.utils.images import GREY, INK, PAPER, Color, font

SCALE = 2  # drawn at twice the size and reduced, for smooth lines
THIN: Color = (168, 199, 240)
THICK: Color = (9, 82, 178)
COLORS: tuple[Color, ...] = (
    (31, 35, 40), (9, 82, 178), (207, 34, 46), (191, 135, 0), (26, 127, 55), (130, 80, 223),
    (20, 160, 170), (200, 80, 160), (90, 60, 30), (120, 190, 60),
)  # fmt: skip
RULE: Color = (226, 230, 235)
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44  # pixels around a panel's plot
LEGEND = 210  # pixels beside the plot of a comparison
SHARE = 20  # the running mean covers one point in so many

NOT_REWARDS = ("reward/std_in_group", "reward/invalid")

Points = Sequence[tuple[float, float]]  # (x, y), x ascending, all finite


def draw_curves(
    curves: Mapping[str, Points],
    *,
    x_label: str = "iteration",
    panel: tuple[int, int] = (640, 260),
) -> Image.Image:
    """A chart of named curves, two panels a row; a curve without points gets an empty panel.

    Raises ValueError when there is no curve at all.
    """
    if not curves:
        raise ValueError("a chart needs at least one curve, got none")
    across = min(2, len(curves))
    down = math.ceil(len(curves) / across)
    chart = Image.new("RGB", (panel[0] * across, panel[1] * down), PAPER)
    for i, (name, points) in enumerate(curves.items()):
        drawn = _panel(name, list(points), x_label, panel)
        chart.paste(drawn, (i % across * panel[0], i // across * panel[1]))
    return chart


def draw_comparison(
    lines: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    level: float | None = None,
    panel: tuple[int, int] = (900, 420),
) -> Image.Image:
    """Several named lines in one panel, a colour each, with a legend beside them.

    level: a value to reach, drawn across. Raises ValueError for more lines than colours, or none.
    """
    if not 0 < len(lines) <= len(COLORS):
        raise ValueError(f"a comparison needs 1 to {len(COLORS)} lines, got {len(lines)}")
    image = Image.new("RGB", (panel[0] * SCALE, panel[1] * SCALE), PAPER)
    pen = ImageDraw.Draw(image)
    draw_text(pen, (LEFT, 17), title, INK, "lm", 15)
    plot = panel[0] - LEGEND, panel[1]
    draw_text(pen, ((LEFT + plot[0] - RIGHT) / 2, panel[1] - 12), x_label, GREY, "mm", 12)
    xs, ys = zip(*(point for points in lines.values() for point in points), strict=True)
    heights = ys if level is None else (*ys, level)
    place = _axes(pen, _spread(xs, 0.0), _spread(heights, 0.06), plot)
    if level is not None:
        draw_line(pen, [place(min(xs), level), place(max(xs), level)], GREY, 1)
    for i, ((name, points), color) in enumerate(zip(lines.items(), COLORS, strict=False)):
        draw_line(pen, [place(x, y) for x, y in points], color, 2.5)
        for point in points:
            _dot(pen, place(*point), color)
        row = TOP + 18 * (i + 0.5)
        draw_line(pen, [(plot[0], row), (plot[0] + 20, row)], color, 2.5)
        draw_text(pen, (plot[0] + 28, row), name, INK, "lm", 12)
    return image.resize(panel, Image.Resampling.LANCZOS)


def reward_curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The curves of a run's rewards, from its metrics: `reward/mean` first, missing values out."""
    names = dict.fromkeys(name for row in metrics for name in row if name.startswith("reward/"))
    wanted = [name for name in names if name not in NOT_REWARDS]
    return {
        name: [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
        for name in sorted(wanted, key=lambda name: name != "reward/mean")
    }


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean over `window` neighbours, centred, over fewer at the ends."""
    half = window // 2
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within [low, high], about `count`."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((m for m in (1, 2, 5, 10) if m * power >= rough * 0.7), default=10)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _panel(name: str, points: list, x_label: str, size: tuple[int, int]) -> Image.Image:
    image = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), PAPER)
    pen = ImageDraw.Draw(image)
    window = 2 * (len(points) // SHARE // 2) + 1
    draw_text(pen, (LEFT, 17), name, INK, "lm", 15)
    if window > 1:
        draw_text(pen, (size[0] - RIGHT, 17), f"thick: mean of {window}", GREY, "rm", 12)
    draw_text(pen, ((LEFT + size[0] - RIGHT) / 2, size[1] - 12), x_label, GREY, "mm", 12)
    if points:
        _plot(pen, points, window, size)
    else:
        draw_text(pen, (size[0] / 2, size[1] / 2), "no values", GREY, "mm", 14)
    return image.resize(size, Image.Resampling.LANCZOS)


def _plot(pen: ImageDraw.ImageDraw, points: list, window: int, size: tuple[int, int]) -> None:
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    place = _axes(pen, _spread(xs, 0.0), _spread(ys, 0.06), size)
    draw_line(pen, [place(x, y) for x, y in points], THIN, 1.5)
    smooth = running_mean(ys, window)
    draw_line(pen, [place(x, y) for x, y in zip(xs, smooth, strict=True)], THICK, 2.5)
    _dot(pen, place(xs[-1], smooth[-1]), THICK)


def _axes(
    pen: ImageDraw.ImageDraw,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    size: tuple[int, int],
) -> Callable[[float, float], tuple[float, float]]:
    """Draw rules and numbers -> where a point (x, y) lies on the panel."""

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return (
            LEFT + across * (size[0] - LEFT - RIGHT),
            size[1] - BOTTOM - up * (size[1] - TOP - BOTTOM),
        )

    for value in ticks(*y_range):
        left, y = place(x_range[0], value)
        draw_line(pen, [(left, y), (size[0] - RIGHT, y)], RULE, 1)
        draw_text(pen, (left - 8, y), f"{value:.6g}", GREY, "rm", 12)
    for value in ticks(*x_range):
        x, bottom = place(value, y_range[0])
        draw_text(pen, (x, bottom + 12), f"{value:.6g}", GREY, "mm", 12)
    return place


def _spread(values: Sequence[float], pad: float) -> tuple[float, float]:
    """The values' range, widened by `pad` of it; a range of nothing gets a width of its own."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        width = 0.1 * abs(low) or 1.0
        return low - width / 2, low + width / 2
    return low - pad * (high - low), high + pad * (high - low)


def _dot(pen: ImageDraw.ImageDraw, at: tuple[float, float], color: Color) -> None:
    x, y = (c * SCALE for c in at)
    pen.ellipse((x - 6, y - 6, x + 6, y + 6), color)


def draw_line(pen: ImageDraw.ImageDraw, points: list, color: Color, width: float) -> None:
    """Points and width in pixels of the finished image; the pen draws SCALE times as large."""
    if len(points) > 1:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        pen.line(scaled, color, round(width * SCALE), joint="curve")


def draw_text(
    pen: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    color: Color,
    anchor: str,
    size: int,
) -> None:
    """Place and size in pixels of the finished image; anchor as Pillow has it."""
    place = (at[0] * SCALE, at[1] * SCALE)
    pen.text(place, text, color, font(size * SCALE), anchor=anchor)
