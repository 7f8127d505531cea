"""The arena's page: a table from which a user chooses a method, and what it is computed from.

Everything is read from the data beside the page. A gain is the gold score of an image after
training less the base's on the same prompt and noise. Intervals resample worlds, runs and requests
together (crossed); methods of one table share worlds, seeds and images, so that differences are
paired.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from flowrl.config.yaml12 import load_yaml
from flowrl.functional.contrasts import Interval, holm
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.plots import LINES, SOFT, new_figure, png_bytes, style_axes
from scripts.arena.methods import load_arms
from scripts.arena.runs import FROZEN, GOLD, PLACES, RUNS, WORLDS, chosen
from scripts.compare.data import read_rows
from scripts.compare.intervals import interquartile_mean

RELATIONS = Path(__file__).with_name("relations.yaml")
REMARKS = "remarks.md"
REFERENCES = ("flow_grpo_fast", "sft_on_the_best")
NEW_REQUESTS, NEW_FAMILIES = "new requests", "new families"
RESAMPLES = 4_000
# Columns of the second table, and those of `runs.csv`.
CHANGES = {
    "quality": "tiny_quality", "size": "size", "same place": "same_place",
    "place divergence": "place_divergence",
}  # fmt: skip
COSTS = {
    "iterations": "iterations", "scored images": "scored", "forwards": "forwards",
    "core seconds": "core_seconds", "peak MiB": "peak_mib",
}  # fmt: skip
Gains = dict[int, np.ndarray]  # by world: (runs, images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The gold scores of all runs, by world."""

    images: dict[int, list[dict[str, str]]]  # what is known of each image, by world
    base: dict[int, np.ndarray]  # (images,)
    runs: dict[str, dict[int, np.ndarray]]  # by arm and world: (runs, images), seeds ascending

    @staticmethod
    def read(data: Path) -> "Scores":
        images, base, runs = {}, {}, defaultdict(dict)
        for path in sorted(data.glob("world-*.csv")):
            world, rows = int(path.stem.removeprefix("world-")), read_rows(path)
            images[world] = [{name: row[name] for name in PLACES} for row in rows]
            base[world] = _column(rows, "base")
            names = [name for name in rows[0] if name not in (*PLACES, "base")]
            seeds = defaultdict(list)
            for arm, seed in (name.rsplit(" ", 1) for name in names):
                seeds[arm].append(int(seed))
            for arm, own in seeds.items():
                columns = [_column(rows, f"{arm} {seed}") for seed in sorted(own)]
                runs[arm][world] = np.stack(columns)
        return Scores(images=images, base=base, runs=dict(runs))

    def gains(self, arm: str, minus: str | None = None) -> Gains:
        """Return the gains over the base, or over another arm's runs of the same seeds."""
        found = {}
        for world, scores in self.runs[arm].items():
            other = self.base[world] if minus is None else self.runs[minus].get(world)
            if other is not None:
                count = len(scores) if minus is None else min(len(scores), len(other))
                found[world] = scores[:count] - other[..., :count, :] if minus else scores - other
        return found

    def where(self, key: str, value: str) -> dict[int, np.ndarray]:
        """Return which images of each world have this value of PLACES. (images,) bool"""
        return {
            world: np.array([row[key] == value for row in rows])
            for world, rows in self.images.items()
        }

    def interval(self, gains: Gains, chosen: Mapping[int, np.ndarray]) -> Interval:
        """Return the mean of gains over the chosen images, crossed over worlds, runs, requests."""
        return crossed(self.tables(gains, chosen))

    def tables(
        self, gains: Gains, chosen: Mapping[int, np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return what `crossed` takes: each world's gains over the chosen images, by request."""
        tables = []
        for world, values in gains.items():
            requests = [row["request"] for row in self.images[world]]
            names = [r for r, one in zip(requests, chosen[world], strict=True) if one]
            tables.append(by_request(values[:, chosen[world]], names))
        return tables


def _column(rows: Sequence[Mapping[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) if row[name] else np.nan for row in rows])


def by_request(values: np.ndarray, requests: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return sums and counts of the images of each request, (runs, requests) each."""
    names = {name: i for i, name in enumerate(dict.fromkeys(requests))}
    place = np.array([names[name] for name in requests], int)
    sums, counts = (np.zeros((len(values), len(names))) for _ in range(2))
    known = ~np.isnan(values)
    for run in range(len(values)):
        np.add.at(sums[run], place, np.where(known[run], values[run], 0.0))
        np.add.at(counts[run], place, known[run])
    return sums, counts


def crossed(tables: Sequence[tuple[np.ndarray, np.ndarray]], *, seed: int = 0) -> Interval:
    """Return the mean over worlds, and its bootstrap over worlds, their runs and their requests.

    tables: for each world the sums and counts of its images, (runs, requests) each. A world counts
    as one, however many images it has.
    """
    low, high = np.quantile(resampled(tables, seed=seed), [0.025, 0.975])
    mean = np.mean([sums.sum() / counts.sum() for sums, counts in tables])
    return Interval(mean=float(mean), low=float(low), high=float(high))


def resampled(
    tables: Sequence[tuple[np.ndarray, np.ndarray]], *, seed: int = 0
) -> np.ndarray:  # (RESAMPLES,)
    """Return means over as many worlds, drawn with their runs and their requests."""
    generator, worlds = np.random.default_rng(seed), len(tables)

    def weights(count: int) -> np.ndarray:  # how often each is drawn, (RESAMPLES, count)
        return generator.multinomial(count, np.full(count, 1 / count), RESAMPLES)

    # A world that is drawn twice gets other runs and requests each time.
    total = np.zeros(RESAMPLES)
    for _ in range(worlds):
        drawn = generator.integers(0, worlds, RESAMPLES)
        for world, (sums, counts) in enumerate(tables):
            runs, requests = map(weights, sums.shape)
            means = ((runs @ sums) * requests).sum(1) / ((runs @ counts) * requests).sum(1)
            total += np.where(drawn == world, means, 0.0)
    return total / worlds


def p_value(means: np.ndarray) -> float:
    """Return the two-sided p of no difference, by how many resampled means have the other sign."""
    beyond = min((means <= 0).sum(), (means >= 0).sum())
    return float(min(1.0, 2 * (1 + beyond) / (1 + len(means))))


def improvement(mine: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return how probable it is that a run beats one of another method on the same world.

    Mean over worlds of the share of pairs won, a tie half (2108.13264). mine, others: a score for
    each run, by world.
    """
    won = []
    for a, b in zip(mine, others, strict=True):
        won.append(np.mean([(x > y) + 0.5 * (x == y) for x, y in product(a, b)]))
    return float(np.mean(won))


def verdict(difference: Interval) -> str:
    """Return what an interval says of a relation that claims a positive difference."""
    if difference.low > 0:
        return "shown"
    if difference.high < 0:
        return "contradicted"
    return "weak" if difference.mean > 0 else "not shown"


# --- the page ------------------------------------------------------------------------------------


def render(data: Path) -> Path:
    """Write the page and its chart from the data; return the page."""
    scores, arms, rows = Scores.read(data), load_arms(), read_rows(data / RUNS)
    order = ranked(scores)
    notes = {name: arm.note for name, arm in arms.items()}
    different = _different(scores, order)
    lines = [
        "# The arena", "",
        f"{len(order)} methods on worlds {', '.join(map(str, sorted(scores.base)))}, none of which "
        "anybody tuned on. Made by `python -m scripts.arena` from the files beside it.", "",
        *_remarks(data),
        *_contradictions(scores), "![gains of each method](gains.png)", "",
        "| method | new requests | new families | at 28 steps | middle half of runs | "
        f"less {REFERENCES[0]} | beats {' | beats '.join(REFERENCES)} |",
        "|---|---|---|---|---|---|" + "---|" * len(REFERENCES),
        *[_method(scores, arm, rows, notes.get(arm, ""), different) for arm in order], "",
        "A gain is the gold score after training less before, with the interval crossed over "
        "worlds, runs and requests. *At 28 steps*: the mean over both test splits, of the first "
        "run on each world. *Middle half of runs*: the interquartile mean over runs, on new "
        f"requests. *Less {REFERENCES[0]}*: the paired difference on new requests, in bold where "
        "it differs from 0 after Holm's correction for all methods (p is the bootstrap's, which "
        "with few worlds says that these agree). *Beats*: how probable it is that a run of the "
        "method ends above one of the reference.", "",
        "![shares of runs above each gain](profiles.png)", "",
        "## What else changed, and what it cost", "",
        f"| method | {' | '.join([*CHANGES, *COSTS])} |",
        "|---|" + "---|" * (len(CHANGES) + len(COSTS)),
        *[_side_effects(arm, rows) for arm in order], "",
        "Means over runs, changes from the base to the end. *Quality*: 1 to 5, of edges, ghosts, "
        "tints. *Size*: the covered share of right images, by that of the drawing program. *Same "
        "place*: how often two right images of a request have the same layout, "
        "*Place divergence*: of layouts from that law, in nats. "
        "Prompts ask for none of these. *Forwards*: rows of all calls of the network, in rollouts "
        "and in learning. *Core seconds* are a run's, with start and evaluation"
        f"{_elsewhere(rows)}.", "",
        "## By tier and by kind", "",
        "The tier is how often pretraining drew the right image; with 0 there was none.", "",
        *_parts(scores, order, "tier"), "", *_parts(scores, order, "tag"), "",
        "## What the papers say", "", *_relations(scores), "",
        "## The worlds", "", *_table(read_rows(data / WORLDS)), "",
        "Base and the pipeline without defects on the same images, at 8 steps and at 28.", "",
        "## How it was made", "",
        "Values were tried on world 1's validation requests ([tuning.csv](tuning.csv)), and frozen "
        f"with the recipes ([{FROZEN}]({FROZEN})) before any other world was ranked:", "",
        *[f"- `{name}`: `{' '.join(v)}`" for name, v in chosen(arms, data).items() if v],
    ]  # fmt: skip
    write_bytes(data / "gains.png", _chart(scores, order))
    write_bytes(data / "profiles.png", _profiles(scores, order))
    path = data / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def ranked(scores: Scores) -> list[str]:
    """Return the arms by their gain on new requests, the largest first."""
    return sorted(scores.runs, key=lambda arm: -mean_gain(scores, arm, NEW_REQUESTS).mean)


def mean_gain(scores: Scores, arm: str, split: str) -> Interval:
    """Return an arm's gain on one of the test splits."""
    return scores.interval(scores.gains(arm), scores.where("split", split))


def _different(scores: Scores, arms: Sequence[str]) -> dict[str, bool]:
    """Return whether each arm differs from the first reference, with Holm's correction."""
    new, reference = scores.where("split", NEW_REQUESTS), REFERENCES[0]
    compared = [arm for arm in arms if arm != reference and reference in scores.runs]
    tables = [scores.tables(scores.gains(arm, reference), new) for arm in compared]
    corrected = holm([p_value(resampled(one)) for one in tables if one])
    compared = [arm for arm, one in zip(compared, tables, strict=True) if one]
    return {arm: p < 0.05 for arm, p in zip(compared, corrected, strict=True)}


def _run_gains(scores: Scores, arm: str) -> list[float]:
    """Return the gain of each run on new requests."""
    split = scores.where("split", NEW_REQUESTS)
    return [
        float(value)
        for world, gains in scores.gains(arm).items()
        for value in np.nanmean(gains[:, split[world]], 1)
    ]


def _method(
    scores: Scores, arm: str, rows: Sequence[Mapping[str, str]], note: str,
    different: Mapping[str, bool],
) -> str:  # fmt: skip
    split = scores.where("split", NEW_REQUESTS)

    def ends(name: str) -> list[np.ndarray]:
        return [np.nanmean(v[:, split[world]], 1) for world, v in scores.runs[name].items()]

    own = [row for row in rows if row["arm"] == arm]
    middle, less = interquartile_mean(_run_gains(scores, arm)), ""
    if arm in different:
        less = interval_text(scores.interval(scores.gains(arm, REFERENCES[0]), split))
        less = f"**{less}**" if different[arm] else less
    cells = [
        f"`{arm}`" + (f": {note}" if note else ""),
        interval_text(mean_gain(scores, arm, NEW_REQUESTS)),
        interval_text(mean_gain(scores, arm, NEW_FAMILIES)),
        f"{change(own, f'28_steps/{GOLD}'):+.3f}",
        interval_text(middle),
        less,
        *[
            "" if arm == other or other not in scores.runs
            else f"{improvement(ends(arm), ends(other)):.2f}"
            for other in REFERENCES
        ],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _side_effects(arm: str, rows: Sequence[Mapping[str, str]]) -> str:
    own = [row for row in rows if row["arm"] == arm]
    cells = [f"`{arm}`", *[f"{change(own, name):+.3f}" for name in CHANGES.values()]]
    cells += [f"{average(own, name):,.0f}" for name in COSTS.values()]
    return f"| {' | '.join(cells)} |"


def _remarks(data: Path) -> list[str]:
    """Return what somebody wrote of these data, if anything."""
    path = data / REMARKS
    return [path.read_text(encoding="utf-8").strip(), ""] if path.is_file() else []


def _elsewhere(rows: Sequence[Mapping[str, str]]) -> str:
    """Say how many runs were made on another machine."""
    count = sum(not row["core_seconds"] for row in rows)
    other = "of other cores and another torch, whose seconds and memory are in no mean"
    return f"; {count} of {len(rows)} runs were made on a machine {other}" if count else ""


def _parts(scores: Scores, order: Sequence[str], key: str) -> list[str]:
    """Return a table of gains on new requests by tier, or by kind of request."""
    values = sorted({row[key] for rows in scores.images.values() for row in rows})
    new = scores.where("split", NEW_REQUESTS)
    lines = [f"| method | {' | '.join(values)} |", "|---|" + "---|" * len(values)]
    for arm in order:
        cells = []
        for value in values:
            chosen = {w: part & new[w] for w, part in scores.where(key, value).items()}
            means = [
                np.nanmean(own[:, chosen[world]])
                for world, own in scores.gains(arm).items()
                if chosen[world].any()
            ]
            cells.append(f"{np.mean(means):+.3f}" if means else "")
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return lines


def judged(scores: Scores) -> list[tuple[dict[str, str], Interval | None, str]]:
    """Return each relation of the papers with its difference and what that says."""
    found = []
    for relation in load_yaml(RELATIONS.read_text(encoding="utf-8")):
        better, worse = relation.get("better"), relation.get("worse")
        if not better or any(a and a not in scores.runs for a in (better, worse)):
            found.append((relation, None, f"not testable here: {relation.get('why', 'not run')}"))
            continue
        gains = scores.gains(better, worse)
        difference = scores.interval(gains, scores.where("split", NEW_REQUESTS))
        found.append((relation, difference, verdict(difference)))
    return found


def _relations(scores: Scores) -> list[str]:
    lines = ["| relation | source | compared | difference | here |", "|---|---|---|---|---|"]
    for relation, difference, here in judged(scores):
        pair = ""
        if relation.get("better"):
            pair = f"`{relation['better']}` less {_other(relation)}"
        cells = [relation["claim"], relation["source"], pair]
        cells += [interval_text(difference) if difference else "", here]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _other(relation: Mapping[str, str]) -> str:
    return f"`{relation['worse']}`" if relation.get("worse") else "the base"


def _contradictions(scores: Scores) -> list[str]:
    """Return the first paragraph: what here contradicts a paper."""
    found = [
        f"{relation['source']} says: {relation['claim']}; here the difference is "
        f"{interval_text(difference)}."
        for relation, difference, here in judged(scores)
        if difference and here == "contradicted" and relation["source"] != "control"
    ]
    return [" ".join(["**Contradictions with papers.**", *found]), ""] if found else []


def _chart(scores: Scores, order: Sequence[str]) -> bytes:
    """Draw each method's gains on both test splits with their intervals."""
    figure = new_figure(8, 1 + 0.27 * len(order))
    axes = figure.subplots()
    label = "95 % interval over worlds, runs and requests"
    style_axes(axes, title="gain of the gold score", x_label=label, y_label="")
    for shift, split, color in zip(
        (-0.15, 0.15), (NEW_REQUESTS, NEW_FAMILIES), LINES, strict=False
    ):
        found = [mean_gain(scores, arm, split) for arm in order]
        middle = [one.mean for one in found]
        ends = [[m - one.low for m, one in zip(middle, found, strict=True)],
                [one.high - m for m, one in zip(middle, found, strict=True)]]  # fmt: skip
        rows = [i + shift for i in range(len(order))]
        axes.errorbar(middle, rows, xerr=ends, fmt="o", color=color, markersize=4, label=split)
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.legend(frameon=False)
    return png_bytes(figure)


def _profiles(scores: Scores, order: Sequence[str]) -> bytes:
    """Draw the share of runs whose gain is above each value (2108.13264)."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    title = "performance profiles, first ten methods"
    style_axes(axes, title=title, x_label="gain on new requests", y_label="share of runs")
    for arm, color in zip(order, LINES, strict=False):
        gains = sorted(_run_gains(scores, arm))
        shares = 1 - np.arange(len(gains) + 1) / len(gains)
        axes.step([min(0.0, gains[0]), *gains], shares, where="post", color=color, label=arm)
    axes.legend(frameon=False, fontsize=7)
    return png_bytes(figure)


def average(rows: Sequence[Mapping[str, str]], name: str) -> float:
    """Return the mean of a column of `runs.csv`; NaN where it has no values."""
    values = [float(row[name]) for row in rows if row.get(name)]
    return float(np.mean(values)) if values else float("nan")


def change(rows: Sequence[Mapping[str, str]], name: str) -> float:
    """Return the mean change of a measure from the base to the end."""
    return average(rows, name) - average(rows, f"base {name}")


def interval_text(found: Interval) -> str:
    """Return a mean and its interval as the pages print them."""
    return f"{found.mean:+.3f} [{found.low:.3f}, {found.high:.3f}]"


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    if not rows:
        return ["Not scored yet."]
    names = list(rows[0])
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"] + [
        f"| {' | '.join(row[name] for name in names)} |" for row in rows
    ]
