"""How well `flowrl vote` learns a taste: scripted voters with hidden rules, on the tiny SD3.

    python -m scripts.votes                 # makes what is missing in gallery/votes/votes.csv
    python -m scripts.votes --page          # writes the table of docs/vote.md from it

A voter sees pairs of base images of 60 prompts that name no colour, clicks by a hidden rule, and
`flowrl vote --train` learns from the clicks. Then base and LoRA draw 216 other prompts from the
same noises, and the rule says which image wins; a tie counts half. How many of them still show
their prompt, a detector says: GenEval's strict score.
"""

import argparse
import csv
import json
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowrl.assembly.backbone import call_settings
from flowrl.config import Config, load_config
from flowrl.evaluation.drawing import Drawing, DrawingOptions
from flowrl.prompts.records import PromptRecord, PromptSampler, load_prompts
from flowrl.scoring.spec import load_reward
from flowrl.utils.files import write_text
from flowrl.utils.images import to_tensor
from flowrl.voting.app import Questions
from flowrl.voting.ballot import Ballot, Choice
from flowrl.voting.candidates import Candidates, read_candidates
from flowrl.voting.learn import encoder_of, train_on_votes

KINDS = "single_object+two_object+position"  # that leave colours open
KEPT_BACK = 100  # prompts of the training list that no voter sees; 116 others are its test's
PROMPTS, PER_PROMPT = 60, 8  # as `flowrl vote` draws
BATCH = 54  # images that are drawn at a time
MARGIN = 1e-3  # of the rule, below which two images are a tie
ARMS = (("random", 50), ("informative", 37), ("random", 37))  # 37: 26 % fewer
PAGE = Path("docs/vote.md")
HEADER = "rule,seed,pairs,clicks,ties,win_rate,right_before,right_after"
Rule = Callable[[np.ndarray], float]  # (H, W, 3) in [0, 255] -> how much it is liked


def ink(x: np.ndarray) -> np.ndarray:
    return np.abs(x - x[0, 0]).max(-1) > 60


def blue(x: np.ndarray) -> float:
    """Share of the drawn pixels that are blue."""
    found = (x[..., 2] > 150) & (x[..., 0] < 110) & (x[..., 1] < 130)
    return float(found.sum() / max(1, ink(x).sum()))


def left(x: np.ndarray) -> float:
    """How far to the left what is drawn lies."""
    columns = np.nonzero(ink(x))[1]
    return 1 - float(columns.mean()) / x.shape[1] if columns.size else 0.5


def fewer(x: np.ndarray) -> float:
    """How little is drawn."""
    return 1 - float(ink(x).mean())


def blue_and_left(x: np.ndarray) -> float:
    """Both, in about equal shares of their usual spread."""
    return blue(x) + 2 * left(x)


RULES: dict[str, tuple[Rule, float]] = {  # and the share of clicks that are wrong
    "left": (left, 0.0),
    "fewer": (fewer, 0.0),
    "left, 10 % wrong": (left, 0.1),
    "blue": (blue, 0.0),
    "blue and left": (blue_and_left, 0.0),
}


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=float)


def click(candidates: Candidates, ballot: Ballot, rule: Rule, wrong: float, **asked) -> None:
    """Let a scripted voter answer until the goal is reached."""
    questions = Questions(candidates, ballot, **asked)
    rng = random.Random(f"voter {asked['seed']}")
    while len(ballot.votes) < asked["goal"] and (pair := questions.next()["pair"]):
        files = [candidates.folder / candidates.files[pair[k]] for k in ("first", "second")]
        a, b = (rule(pixels(file)) for file in files)
        sides: list[Choice] = ["first", "second"]
        better = 0 if a > b else 1
        better = 1 - better if rng.random() < wrong else better
        questions.cast(
            pair["first"], pair["second"], "tie" if abs(a - b) < MARGIN else sides[better]
        )


def prompts() -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Return the prompts that voters may see, and others for the test."""
    every = load_prompts(f"tiny:{KINDS}:train")
    back = PromptSampler(every, KEPT_BACK, seed=0).at(0)
    hidden = {record.text for record in back}
    seen = [record for record in every if record.text not in hidden]
    return seen, [*load_prompts(f"tiny:{KINDS}:test"), *back]


def recipe(seed: int, work: Path, changes: Sequence[str]) -> Config:
    """Return the recipe with a seed, and prompts that voters may see."""
    asked = work / "prompts.txt"
    write_text(asked, "".join(f"{record.text}\n" for record in prompts()[0]))
    fixed = [f"run.seed={seed}", f"prompts.train={asked}"]
    fixed += ["pipeline.device=cpu", "run.trackers=[]", "evaluation.prompts=null"]
    return load_config("quickstart-vote", [*fixed, "rewards=[{name: tiny_quality}]", *changes])


def drawing_of(config: Config, lora: str | None) -> Drawing:
    """Load the pipeline that draws as the recipe's evaluation does."""
    settings = call_settings(config)
    drawing = DrawingOptions(
        model=config.pipeline.path, lora=lora, guidance=float(settings["guidance_scale"]),
        steps=int(settings["num_inference_steps"]), device="cpu",
        max_sequence_length=int(settings["max_sequence_length"]),
    ).build()  # fmt: skip
    drawing.pipeline.set_progress_bar_config(disable=True)
    return drawing


@torch.no_grad()
def drawn(drawing: Drawing, texts: Sequence[str], seed: int) -> list[Image.Image]:
    """Draw an image of each text, the first from the noise of `seed`, the next from the next."""
    found: list[Image.Image] = []
    for start in range(0, len(texts), BATCH):
        part = list(texts[start:][:BATCH])
        noises = [torch.Generator().manual_seed(seed + start + k) for k in range(len(part))]
        found += drawing.pipeline(part, generator=noises, **drawing.call).images
    return [image.convert("RGB") for image in found]


def test_images(config: Config, lora: str | None) -> np.ndarray:
    """Draw the test prompts. (N, H, W, 3)"""
    texts = [record.text for record in prompts()[1]]
    return np.stack([np.asarray(x) for x in drawn(drawing_of(config, lora), texts, 10**6)])


def draw_candidates(config: Config, folder: Path, seed: int) -> None:
    """Draw what `flowrl vote` would, in batches: the same prompts, noises and files."""
    if (folder / "drawn").exists():
        return
    every = load_prompts(str(config.prompts.train))
    chosen = PromptSampler(every, PROMPTS, seed).at(0)
    texts = [record.text for record in chosen for _ in range(PER_PROMPT)]
    for k, image in enumerate(drawn(drawing_of(config, None), texts, seed)):
        place = folder / f"{k // PER_PROMPT:05d}"
        (place / "samples").mkdir(parents=True, exist_ok=True)
        write_text(place / "metadata.jsonl", json.dumps({"prompt": texts[k]}) + "\n")
        image.save(place / "samples" / f"{k % PER_PROMPT:04d}.png")
    (folder / "drawn").touch()


def base_images(work: Path) -> np.ndarray:
    """Return the base's test images, drawn once."""
    file = work / "base.npy"
    if not file.exists():
        np.save(file, test_images(recipe(0, work, ()), None))
    return np.load(file).astype(float)


def win_rate(rule: Rule, after: np.ndarray, before: np.ndarray) -> float:
    """Return the share of images that the rule likes more than the base's; a tie counts half."""
    gains = [rule(x) - rule(y) for x, y in zip(after, before, strict=True)]
    return statistics.mean(0.5 if abs(gain) < MARGIN else float(gain > 0) for gain in gains)


def right(images: np.ndarray) -> float:
    """Return the share of test images that show their prompt, and nothing else."""
    records = prompts()[1]
    scores: Any = load_reward("geneval", {"mode": "strict"})(
        to_tensor([Image.fromarray(x.astype(np.uint8)) for x in images]),
        [record.text for record in records], [record.metadata for record in records],
    )  # fmt: skip
    return float((scores[0] if isinstance(scores, tuple) else scores).mean())


def one(
    rule: str, seed: int, pairs: str, clicks: int, work: Path, changes: Sequence[str]
) -> tuple[int, float, float, float]:
    """Return the row of one voter: its ties, its win rate after training, and what `right` says."""
    config = recipe(seed, work, changes)
    liking, wrong = RULES[rule]
    shared = work / f"candidates-{seed}"
    draw_candidates(config, shared, 10**4 * seed)
    candidates = read_candidates(shared, encoder_of(config))
    name = re.sub(r"\W+", "_", f"{rule}-{seed}-{pairs}-{clicks}")
    folder = Path(tempfile.mkdtemp(prefix=name, dir=work))
    for place in shared.iterdir():
        if place.is_dir():
            (folder / place.name).symlink_to(place.resolve())
    ballot = Ballot(folder)
    click(candidates, ballot, liking, wrong, goal=clicks, informative=pairs == "informative",
          seed=seed)  # fmt: skip
    trained = train_on_votes(config, folder)
    ties = sum(vote.choice == "tie" for vote in ballot.votes)
    after, before = test_images(config, str(trained.folder)).astype(float), base_images(work)
    return ties, win_rate(liking, after, before), right(before), right(after)


# --- the page ------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return the page's table: means over voters, the least and the most, and how many."""
    found = ["| hidden rule | 50 random clicks | 37 informative | 37 random |",
             "|---|---|---|---|"]  # fmt: skip
    for rule in RULES:
        arms = [list(rates(rows, rule, *arm).values()) for arm in ARMS]
        if any(arms):
            found.append(f"| {rule} | " + " | ".join(map(cell, arms)) + " |")
    return "\n".join(found)


def cell(values: Sequence[float]) -> str:
    """Return a mean, with range and number."""
    if not values:
        return "not measured"
    mean = statistics.mean(values)
    return f"{mean:.2f} ({min(values):.2f} to {max(values):.2f}, n = {len(values)})"


def rates(rows: Sequence[dict[str, str]], rule: str, pairs: str, clicks: int) -> dict[int, float]:
    """Return the win rates of an arm by seed."""
    return {
        int(row["seed"]): float(row["win_rate"])
        for row in rows
        if (row["rule"], row["pairs"], row["clicks"]) == (rule, pairs, str(clicks))
    }


def saved_clicks(rows: Sequence[dict[str, str]]) -> str:
    """Say how fewer clicks, chosen or any, do beside 50 random ones, voter by voter."""
    many, chosen, few = (
        {(rule, seed): rate for rule in RULES for seed, rate in rates(rows, rule, *arm).items()}
        for arm in ARMS
    )
    told = [
        f"37 {name} clicks win {gap(some, many)}"
        for name, some in (("informative", chosen), ("random", few))
        if len(some.keys() & many.keys()) > 1
    ]
    if not told:
        return "How many clicks informative pairs save has not been measured yet."
    return (
        "Than 50 random clicks, " + "; ".join(told) + " (mean difference over the voters of both, "
        "and its standard error)."
    )


def gap(some: dict[tuple[str, int], float], others: dict[tuple[str, int], float]) -> str:
    """Return the mean difference over voters of both, with its standard error."""
    gaps = [some[voter] - others[voter] for voter in sorted(some.keys() & others.keys())]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    return f"{statistics.mean(gaps):+.3f} +- {error:.3f} (n = {len(gaps)})"


def kept_right(rows: Sequence[dict[str, str]]) -> str:
    """Say what became of the prompts."""
    before, after = (
        statistics.mean(float(row[name]) for row in rows)
        for name in ("right_before", "right_after")
    )
    worst = min(RULES, key=lambda rule: right_of(rows, rule))
    return (
        f"Of the base's images {before:.0%} show their prompt, of the LoRAs' {after:.0%} "
        f"(`{worst}`: {right_of(rows, worst):.0%}), by the detector's strict score."
    )


def right_of(rows: Sequence[dict[str, str]], rule: str) -> float:
    """Return the share of a rule's images that are right after training, 1 without any."""
    found = [float(row["right_after"]) for row in rows if row["rule"] == rule]
    return statistics.mean(found) if found else 1.0


def write_page(data: Path) -> None:
    """Write the table into docs/vote.md, between its markers."""
    rows = list(csv.DictReader(data.read_text().splitlines()))
    page = PAGE.read_text()
    start, end = "<!-- votes -->\n", "\n<!-- end of votes -->"
    head, _, rest = page.partition(start)
    text = f"{table(rows)}\n\n{kept_right(rows)}\n\n{saved_clicks(rows)}"
    write_text(PAGE, head + start + text + end + rest.partition(end)[2])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("gallery/votes/votes.csv"))
    parser.add_argument("--work", type=Path, default=Path("runs/votes"))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", type=int, nargs="+", default=[0, 1, 2], help="of ARMS")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="write the page, and train nothing")
    parser.add_argument("changes", nargs="*", help="options of the training, as KEY=VALUE")
    args = parser.parse_args()
    if args.page:
        write_page(args.data)
        return
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.data.parent.mkdir(parents=True, exist_ok=True)
    if not args.data.exists():
        args.data.write_text(HEADER + "\n")
    done = {tuple(row[:4]) for row in csv.reader(args.data.read_text().splitlines())}
    for seed in args.seeds:
        for rule in args.rules:
            for pairs, clicks in (ARMS[k] for k in args.arms):
                if (rule, str(seed), pairs, str(clicks)) in done:
                    continue
                ties, *shares = one(rule, seed, pairs, clicks, args.work, args.changes)
                with args.data.open("a", newline="") as file:
                    row = [rule, seed, pairs, clicks, ties, *(f"{share:.4f}" for share in shares)]
                    csv.writer(file, lineterminator="\n").writerow(row)
                print(f"{rule}, seed {seed}, {clicks} {pairs} clicks: {shares[0]:.3f}", flush=True)


if __name__ == "__main__":
    main()
