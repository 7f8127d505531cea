"""From a recipe to candidates, and from votes to a LoRA."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.api import align, collect_pairs
from flowrl.assembly.backbone import call_settings
from flowrl.assembly.learner import ProvidedObjects, build_backbone, training_prompts
from flowrl.backbones.loading import load_pipeline
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.evaluation.drawing import SETTINGS, DrawingOptions, draw_prompts
from flowrl.export.summary import TrainedRun
from flowrl.prompts.records import PromptSampler
from flowrl.utils.distributed import Runtime
from flowrl.voting.ballot import ANSWERS, Ballot, Vote, write_pairs
from flowrl.voting.candidates import Candidates, read_candidates
from flowrl.voting.choose import taste_of

SURE = 0.7  # probability from which an expected vote is learned from
DPO = {  # held to the base: with few pairs DPO alone runs away from both images
    "kind": "dpo",
    "implicit_beta": 40.0,
    "kl_coef": 0.2,
    "noising": {"times": {"kind": "schedule", "fraction": 0.6}},
}
PAIRS, STORE, RUN = "pairs.jsonl", "store", "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentEncoder:
    """A backbone's autoencoder, as `read_candidates` wants it."""

    backbone: Any

    @property
    def size(self) -> tuple[int, int]:
        return self.backbone.image_size()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> latents (B, C, h, w)."""
        latents = self.backbone.encode_images(images)
        if latents.ndim == 4:
            return latents
        side = round(latents.shape[1] ** 0.5)  # packed: (B, h * w, C)
        return latents.transpose(1, 2).unflatten(2, (side, -1))


def encoder_of(config: Config) -> LatentEncoder:
    """Load a recipe's pipeline for its autoencoder."""
    p = config.pipeline
    where = Runtime(device=p.device).device
    pipeline = load_pipeline(p.path, dtype=p.dtype, device=where, revision=p.revision)
    return LatentEncoder(backbone=build_backbone(p, pipeline, guidance=1.0))


def draw_candidates(
    config: Config, folder: Path, *, prompts: int, per_prompt: int, lora: str | None, seed: int
) -> Path:
    """Draw images of some of a recipe's training prompts; go on where an earlier call ended.

    Args:
        prompts: how many.
        lora: draws in place of the base.
    """
    settings = call_settings(config)
    options = DrawingOptions(
        model=config.pipeline.path,
        lora=lora,
        guidance=float(settings["guidance_scale"]),
        steps=int(settings["num_inference_steps"]),
        max_sequence_length=int(settings["max_sequence_length"]),
        device=config.pipeline.device,
        revision=config.pipeline.revision,
    )
    every = training_prompts(config, ProvidedObjects())
    p = config.prompts
    chosen = PromptSampler(
        every, min(prompts, len(every)), seed, balance=p.balance, weights=p.weights
    )
    return draw_prompts(
        options.build(), chosen.at(0), folder, per_prompt=per_prompt, seed=seed, distinct_noise=True
    )  # otherwise votes would be about four noises


def train_on_votes(config: Config, folder: Path, *, lora: str | None = None) -> TrainedRun:
    """Train a LoRA with DPO or KTO on the votes of a folder of candidates.

    And on votes that are expected: few votes say little of single images, and much of the taste.
    After more votes the pairs are others, which get a store and a run of their own.

    Args:
        lora: that drew the candidates; training starts from it.

    Raises UserError when no vote decides anything, and for candidates of a LoRA that is not named.
    """
    drawn = folder / SETTINGS
    if lora is None and drawn.is_file() and json.loads(drawn.read_text("utf-8")).get("lora"):
        raise UserError(
            f"The images in {folder} were drawn with a LoRA: name it with --lora, as before, so "
            "that training starts from it."
        )
    votes = Ballot(folder).votes
    write_pairs(votes, folder, folder / PAIRS, "flowrl")  # refuses votes that decide nothing
    expected = expected_votes(read_candidates(folder, encoder_of(config)), votes)
    write_pairs([*votes, *expected], folder, folder / PAIRS, "flowrl")
    digest = blake2b((folder / PAIRS).read_bytes(), digest_size=4).hexdigest()
    store = folder / f"{STORE}-{digest}"
    collect_pairs(config, folder / PAIRS, store)
    return align(training_config(config, folder, store, lora))


def expected_votes(candidates: Candidates, votes: Sequence[Vote]) -> list[Vote]:
    """Return votes that nobody cast: for a prompt's best image against its worst, as expected.

    Only those that the votes make probable enough; none where no vote prefers an image.
    """
    rows = {name: row for row, name in enumerate(candidates.files)}
    known = [v for v in votes if v.first in rows and v.second in rows]
    if not any(vote.preferred for vote in known):
        return []
    pairs = [((rows[v.first], rows[v.second]), ANSWERS[v.choice]) for v in known]
    taste, features = taste_of(candidates.features, pairs), candidates.features
    liking = taste.scores(features).tolist()
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(candidates.numbers):
        members.setdefault(prompt, []).append(row)
    found = []
    for own in members.values():
        best, worst = (end(own, key=liking.__getitem__) for end in (max, min))
        if taste.probability(features[[best]] - features[[worst]]).item() >= SURE:
            first, second = candidates.files[best], candidates.files[worst]
            prompt = candidates.texts[best]
            found.append(Vote(prompt=prompt, first=first, second=second, choice="first"))
    return found


def training_config(config: Config, folder: Path, store: Path, lora: str | None) -> Config:
    """Return the recipe that learns from the votes of a folder.

    The recipe's own rewards become held-out ones, so that its card still shows what they say.

    Args:
        store: of the pairs.
        lora: that training starts from; None for the recipe's own start.
    """
    data = config.model_dump(mode="json")
    if config.objective.kind not in ("dpo", "kto"):
        data["objective"] = DPO
    others = {r["name"]: r | {"held_out": True} for r in data["rewards"]}  # one of each name
    data["rewards"] = [{"name": "preference"}, *others.values()]
    data["rollout"] |= {
        "store": {"path": str(store)}, "group_size": 2, "tree": {"kind": "ode"},
        "explore": None,
    }  # fmt: skip
    data["prompts"] |= {"balance": None, "weights": None}
    data["run"] |= {"output_dir": str(folder / RUN)}
    data["lora"] |= {} if lora is None else {"init_from": lora}
    return parse_config(data)
