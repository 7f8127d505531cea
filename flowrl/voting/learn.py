"""Draw candidates for a recipe, and train a LoRA on votes."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from flowrl.api import align, collect_pairs
from flowrl.assembly.learner import ProvidedObjects, training_prompts
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.evaluation.drawing import SETTINGS, Drawing, draw_prompts
from flowrl.export.summary import TrainedRun
from flowrl.prompts.records import PromptSampler
from flowrl.scoring.files import prompted_images, score_files
from flowrl.scoring.spec import closing
from flowrl.utils.untrusted import read_json
from flowrl.voting.ballot import ANSWERS, Ballot, Vote, write_pairs
from flowrl.voting.candidates import Candidates, read_candidates
from flowrl.voting.taste import (
    TastePosterior,
    describe_files,
    feature_space,
    held_out_accuracy,
    learn_taste,
    save_taste,
)

log = logging.getLogger(__name__)
LEVELS = 20  # at most, of scores that are compared exactly
SURE = 0.7  # least probability of a predicted vote that is trained on
DPO = {  # with a KL penalty: with few pairs DPO alone moves away from both images
    "kind": "dpo",
    "implicit_beta": 40.0,
    "kl_coef": 1.0,
    "noising": {"times": {"kind": "schedule", "fraction": 0.6}},
}
PAIRS, STORE, RUN = "pairs.jsonl", "store", "run"


def draw_candidates(
    config: Config, folder: Path, *, prompts: int, per_prompt: int, lora: str | None, seed: int
) -> Path:
    """Draw images of some of a recipe's training prompts; continue where an earlier call stopped.

    Args:
        prompts: number of prompts.
        lora: to draw with, None for the base model.
    """
    records = training_prompts(config, ProvidedObjects())
    p = config.prompts
    sampler = PromptSampler(
        records, min(prompts, len(records)), seed, balance=p.balance, weights=p.weights
    )
    drawing = Drawing(
        config.pipeline.path,
        lora=lora,
        guidance=config.evaluation.guidance_scale,
        steps=config.evaluation.step_counts[0],
        max_sequence_length=config.pipeline.max_sequence_length,
        device=config.pipeline.device,
        revision=config.pipeline.revision,
    )
    return draw_prompts(
        drawing, sampler.at(0), folder, per_prompt=per_prompt, seed=seed,
        distinct_noise=True,  # otherwise votes would be about the same few noises
    )  # fmt: skip


def train_on_votes(
    config: Config, folder: Path, *, lora: str | None = None, learned: "LearnedTaste | None" = None
) -> TrainedRun:
    """Train a LoRA with DPO or KTO on the votes of a folder of candidates, and on predicted votes.

    No image is preferred to one that shows its prompt better, by the recipe's rewards: taste alone
    teaches to leave the prompt. A call after further votes builds a new data set of pairs and
    starts a new run.

    Args:
        lora: with which the candidates were drawn; training starts from it.
        learned: of `learn_from_votes`, where it was called already.

    Raises:
        UserError: no vote prefers an image, or the LoRA of the candidates is not named.
    """
    drawn = folder / SETTINGS
    if lora is None and drawn.is_file() and read_json(drawn, inside=folder).get("lora"):
        raise UserError(
            f"The images in {folder} were drawn with a LoRA: name it with --lora, as before, so "
            "that training starts from it."
        )
    learned = learned or learn_from_votes(folder)
    candidates = learned.candidates
    scores = prompt_scores(config, candidates)
    predicted = expected_votes(candidates, learned.features, learned.taste, scores)
    shown = dict(zip(candidates.files, scores.tolist(), strict=True))
    margin = score_margin(candidates, scores)
    faithful = [vote for vote in learned.votes if keeps_prompt(vote, shown, margin)]
    if left_out := len(learned.votes) - len(faithful):
        log.warning(
            "%s of %s votes prefer the image that shows its prompt worse: they are left out",
            left_out, len(learned.votes),
        )  # fmt: skip
    if not predicted and not any(vote.preferred for vote in faithful):
        raise UserError(
            f"every vote in {folder} prefers the image that shows its prompt worse, by the "
            "recipe's rewards: vote on more pairs"
        )
    write_pairs([*faithful, *predicted], folder, folder / PAIRS)
    digest = blake2b((folder / PAIRS).read_bytes(), digest_size=4).hexdigest()
    store = folder / f"{STORE}-{digest}"
    collect_pairs(config, folder / PAIRS, store)
    return align(training_config(config, folder, store, lora))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTaste:
    """What the votes of a folder say."""

    candidates: Candidates
    votes: Sequence[Vote]
    features: Tensor  # (N, D) of the candidates
    taste: TastePosterior
    file: Path  # that the reward `taste` reads
    accuracy: float  # on held-out votes without ties, see `held_out_accuracy`


def learn_from_votes(folder: Path) -> LearnedTaste:
    """Learn the taste of a folder's votes, and write it for the reward `taste`.

    Raises UserError when no vote prefers an image.
    """
    candidates, votes = read_candidates(folder), Ballot(folder).votes
    rows = {name: row for row, name in enumerate(candidates.files)}
    cast = [v for v in votes if v.first in rows and v.second in rows and v.choice in ANSWERS]
    if not any(vote.preferred for vote in cast):
        raise UserError(f"no vote in {folder} prefers an image: there is nothing to train on")
    described = describe_files([folder / file for file in candidates.files])
    space = feature_space(described)
    features = space(described)
    first, second = ([rows[getattr(v, side)] for v in cast] for side in ("first", "second"))
    differences = features[first] - features[second]
    answers = torch.tensor([ANSWERS[vote.choice] for vote in cast])
    taste = learn_taste(differences, answers)
    return LearnedTaste(
        candidates=candidates, votes=votes, features=features, taste=taste,
        file=save_taste(folder, space.centre, space.basis @ taste.mean),
        accuracy=held_out_accuracy(differences, answers),
    )  # fmt: skip


def prompt_scores(config: Config, candidates: Candidates) -> Tensor:
    """Return (N,) how well candidates show their prompts by a recipe's rewards; NaN if unknown."""
    specs = [reward.build() for reward in config.rewards if not reward.held_out]
    with closing(specs):
        scored = score_files(specs, prompted_images(candidates.folder))
    for reason in scored.missing:
        log.warning("images without a score are not compared by how they show it: %s", reason)
    rows = scored.rows
    return torch.tensor([sum(spec.weight * row[spec.name] for spec in specs) for row in rows])


def score_margin(candidates: Candidates, scores: Tensor) -> float:
    """Return the difference of two images' scores above which one shows its prompt worse.

    0 for scores of few levels, such as shares of demands; else their standard deviation within
    prompts, or only the image that a learned reward scores highest would count.
    """
    present = scores[~scores.isnan()]
    if len(present.unique()) <= LEVELS:
        return 0.0
    groups = [scores[rows] for rows in candidates.by_prompt().values()]
    variances = [g[~g.isnan()].var() for g in groups if (~g.isnan()).sum() > 1]
    return torch.stack(variances).mean().sqrt().item()


def keeps_prompt(vote: Vote, scores: Mapping[str, float], margin: float = 0.0) -> bool:
    """Return whether the preferred image shows its prompt as well as the other, or none does."""
    if vote.preferred is None:
        return True
    better, worse = (scores.get(name, math.nan) for name in vote.preferred)
    return not better < worse - margin


def expected_votes(
    candidates: Candidates, features: Tensor, taste: TastePosterior, scores: Tensor
) -> list[Vote]:
    """Predict votes that nobody cast: of each prompt, the best image that shows it and the worst.

    Only those with a probability of at least SURE. Beside them the best image that shows the prompt
    is preferred to one that does not.

    Args:
        features: (N, D) of the candidates.
        scores: (N,) of `prompt_scores`. Images show their prompt whose scores are not noticeably
            below its highest; all do where none has a score.
    """
    liking, margin = taste.scores(features).tolist(), score_margin(candidates, scores)
    pairs = []
    for members in candidates.by_prompt().values():
        scored = [row for row in members if not scores[row].isnan()]
        least = max((scores[row].item() for row in scored), default=math.nan) - margin
        faithful = [row for row in scored if scores[row].item() >= least] or members
        best = max(faithful, key=liking.__getitem__)
        worst = min(members, key=liking.__getitem__)
        if taste.probability(features[best] - features[worst]) >= SURE:
            pairs.append((best, worst))
        # The prompt comes before the taste: the most liked of those that do not show it.
        if unfaithful := [row for row in scored if row not in faithful and row != worst]:
            pairs.append((best, max(unfaithful, key=liking.__getitem__)))
    names, texts = candidates.files, candidates.texts
    return [
        Vote(prompt=texts[first], first=names[first], second=names[second], choice="first")
        for first, second in pairs
    ]


def training_config(config: Config, folder: Path, store: Path, lora: str | None) -> Config:
    """Return the recipe that trains on the votes of a folder.

    The recipe's rewards become held-out ones: the card still shows their scores.

    Args:
        store: offline data set of the pairs.
        lora: from which training starts; None for the recipe's `lora.init_from`.
    """
    data = config.model_dump(mode="json")
    if config.objective.kind not in ("dpo", "kto"):
        data["objective"] = DPO
    held_out = {r["name"]: r | {"held_out": True} for r in data["rewards"]}  # one of each name
    data["rewards"] = [{"name": "preference"}, *held_out.values()]
    data["rollout"] |= {
        "store": str(store), "group_size": 2, "tree": {"kind": "ode"},
        "explore": None,
    }  # fmt: skip
    data["prompts"] |= {"balance": None, "weights": None}
    data["run"] |= {"output_dir": str(folder / RUN)}
    data["lora"] |= {} if lora is None else {"init_from": lora}
    return parse_config(data)
