"""How well `flowrl vote` learns a taste: scripted voters with hidden rules, on the tiny SANA.

    python -m scripts.votes --output gallery/votes

A voter sees pairs of base images of 60 training prompts that name no colour, clicks by a hidden
rule, and DPO trains on the clicks. Then base and LoRA draw 200 held-out prompts from the same
noises, and the rule says which image wins; a tie counts half. Rows of votes.csv that are there are
not made again.
"""

import argparse
import csv
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flowrl.build.backbone import call_settings
from flowrl.config import Config, load_config
from flowrl.evaluation.drawing import DrawingOptions, draw_prompts
from flowrl.prompts.records import load_prompts
from flowrl.voting.app import Questions
from flowrl.voting.ballot import Ballot, Choice
from flowrl.voting.candidates import Candidates, read_candidates
from flowrl.voting.learn import draw_candidates, encoder_of, train_on_votes

KINDS = "single_object+two_object+counting+position"  # that leave colours open
TESTS, MARGIN = 200, 1e-3
Rule = Callable[[np.ndarray], float]  # (H, W, 3) in [0, 255] -> how much it is liked


def ink(x: np.ndarray) -> np.ndarray:
    return np.abs(x - x[0, 0]).max(-1) > 60


def red(x: np.ndarray) -> float:
    """Share of the drawn pixels that are reddish."""
    reddish = (x[..., 0] > 150) & (x[..., 1] < 120) & (x[..., 2] < 120)
    return float(reddish.sum() / max(1, ink(x).sum()))


def left(x: np.ndarray) -> float:
    """How far to the left what is drawn lies."""
    columns = np.nonzero(ink(x))[1]
    return 1 - float(columns.mean()) / x.shape[1] if columns.size else 0.5


def fewer(x: np.ndarray) -> float:
    """How little is drawn."""
    return 1 - float(ink(x).mean())


def red_and_left(x: np.ndarray) -> float:
    """Both, in equal shares of their usual spread."""
    return red(x) + 3 * left(x)


RULES: dict[str, tuple[Rule, float]] = {  # and the share of clicks that are wrong
    "red": (red, 0.0),
    "left": (left, 0.0),
    "fewer": (fewer, 0.0),
    "red and left": (red_and_left, 0.0),
    "red, 10 % wrong": (red, 0.1),
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


def win_rate(config: Config, rule: Rule, lora: str, folder: Path, base: Path) -> float:
    """Draw the test prompts with a LoRA; return its share of wins against the base."""
    for place, its in ((base, None), (folder, lora)):
        settings = call_settings(config)
        options = DrawingOptions(
            model=config.pipeline.path, lora=its, guidance=float(settings["guidance_scale"]),
            steps=int(settings["num_inference_steps"]), device="cpu",
            max_sequence_length=int(settings["max_sequence_length"]),
        )  # fmt: skip
        prompts = load_prompts(f"tiny:{KINDS}:test", limit=TESTS)
        draw_prompts(options.build(), prompts, place, per_prompt=1, seed=1000)
    wins = []
    for image in sorted(folder.glob("*/samples/0000.png")):
        after, before = rule(pixels(image)), rule(pixels(base / image.relative_to(folder)))
        wins.append(0.5 if abs(after - before) < MARGIN else float(after > before))
    return float(np.mean(wins))


def one(rule: str, seed: int, pairs: str, clicks: int, work: Path, changes: list[str]) -> float:
    """Return the win rate of one voter."""
    changes = [*changes, "pipeline.device=cpu", f"run.seed={seed}", "run.trackers=[]"]
    changes += [f"prompts.train=tiny:{KINDS}:train", "evaluation.prompts=null"]
    config = load_config("quickstart-sana", changes)
    liking, wrong = RULES[rule]
    shared = work / f"candidates-{seed}"
    draw_candidates(config, shared, prompts=60, per_prompt=4, lora=None, seed=seed)
    candidates = read_candidates(shared, encoder_of(config))
    folder = work / f"{rule}-{seed}-{pairs}-{clicks}".replace(" ", "_").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    for name in candidates.folder.iterdir():
        if not (folder / name.name).exists() and name.is_dir():
            (folder / name.name).symlink_to(name.resolve())
    informative = pairs == "informative"
    click(candidates, Ballot(folder), liking, wrong, goal=clicks, informative=informative,
          seed=seed)  # fmt: skip
    trained = train_on_votes(config, folder)
    return win_rate(config, liking, str(trained.folder), folder / "test", work / "base")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gallery/votes"))
    parser.add_argument("--work", type=Path, default=Path("runs/votes"))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clicks", type=int, nargs="+", default=[25, 38, 50])
    parser.add_argument("--pairs", nargs="+", default=["informative", "random"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("changes", nargs="*", help="options of the training, as KEY=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    table = args.output / "votes.csv"
    if not table.exists():
        table.write_text("rule,seed,pairs,clicks,win_rate\n")
    done = {tuple(row[:4]) for row in csv.reader(table.read_text().splitlines())}
    for seed in range(args.seeds):
        for rule in args.rules:
            for pairs in args.pairs:
                for clicks in args.clicks:
                    if (rule, str(seed), pairs, str(clicks)) in done:
                        continue
                    rate = one(rule, seed, pairs, clicks, args.work, args.changes)
                    with table.open("a", newline="") as file:
                        csv.writer(file).writerow([rule, seed, pairs, clicks, f"{rate:.4f}"])
                    print(f"{rule}, seed {seed}, {clicks} {pairs} clicks: {rate:.3f}", flush=True)


if __name__ == "__main__":
    main()
