"""Write the head of docs/objectives.md: one table, and five situations."""

from collections.abc import Sequence
from pathlib import Path

from flowrl.utils.files import write_text
from scripts.arena.gamed import changes
from scripts.arena.report import (
    NEW_FAMILIES,
    NEW_REQUESTS,
    Scores,
    average,
    change,
    interval_text,
    mean_gain,
    ranked,
)
from scripts.arena.runs import RUNS
from scripts.compare.data import read_rows

START, END = "<!-- arena -->", "<!-- end of arena -->"


def write_chooser(data: Path, gamed: Path, page: Path) -> Path:
    """Replace what stands between two comments of the page; return the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    body = "\n".join(chooser(data, gamed))
    write_text(page, f"{before}{START}\n\n{body}\n\n{END}{after}")
    return page


def chooser(data: Path, gamed: Path) -> list[str]:
    """Return the lines: the table, and a sentence for each situation, from rows of the pages.

    data, gamed: the folders of the arena's page and of that of rewards with a loophole.
    """
    scores, rows = Scores.read(data), read_rows(data / RUNS)
    lines = [
        "| method | new requests | new families | quality | forwards | scored images |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ranked(scores):
        runs = [row for row in rows if row["arm"] == arm]
        cells = [
            f"`{arm}`",
            interval_text(mean_gain(scores, arm, NEW_REQUESTS)),
            interval_text(mean_gain(scores, arm, NEW_FAMILIES)),
            f"{change(runs, 'tiny_quality'):+.2f}",
            f"{average(runs, 'forwards'):,.0f}",
            f"{average(runs, 'scored'):,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_situations(scores, rows, gamed)]


def _situations(scores: Scores, rows: Sequence[dict[str, str]], gamed: Path) -> list[str]:
    def gain(arm: str) -> str:
        return f"`{arm}` {interval_text(mean_gain(scores, arm, NEW_REQUESTS))}"

    def yield_of(arm: str) -> float:
        """Return the gain for each 1,000 images that were scored."""
        scored = average([row for row in rows if row["arm"] == arm], "scored")
        return 1000 * mean_gain(scores, arm, NEW_REQUESTS).mean / scored if scored else 0.0

    frugal = max((arm for arm in scores.runs if "proxy" not in arm), key=yield_of)
    summed, gated = (
        changes(gamed, f"nft on vivid {how} geneval")[1] for how in ("plus", "gated by")
    )
    return [
        "- **The reward is sparse**, right or wrong without partial credit: "
        f"{gain('nft_on_a_sparse_reward')}, with partial credit {gain('nft')}.",
        "- **The reward can be gamed**: trained on the sum of a reward with a loophole and a "
        f"strict one the judge's score changes by {interval_text(summed)}, and by "
        f"{interval_text(gated)} where the first counts only for images that pass the second "
        "(`gate`, see [rewards](rewards.md)).",
        "- **The reward has a gradient**: a learned reward followed by its gradient, "
        f"{gain('draft')}; by its number alone, {gain('nft_on_the_proxy')}.",
        f"- **The reward is slow**: for each 1,000 scored images `{frugal}` gains the most, "
        f"{yield_of(frugal):+.3f}; `flow_grpo_fast` {yield_of('flow_grpo_fast'):+.3f}.",
        "- **There are pairs and no reward**: "
        f"{gain('dpo_on_pairs')} from right and wrong drawings; "
        f"{gain('sft_on_drawings')} from the right ones alone; {gain('nft')} with rewards.",
    ]  # fmt: skip
