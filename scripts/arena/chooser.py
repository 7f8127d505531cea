"""Write the head of docs/objectives.md: one table, and five situations."""

from collections.abc import Sequence
from pathlib import Path

from flowrl.utils.files import write_text
from scripts.arena.gamed import changes
from scripts.arena.methods import load_arms
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
    """Replace what stands between two comments of the page; return the page.

    Raises ValueError where the page lacks one of them.
    """
    text = page.read_text(encoding="utf-8")
    if START not in text or END not in text:
        raise ValueError(f"{page} needs the lines {START} and {END}")
    before, _, rest = text.partition(START)
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
        f"What {len(scores.runs)} methods gain on the tiny SANA, by a judge that is never trained "
        "on, with 95 % intervals: share of right images after training less before, on new "
        "requests and on families of requests that training never saw. Settings, costs and what "
        "these runs cannot say: [the arena](../gallery/arena/README.md).",
        "",
        "| method | new requests | new families | quality | forwards | scored images |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ranked(scores):
        runs = [row for row in rows if row["arm"] == arm]
        cells = [
            f"`{arm}`",
            interval_text(mean_gain(scores, arm, NEW_REQUESTS)),
            interval_text(mean_gain(scores, arm, NEW_FAMILIES)),
            f"{change(runs, 'tiny_quality'):+z.2f}",
            f"{average(runs, 'forwards'):,.0f}",
            f"{average(runs, 'scored'):,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_situations(scores, rows, gamed)]


def _situations(scores: Scores, rows: Sequence[dict[str, str]], gamed: Path) -> list[str]:
    """Return a sentence for each situation whose methods were all ranked."""

    def gain(arm: str) -> str:
        return f"`{arm}` {interval_text(mean_gain(scores, arm, NEW_REQUESTS))}"

    def frugality(arm: str) -> float:
        """Return the gain for each 1,000 images that were scored."""
        scored = average([row for row in rows if row["arm"] == arm], "scored")
        return 1000 * mean_gain(scores, arm, NEW_REQUESTS).mean / scored if scored else 0.0

    def ranked_all(*arms: str) -> bool:
        return all(arm in scores.runs for arm in arms)

    sentences = []
    if ranked_all("nft_on_a_sparse_reward", "nft"):
        sentences.append(
            "- **The reward is sparse**, right or wrong without partial credit: "
            f"{gain('nft_on_a_sparse_reward')}, with partial credit {gain('nft')}."
        )
    summed, gated = (
        changes(gamed, f"nft on vivid {how} geneval")[1] for how in ("plus", "gated by")
    )
    sentences.append(
        "- **The reward can be gamed**: trained on the sum of a reward with a loophole and a "
        f"strict one, the judge's score changes by {interval_text(summed)}; where the first counts "
        f"only for images that pass the second, by {interval_text(gated)} (`gate`, see "
        "[rewards](rewards.md))."
    )
    if ranked_all("draft", "nft_on_the_proxy"):
        sentences.append(
            "- **The reward has a gradient**: a learned reward followed by its gradient, "
            f"{gain('draft')}; by its number alone, {gain('nft_on_the_proxy')}."
        )
    # Methods that train on the default rewards, so that a scored image is the same for all.
    alike = [
        name for name, arm in load_arms().items()
        if name in scores.runs and not any(o.startswith("rewards=") for o in arm.options)
    ]  # fmt: skip
    if alike:
        best = max(alike, key=frugality)
        others = ", ".join(f"`{a}` {frugality(a):+.3f}" for a in alike if a == "flow_grpo_fast")
        sentences.append(
            f"- **The reward is slow**: for each 1,000 scored images `{best}` gains the most, "
            f"{frugality(best):+.3f}" + (f"; {others}." if others else ".")
        )
    if ranked_all("dpo_on_pairs", "sft_on_drawings", "nft"):
        sentences.append(
            "- **There are pairs and no reward**: "
            f"{gain('dpo_on_pairs')} from right and wrong drawings; {gain('sft_on_drawings')} from "
            f"the right ones alone; {gain('nft')} with rewards."
        )
    return sentences
