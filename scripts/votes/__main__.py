"""Train on the votes of scripted voters, and measure what they wanted and what it cost.

    python -m scripts.votes --seeds 5               every rule, what is finished is skipped
    python -m scripts.votes --rule warm --seeds 1
    python -m scripts.votes                         render the page from its data

A voter prefers the image that has more of a rule (`rules.py`) that no prompt names. The held-out
prompts are those of the preset `quickstart-vote`, base and LoRA from the same noise.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.api import named_rewards
from flowrl.config import Config, load_config
from flowrl.scoring.files import prompted_images, score_files
from flowrl.scoring.spec import closing
from flowrl.training.evaluate import Evaluation, evaluation_file
from flowrl.utils.images import read_image, to_tensor
from flowrl.voting.app import CastOrder, Questions
from flowrl.voting.ballot import ANSWERS, Ballot, Choice
from flowrl.voting.candidates import Candidates, read_candidates
from flowrl.voting.learn import draw_candidates, train_on_votes
from flowrl.voting.taste import describe_files, feature_space, learn_taste
from scripts.compare.data import read_rows, write_rows
from scripts.votes.report import BUILT_IN, RUNS, render
from scripts.votes.rules import RULES, answers

JUDGE = "tiny_judge"
CAST, PREDICTED = 200, 100  # votes that the taste learns from, and those it predicts
TRAINED = 50  # votes that a LoRA learns from


def main() -> None:
    options = _parser().parse_args()
    rules = options.rule or list(RULES)
    data = options.output / "votes"
    rows = read_rows(data / RUNS)
    done = {(row["rule"], row["seed"]) for row in rows}
    for seed in range(1, options.seeds + 1):  # with 0 the recipe's values were chosen
        for rule in rules:
            if (rule, str(seed)) not in done:
                rows.append(measure(rule, seed, options.runs / f"{rule}-{seed}", options.changes))
                write_rows(data / RUNS, rows)
                print(rows[-1], flush=True)
    print(render(data))


def measure(rule: str, seed: int, folder: Path, changes: Sequence[str]) -> dict[str, str]:
    """Vote by a rule, train, and return what the held-out images show."""
    config = load_config(
        "quickstart-vote",
        ["run.threads=1", f"run.seed={seed}", "evaluation.num_inference_steps=8",
         "evaluation.num_images=120", "run.trackers=[]", "run.sample_every=0", *changes],
    )  # fmt: skip
    rewards = [
        {"name": "scripts.votes.rules:Rule", "args": {"rule": rule}, "held_out": True},
        *(r.model_dump(mode="json") for r in config.rewards),
    ]
    config = Config.model_validate(config.model_dump(mode="json") | {"rewards": rewards})
    torch.set_num_threads(1)
    drawn = folder.with_name(f"candidates-{seed}")
    draw_candidates(config, drawn, prompts=60, per_prompt=8, lora=None, seed=seed)
    if not folder.is_dir():
        shutil.copytree(drawn, folder)
    candidates = read_candidates(folder)
    likes = RULES[rule](to_tensor([read_image(folder / file) for file in candidates.files]))
    vote(candidates, rule, likes, TRAINED, seed)
    trained = train_on_votes(config, folder)
    base, end = (
        Evaluation.load(evaluation_file(trained.folder, i)).measures()
        for i in (0, config.run.iterations)
    )
    measured = (scores[f"rule_{rule}"] for scores in (end, base))
    won = answers(rule, *measured)
    won = won[won != 0.5]
    return {
        "rule": rule, "seed": str(seed), "wins": f"{won.mean():.4f}", "decided": str(len(won)),
        "base": f"{base[JUDGE].nanmean():.4f}", "lora": f"{end[JUDGE].nanmean():.4f}",
        **predictions(candidates, rule, likes, seed),
    }  # fmt: skip


def vote(candidates: Candidates, rule: str, likes: Tensor, count: int, seed: int) -> None:
    """Cast votes on the pairs that the page shows."""
    choices: dict[float, Choice] = {answer: choice for choice, answer in ANSWERS.items()}
    questions = Questions(candidates, Ballot(candidates.folder), goal=count, seed=seed)
    while (shown := questions.next())["votes"] < count:
        first, second = shown["pair"]["first"], shown["pair"]["second"]
        answer = answers(rule, likes[first], likes[second]).item()
        questions.cast(CastOrder(first=first, second=second, choice=choices[answer]))


def predictions(candidates: Candidates, rule: str, likes: Tensor, seed: int) -> Mapping[str, str]:
    """Return the share of PREDICTED votes that the taste predicts after CAST, and each reward."""
    paths = [candidates.folder / file for file in candidates.files]
    generator = torch.Generator().manual_seed(seed)
    pairs = candidates.pairs()
    drawn = torch.randperm(len(pairs), generator=generator)[: CAST + PREDICTED].tolist()
    first, second = torch.tensor([pairs[i] for i in drawn]).T
    wanted = answers(rule, likes[first], likes[second])
    features = feature_space(described := describe_files(paths))(described)
    taste = learn_taste((features[first] - features[second])[:CAST], wanted[:CAST])
    scores = {"taste": taste.scores(features)}
    with closing(specs := named_rewards(BUILT_IN)):
        rows = score_files(specs, prompted_images(candidates.folder)).rows
    scores |= {name: torch.tensor([row[name] for row in rows]) for name in BUILT_IN}
    decided = wanted[CAST:] != 0.5
    shares = {}
    for name, score in scores.items():
        said = ((score[first] - score[second])[CAST:].sign() + 1) / 2  # a tie is half right
        shares[name] = 1 - (said - wanted[CAST:]).abs()[decided].mean().item()
    return {name: f"{share:.4f}" for name, share in shares.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.votes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rule", action="append", default=[], help="may be repeated")
    parser.add_argument("--seeds", type=int, default=0, help="voters of each rule")
    parser.add_argument("--runs", type=Path, default=Path("runs/votes"), help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("gallery"), help="folder of pages")
    parser.add_argument("changes", nargs="*", help="KEY=VALUE changes of the recipe")
    return parser


if __name__ == "__main__":
    main()
