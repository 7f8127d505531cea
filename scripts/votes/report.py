"""The page of votes, from `runs.csv` beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from flowrl.utils.files import write_text
from scripts.compare.data import read_rows
from scripts.compare.intervals import over_seeds

RUNS = "runs.csv"
# Rewards that need no download, which might predict votes as well.
BUILT_IN = ("geneval", "tiny_judge", "tiny_quality", "tiny_proxy", "brightness", "compressibility")


def render(data: Path) -> Path:
    """Write the page; return it."""
    rows = read_rows(data / RUNS)
    rules = dict.fromkeys(row["rule"] for row in rows)
    lines = [
        "# Votes", "",
        "Scripted voters each prefer images that have more of one thing that prompts do not name: "
        "large or small objects, objects to the left, to the right, or high up. Each casts 50 "
        "votes on the pairs that the page of `flowrl vote quickstart-vote` shows, `--train` makes "
        "a LoRA, and base and LoRA draw the same 120 held-out prompts from the same noise. Five "
        "voters of each rule, with images and training of a seed of their own; the recipe's rate "
        "and penalty were chosen with another seed, on two of the rules. Made by `python -m "
        "scripts.votes --seeds 5`.", "",
        "| rule | pairs won | shows its prompt: base | LoRA | LoRA / base |",
        "|---|---|---|---|---|",
        *[_rule(rule, [row for row in rows if row["rule"] == rule]) for rule in rules],
        _rule("all", rows), "",
        "*Pairs won*: of those that the voter decides, the share in which the LoRA's image is "
        "preferred to the base's. *Shows its prompt*: by `tiny_judge`, which is no reward here. "
        "Brackets are 95 % t-intervals over five seeds, in the last row of means over rules. The "
        "base's 120 images are the same for all: their error is in no interval.", "",
        "## What predicts a vote", "",
        "The share of the next 100 votes on other pairs that the taste predicts after 200 votes, "
        "and that rewards predict without any, where the voter decides; a tie of scores is half "
        "right.", "",
        f"| rule | taste | {' | '.join(BUILT_IN)} |", "|---|---|" + "---|" * len(BUILT_IN),
        *[_predicted(rule, [row for row in rows if row["rule"] == rule]) for rule in rules],
        _predicted("all", rows),
    ]  # fmt: skip
    path = data / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def prompt_share(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Return of each run the LoRA's share of images that show their prompt, by the base's."""
    return [float(row["lora"]) / float(row["base"]) for row in rows]


def _rule(name: str, rows: Sequence[Mapping[str, str]]) -> str:
    def interval(values: Sequence[float]) -> str:
        over = over_seeds(values)
        return f"{over.mean:.2f} [{over.low:.2f}, {over.high:.2f}]"

    base, lora = (mean(float(row[key]) for row in rows) for key in ("base", "lora"))
    seeds = dict.fromkeys(row["seed"] for row in rows)  # rules of one seed share their images
    groups = [[row for row in rows if row["seed"] == seed] for seed in seeds]
    won = interval([mean(float(row["wins"]) for row in group) for group in groups])
    faithful = interval([mean(prompt_share(group)) for group in groups])
    return f"| {name} | {won} | {base:.3f} | {lora:.3f} | {faithful} |"


def _predicted(rule: str, rows: Sequence[Mapping[str, str]]) -> str:
    shares = [mean(float(row[name]) for row in rows) for name in ("taste", *BUILT_IN)]
    return f"| {rule} | {' | '.join(f'{share:.2f}' for share in shares)} |"
