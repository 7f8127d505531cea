"""Render a page from its data: tables, charts with bands, and what is missing."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import correlation

from flowrl.functional.contrasts import Interval
from flowrl.tiny.world import planted
from flowrl.utils.files import write_bytes, write_text
from scripts.compare import intervals
from scripts.compare.break_even import DRAFTS, break_even, speed_range
from scripts.compare.charts import charts
from scripts.compare.data import GUIDED, TUNING, Image, chosen, read_rows
from scripts.compare.law import FREEDOM, LAYOUT, Variety, variety
from scripts.compare.page import Method, Page, at_steps
from scripts.compare.results import COSTS, Results, costs
from scripts.compare.turning import (
    PATIENCE,
    QUALITY_LOST,
    RULES,
    stopped,
    turn,
)

Table = Sequence[Mapping[str, str]]
UNRULED = "to the end"
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
        if method in results.rates:
            row["seconds"] = _number(results.seconds(last), 0)
        rows.append(row)
    return rows


def differences_table(results: Results, baseline: str) -> list[dict[str, str]]:
    """A row a method: how far it lies above the baseline at equal cost, and when it passes it.

    Methods that begin at another base, as on another pipeline, are not compared.
    """
    page, rows = results.page, []
    own = results.lines.get(baseline)
    if own is None:
        return []
    level = intervals.over_seeds(results.last(baseline, page.score)).mean
    wanted = {
        name: intervals.mean_curve(results.curves(baseline, page.score, cost))
        for name, cost in costs(results).items()
    }
    for method, runs in results.lines.items():
        if results.base(method, page.score) != results.base(baseline, page.score):
            continue
        if not (both := sorted(set(runs) & set(own))):
            continue
        row = {"method": method}
        for name, cost in costs(results).items():
            mine, theirs = (
                [results.curves(m, page.score, cost)[list(results.lines[m]).index(s)] for s in both]
                for m in (method, baseline)
            )
            spent, found = intervals.at_equal_cost(mine, theirs)
            whole = intervals.mean_curve(theirs)[-1][0]
            row[f"above at equal {COSTS[name]}"] = f"{_interval(found)} (at {spent:.3g})"
            curve = intervals.mean_curve(mine)
            for what, score in (("last", level), ("highest", max(s for _, s in wanted[name]))):
                heading = f"reaches the {what}, {score:.3f}, in {COSTS[name]}"
                row[heading] = _share(intervals.reaches(curve, score), whole)
            row[f"stays above, in {COSTS[name]}"] = _share(
                intervals.stays_above(curve, level), whole
            )
        for measure in dict.fromkeys((page.score, page.gold)):
            pairs = [(runs[s][-1].scores, own[s][-1].scores) for s in both]
            ends = intervals.over_seeds([a[measure] - b[measure] for a, b in pairs])
            row[f"{measure} above at the end"] = _interval(ends)
            images = results.difference_of_images(method, baseline, measure)
            row[f"{measure}, over images"] = _interval(images) if images else "n/a"
        rows.append(row)
    return rows


def break_even_table(results: Results) -> list[dict[str, str]]:
    """A row a method that drafts: how fast drafts must be for their choice to pay."""
    page, rows = results.page, []
    if not {page.longer, page.exact} <= set(results.stages) & set(results.lines):
        return []
    theirs = results.curves(page.longer, page.score, lambda line: line.iteration)
    exact = results.stages[page.exact][DRAFTS]
    for method in results.lines:
        stage = results.stages.get(method, {})
        if not stage.get(DRAFTS) or method in page.controls:
            continue
        runs = results.curves(method, page.score, lambda line: line.iteration)
        found = break_even(runs, theirs, stage, results.rates[page.longer], exact)
        known, pays = found.iterations is not None, found.affordable > 0
        reached = f"{found.iterations:.1f}" if known else f"more than {found.longest}"
        may_take = ("" if known else "at least ") + _number(found.affordable, 2)
        low, high = speed_range(runs, theirs, stage, results.rates[page.longer], exact)
        speed = ("" if known else "at most ") + _number(found.speed, 2)
        speed += f" [{_number(low, 2)}, {_number(high, 2)}]"
        never = (
            "not even free ones pay" if known else "not known, the baseline's runs are too short"
        )
        rows.append(
            {
                "method": method,
                "last score": _number(found.level),
                f"iterations of {page.longer} until there": reached,
                "seconds of its drafts": _number(stage[DRAFTS], 2),
                "of all else": _number(found.others, 2),
                "drafts may take": may_take if pays else "",
                "break-even speed": speed if pays else never,
                "measured speed": _number(exact / stage[DRAFTS], 2),
            }
        )
    return rows


def turns_table(results: Results) -> list[dict[str, str]]:
    """A row a method: where its gold score is highest, and what it lost from there."""
    rows = []
    for method, runs in results.lines.items():
        found = turn(list(runs.values()), results.page)
        rows.append(
            {
                "method": method,
                "gold at its highest": _interval(found.gold, sign=False),
                "iteration": str(found.iteration),
                "proxy there → at the end": f"{_number(found.proxy)} → {_number(found.proxy_last)}",
                "gold at the end": _interval(found.last, sign=False),
                "lost since": _interval(found.lost),
            }
        )
    return rows


def rules_table(results: Results) -> list[dict[str, str]]:
    """A row a method: its gold score where each rule would have stopped it."""
    return [
        {"method": method}
        | {
            name: _interval(
                intervals.over_seeds(stopped(list(runs.values()), results.page, rule)), sign=False
            )
            for name, rule in RULES.items()
        }
        for method, runs in results.lines.items()
    ]


def turns_say(results: Results) -> str:
    """Say of which settings a turn was seen: not of those that are highest at their end."""
    late, lost = [], []
    for method, runs in results.lines.items():
        found = turn(list(runs.values()), results.page)
        if found.iteration >= next(iter(runs.values()))[-2].iteration:
            late.append(method)
        if found.lost.high < 0:
            lost.append(method)
    return (
        f"The interval of the loss lies below 0 for: {'; '.join(lost) or 'none'}. Highest at one "
        f"of the last two evaluations, so that no turn was seen: {'; '.join(late) or 'none'}."
    )


def kept_most(results: Results) -> str:
    """Say which setting ends with most gold, and what the best rule adds."""
    page = results.page

    def gold(method: str, rule: str) -> dict[int, float]:
        runs = results.lines[method]
        return dict(zip(runs, stopped(list(runs.values()), page, RULES[rule]), strict=True))

    def above(first: tuple[str, str], second: tuple[str, str]) -> Interval:
        mine, theirs = gold(*first), gold(*second)
        return intervals.over_seeds([mine[s] - theirs[s] for s in mine if s in theirs])

    def mean_of(method: str, rule: str) -> Interval:
        return intervals.over_seeds(list(gold(method, rule).values()))

    base = page.baseline
    setting = max(results.lines, key=lambda m: mean_of(m, UNRULED).mean)
    rule = max((r for r in RULES if r != UNRULED), key=lambda r: mean_of(base, r).mean)
    return (
        f"**What keeps most.** {setting} ends highest, at "
        f"{_interval(mean_of(setting, UNRULED), sign=False)}: "
        f"{_interval(above((setting, UNRULED), (base, UNRULED)))} above {base}, paired by seed. Of "
        f"the rules, *{rule}* keeps most of {base}: {_interval(mean_of(base, rule), sign=False)}, "
        f"{_interval(above((base, rule), (base, UNRULED)))} above its end; to {setting} it adds "
        f"{_interval(above((setting, rule), (setting, UNRULED)))}. Settings and rules were chosen "
        "by these figures, which makes them a little too high."
    )


def judge_says(results: Results) -> str:
    """Say how alike the second judge and gold are, over all evaluations."""
    page = results.page
    lines = [line for runs in results.lines.values() for run in runs.values() for line in run]
    pairs = [(line.scores[page.judge], line.scores[page.gold]) for line in lines]
    alike = correlation(*zip(*pairs, strict=True))
    return (
        f"Over all evaluations the judge correlates {alike:.2f} with gold: with a weaker judge its "
        "rules will keep less."
    )


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
    """Write README.md and its charts beside the data; return its path."""
    results = Results.read(page, data)
    write_text(data / "README.md", text_of(results, data))
    for chart in charts(results):
        write_bytes(data / chart.file, chart.draw())
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
    told = {page.baseline: EQUAL if costs(results) else ENDS}  # once, where the first table is
    for name in dict.fromkeys((page.baseline, page.longer, *page.controls)):
        if len(table := differences_table(results, name)) > 1:
            parts += [f"## Against {name}", markdown(table), told.get(name, "")]
    if table := guided_table(results, data):
        parts += ["## The base with guidance", markdown(table), GUIDED_SAY]
    if table := break_even_table(results):
        parts += ["## What drafts may cost", markdown(table), BREAK_EVEN]
    if page.judge:
        parts += ["## Where gold turns", markdown(turns_table(results)), TURNS]
        parts += [turns_say(results), markdown(rules_table(results)), RULES_SAY]
        parts += [judge_says(results), kept_most(results)]
    if table := variety_table(results):
        parts += ["## Diversity", markdown(table), VARIETY]
    drawn = [f"![{chart.title}]({chart.file})" for chart in charts(results)]
    parts += ["## Curves", *drawn] if drawn else []
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
    "candidates, rollouts and training, in few bits or many. Seconds are iterations times the "
    "seconds of an iteration, measured in turns on an idle machine."
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
EQUAL = (
    "Differences are paired by seed, with a t-interval, at the largest cost that both have "
    "reached. *Reaches*: when the mean curve first equals the baseline's last, or highest, mean "
    "score. *Stays above*: from when on no evaluation is below the last. Both are shares of the "
    "baseline's whole cost. *Above at the end* compares last scores, whatever they cost, over "
    "seeds and over images. All runs are evaluated on the same prompts and noise."
)

TUNED = (
    "At the fewer steps, on validation prompts, one run of each unless its notes say otherwise: "
    "differences of a few hundredths may be chance. Runs of another length, or with options that a "
    "method had before, are named in its notes. What was chosen comes on top of a method's options."
)
BREAK_EVEN = (
    "Seconds of an iteration's stages, measured in turns on an idle machine. Exact drafts have "
    "speed 1. At the break-even speed a method costs as much as the longer baseline does until it "
    "stands at the method's last score; faster drafts pay. Its interval resamples runs, by seed, "
    "and leaves out that seconds vary; n/a is no end, as there not even free drafts pay. Where the "
    "longer baseline never gets there, its whole cost counts."
)
TURNS = (
    "The highest of noisy means is a little too high, and what was *lost since*, paired by seed, "
    "too; the rules below choose without gold. In the chart it is a star, and the end of a run a "
    "dot."
)
RULES_SAY = (
    "Gold where each rule would have ended a run: as `run.on_hacking` does by the second "
    f"judge; after {PATIENCE} evaluations without a rise of that judge (both keep its best); "
    f"before quality is {QUALITY_LOST} below the base's. No rule sees gold, but judge and gold see "
    "the same images."
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
    if not all(name in results.rates for name in results.lines):
        missing.append("Seconds of an iteration were not measured, so wall time is left out.")
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


def _share(cost: float | None, whole: float) -> str:
    return "never" if cost is None else f"{cost / whole:.0%}"
