"""Draw candidates for a recipe, and train a LoRA on votes."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from flowrl.api import align, collect_pairs
from flowrl.assembly.learner import ProvidedObjects, build_backbone, training_prompts
from flowrl.backbones.loading import load_pipeline
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.evaluation.drawing import SETTINGS, Drawing, draw_prompts
from flowrl.export.summary import TrainedRun
from flowrl.prompts.records import PromptSampler
from flowrl.utils.distributed import Runtime
from flowrl.utils.untrusted import read_json
from flowrl.voting.ballot import ANSWERS, Ballot, Vote, write_pairs
from flowrl.voting.candidates import Candidates, read_candidates
from flowrl.voting.taste import image_features, learn_taste

SURE = 0.7  # least probability of a predicted vote that is trained on
DPO = {  # with a KL penalty: with few pairs DPO alone moves away from both images
    "kind": "dpo",
    "implicit_beta": 40.0,
    "kl_coef": 0.2,
    "noising": {"times": {"kind": "schedule", "fraction": 0.6}},
}
PAIRS, STORE, RUN = "pairs.jsonl", "store", "run"


def features_of(config: Config, candidates: Candidates) -> Tensor:
    """Return features (N, D) of candidates, by the autoencoder of a recipe's pipeline."""
    p = config.pipeline
    device = Runtime(device=p.device).device
    pipeline = load_pipeline(p.path, dtype=p.dtype, device=device, revision=p.revision)
    backbone = build_backbone(p, pipeline, guidance=1.0)

    @torch.no_grad()
    def encode(images: Tensor) -> Tensor:
        latents = backbone.encode_images(images)
        if latents.ndim == 4:
            return latents
        side = round(latents.shape[1] ** 0.5)  # packed: (B, h * w, C)
        return latents.transpose(1, 2).unflatten(2, (side, -1))

    paths = [candidates.folder / file for file in candidates.files]
    return image_features(paths, encode, backbone.image_size())


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


def train_on_votes(config: Config, folder: Path, *, lora: str | None = None) -> TrainedRun:
    """Train a LoRA with DPO or KTO on the votes of a folder of candidates, and on predicted votes.

    A call after further votes builds a new data set of pairs and starts a new run.

    Args:
        lora: with which the candidates were drawn; training starts from it.

    Raises:
        UserError: no vote prefers an image, or the LoRA of the candidates is not named.
    """
    drawn = folder / SETTINGS
    if lora is None and drawn.is_file() and read_json(drawn, inside=folder).get("lora"):
        raise UserError(
            f"The images in {folder} were drawn with a LoRA: name it with --lora, as before, so "
            "that training starts from it."
        )
    votes = Ballot(folder).votes
    write_pairs(votes, folder, folder / PAIRS)  # refuses votes that prefer no image
    candidates = read_candidates(folder)
    predicted = expected_votes(candidates, features_of(config, candidates), votes)
    write_pairs([*votes, *predicted], folder, folder / PAIRS)
    digest = blake2b((folder / PAIRS).read_bytes(), digest_size=4).hexdigest()
    store = folder / f"{STORE}-{digest}"
    collect_pairs(config, folder / PAIRS, store)
    return align(training_config(config, folder, store, lora))


def expected_votes(candidates: Candidates, features: Tensor, votes: Sequence[Vote]) -> list[Vote]:
    """Predict votes that nobody cast: each prompt's best image against its worst.

    Only those with a probability of at least SURE; none where all cast votes are ties.

    Args:
        features: (N, D) of the candidates.
    """
    rows = {name: row for row, name in enumerate(candidates.files)}
    votes = [v for v in votes if v.first in rows and v.second in rows and v.choice in ANSWERS]
    if not any(vote.preferred for vote in votes):
        return []
    first, second = ([rows[getattr(v, side)] for v in votes] for side in ("first", "second"))
    answers = torch.tensor([ANSWERS[vote.choice] for vote in votes])
    taste = learn_taste(features[first] - features[second], answers)
    liking = taste.scores(features).tolist()
    predicted = []
    for members in candidates.by_prompt().values():
        best, worst = (end(members, key=liking.__getitem__) for end in (max, min))
        if taste.probability(features[best] - features[worst]) >= SURE:
            names, prompt = candidates.files, candidates.texts[best]
            predicted.append(
                Vote(prompt=prompt, first=names[best], second=names[worst], choice="first")
            )
    return predicted


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
