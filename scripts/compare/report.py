"""Render a page from its data: tables, and what is missing."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from flowrl.functional.contrasts import Interval
from flowrl.tiny.world import planted
from flowrl.utils.files import write_text
from scripts.compare import intervals
from scripts.compare.data import GUIDED, TUNING, Image, chosen, read_rows
from scripts.compare.law import FREEDOM, LAYOUT, Variety, variety
from scripts.compare.page import Method, Page, at_steps
from scripts.compare.results import Results

Table = Sequence[Mapping[str, str]]
LEAST = 5  # runs for an interquartile mean


def scores_table(results: Results) -> list[dict[str, str]]:
    """A row a method: last scores over seeds, the change over images, and what it cost."""
    page, rows = results.page, []
    for method, runs in results.lines.items():
        row = {"method": method, "seeds": str(len(runs))}
        if page.own_steps:
            row["own steps"] = str((page.method(method).steps or page.steps)[0])
        for heading, measure in at_steps(page, page.score).items():
            change = [v - results.base(method, measure) for v in results.last(method, measure)]
            row[f"{page.score}, {heading}"] = (
                f"{_number(results.base(method, measure))} → "
                f"{_number(intervals.over_seeds(results.last(method, measure)).mean)}"
            )
            row[f"change over seeds, {heading}"] = _interval(intervals.over_seeds(change))
            images = results.change_of_images(method, measure)
            row[f"over images, {heading}"] = _interval(images) if images else "n/a"
        row["interquartile mean"] = _interval(
            intervals.interquartile_mean(results.last(method, page.score)), sign=False
        )
        if len(runs) < LEAST:
            row["interquartile mean"] = "n/a"
        for name in dict.fromkeys((page.gold, page.quality)):
            if name and name != page.score:
                last = intervals.over_seeds(results.last(method, name)).mean
                row[name] = f"{_number(results.base(method, name))} → {_number(last)}"
        last = next(iter(runs.values()))[-1]
        row |= {"iterations": str(last.iteration), "images": f"{last.images:.0f}"}
        row["forwards"] = f"{last.forwards:.0f}"
        rows.append(row)
    return rows


def differences_table(results: Results, baseline: str) -> list[dict[str, str]]:
    """A row a method: how far its last scores lie above the baseline's, paired by seed.

    Methods that begin at another base, as on another pipeline, are not compared.
    """
    page, rows = results.page, []
    own = results.lines.get(baseline)
    if own is None:
        return []
    for method, runs in results.lines.items():
        if results.base(method, page.score) != results.base(baseline, page.score):
            continue
        if not (both := sorted(set(runs) & set(own))):
            continue
        row = {"method": method}
        for measure in dict.fromkeys((page.score, page.gold)):
            pairs = [(runs[s][-1].scores, own[s][-1].scores) for s in both]
            ends = intervals.over_seeds([a[measure] - b[measure] for a, b in pairs])
            row[f"{measure} above at the end"] = _interval(ends)
            images = results.difference_of_images(method, baseline, measure)
            row[f"{measure}, over images"] = _interval(images) if images else "n/a"
        rows.append(row)
    return rows


def variety_table(results: Results) -> list[dict[str, str]]:
    """A row a method whose images' layouts were read: how they vary, beside the law."""
    rows = []
    for method, kept in results.images.items():
        base = _variety(results.base_images.get(method, []))
        last = [run for images in kept.values() if (run := _variety(images)) is not None]
        if base is None or len(last) < len(kept):
            continue
        row = {"method": method, "right images with a choice": str(base.images)}
        row["right images with a choice"] += f" → {sum(run.images for run in last) / len(last):.0f}"
        law = intervals.over_seeds([run.law for run in last]).mean
        row["same layout, two of a request"] = _change(base, last, "collisions")
        row["by the law"] = _number(law)
        row["entropy of layouts, nats"] = _change(base, last, "entropy")
        row["divergence from the law, nats"] = _change(base, last, "divergence")
        rows.append(row)
    return rows


def _variety(images: Sequence[Image]) -> Variety | None:
    if not any(LAYOUT in image.scores for image in images):
        return None
    layout, freedom = (
        [image.scores.get(name, math.nan) for image in images] for name in (LAYOUT, FREEDOM)
    )
    return variety([image.request for image in images], layout, freedom)


def _change(base: Variety, last: Sequence[Variety], name: str) -> str:
    after = intervals.over_seeds([getattr(run, name) for run in last])
    return f"{_number(getattr(base, name))} → {_interval(after, sign=False)}"


def tuning_table(data: Path) -> list[dict[str, str]]:
    """A row for every value that was tried on validation prompts, the chosen ones marked."""
    best = chosen(data)
    return [
        row | {"chosen": "yes" if tuple(row["options"].split()) == best[row["method"]] else ""}
        for row in read_rows(data / TUNING)
    ]


def guided_table(results: Results, data: Path) -> list[dict[str, str]]:
    """A row a method: the base's scores at each guidance, and the LoRA's above the best of them."""
    page, rows = results.page, []
    scored = read_rows(data / GUIDED)
    for method in results.lines:
        tried = [found for found in scored if found["method"] == method]
        if not tried:
            continue
        row = {"method": method}
        for heading, measure in at_steps(page, page.score).items():
            for found in tried:
                row[f"guidance {found['guidance']}, {heading}"] = _number(float(found[measure]))
            best = max(float(found[measure]) for found in tried)
            change = [score - best for score in results.last(method, measure)]
            row[f"the base's best, {heading}"] = _number(best)
            row[f"aligned above the best, {heading}"] = _interval(intervals.over_seeds(change))
        rows.append(row)
    return rows


def render(page: Page, data: Path) -> Path:
    """Write README.md beside the data; return its path."""
    write_text(data / "README.md", text_of(Results.read(page, data), data))
    return data / "README.md"


def text_of(results: Results, data: Path) -> str:
    """Return the text of a page."""
    page = results.page
    parts = [
        f"# {page.title}",
        page.text.strip(),
        planted(),
        f"`python -m scripts.compare --page {page.name}`",
    ]
    parts[-1] += " renders this page from the data beside it."
    parts += [_missing(results), "## Scores", markdown(scores_table(results)), LEGEND]
    if len(table := differences_table(results, page.baseline)) > 1:
        parts += [f"## Against {page.baseline}", markdown(table), ENDS]
    if table := guided_table(results, data):
        parts += ["## The base with guidance", markdown(table), GUIDED_SAY]
    if table := variety_table(results):
        parts += ["## Diversity", markdown(table), VARIETY]
    if table := tuning_table(data):
        parts += ["## Tuning", TUNED, markdown(table)]
    ran = [method for method in page.methods if method.name in results.lines]
    notes = [f"- **{m.name}**: {m.note}" for m in ran if m.note]
    parts += ["## Methods", "\n".join(notes), _common(ran), markdown(_options(ran))]
    return "\n\n".join(part for part in parts if part) + "\n"


LEGEND = (
    "Changes over seeds have a 95 % t-interval over runs; those over images a bootstrap interval "
    "of each image's mean over runs, requests resampled whole; the interquartile mean a bootstrap "
    "interval over runs ([2108.13264](https://arxiv.org/abs/2108.13264)). Forwards are those of "
    "candidates, rollouts and training, in few bits or many."
)
GUIDED_SAY = (
    "The base at each guidance that was tried (`--guidance`); SD3 and SANA pay for guidance with "
    "a second forward in every step. *The base's best* is taken on these very prompts, for each "
    "number of steps, which favours the base. Aligned images are those of the table above, without "
    "guidance. The interval is over seeds alone: the base's score is one number, over as many "
    "images."
)
ENDS = (
    "Differences of last scores, whatever they cost, are paired by seed, with a t-interval over "
    "seeds and one over images. Runs are scored at their two ends alone."
)
TUNED = (
    "At the fewer steps, on validation prompts, one run of each unless its notes say otherwise: "
    "differences of a few hundredths may be chance. Runs of another length, or with options that a "
    "method had before, are named in its notes. What was chosen comes on top of a method's options."
)
VARIETY = (
    "Of images that the second judge finds right: how often two of one request show the same "
    "layout, and the entropy of layouts, pooled over requests with as many possible layouts. Both "
    "are corrected for few images, so that a divergence may be a little below 0. The drawing "
    "program draws all layouts of a request equally often."
)


def _missing(results: Results) -> str:
    page, missing = results.page, []
    gone = [method.name for method in page.methods if method.name not in results.lines]
    if gone:
        missing.append(f"No runs yet: {'; '.join(gone)}.")
    few = {m: len(runs) for m, runs in results.lines.items() if len(runs) < page.seeds}
    if few:
        text = ", ".join(f"{method} ({count})" for method, count in few.items())
        missing.append(f"Fewer than {page.seeds} seeds: {text}.")
    return f"**Missing.** {' '.join(missing)}" if missing else ""


def _common(methods: Sequence[Method]) -> str:
    """Say what all methods have; a method's own options come after these."""
    shared = _shared(methods)
    return f"All have {_code(shared)}" if shared else ""


def _options(methods: Sequence[Method]) -> list[dict[str, str]]:
    count = len(_shared(methods))
    return [
        {"method": m.name, "recipe": m.recipe, "its own options": _code(m.options[count:])}
        for m in methods
    ]


def _shared(methods: Sequence[Method]) -> list[str]:
    """Return the first options of all methods, as far as these are the same."""
    columns = zip(*(method.options for method in methods), strict=False)
    return [each[0] for each in takewhile(lambda each: len(set(each)) == 1, columns)]


def _code(options: Sequence[str]) -> str:
    return " ".join(f"`{option}`" for option in options)


def markdown(table: Table) -> str:
    """Return a table; columns of any row are those of all."""
    names = list(dict.fromkeys(name for row in table for name in row))
    lines = [names, ["---"] * len(names), *([row.get(n, "") for n in names] for row in table)]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _number(value: float, digits: int = 3) -> str:
    return "n/a" if not math.isfinite(value) else f"{value:.{digits}f}"


def _interval(found: Interval, *, sign: bool = True) -> str:
    plus = "+" if sign else ""
    if not math.isfinite(found.mean):
        return "n/a"
    ends = f" [{found.low:.3f}, {found.high:.3f}]" if math.isfinite(found.low) else " (one seed)"
    return f"{found.mean:{plus}.3f}{ends}"
