"""From a recipe to candidates, and from votes to a LoRA."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.api import align, collect_pairs
from flowrl.backbones.loading import load_pipeline
from flowrl.build.backbone import call_settings
from flowrl.build.learner import ProvidedObjects, build_backbone, training_prompts
from flowrl.config import Config, parse_config
from flowrl.evaluation.drawing import DrawingOptions, draw_prompts
from flowrl.export.summary import TrainedRun
from flowrl.prompts.records import PromptSampler
from flowrl.utils.distributed import Runtime
from flowrl.voting.ballot import Ballot, write_pairs

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
    chosen = PromptSampler(every, min(prompts, len(every)), seed, balance=config.prompts.balance)
    return draw_prompts(
        options.build(), chosen.at(0), folder, per_prompt=per_prompt, seed=seed, own_noise=True
    )  # otherwise votes would be about four noises


def train_on_votes(config: Config, folder: Path) -> TrainedRun:
    """Train a LoRA with DPO on the decided votes of a folder of candidates.

    Raises UserError when no vote decides anything.
    """
    write_pairs(Ballot(folder).votes, folder, folder / PAIRS, "flowrl")
    collect_pairs(config, folder / PAIRS, folder / STORE)
    return align(training_config(config, folder))


def training_config(config: Config, folder: Path) -> Config:
    """Return the recipe that learns from the votes of a folder.

    The recipe's own rewards become held-out ones, so that its card still shows what they say.
    """
    data = config.model_dump(mode="json")
    if config.objective.kind not in ("dpo", "kto"):
        data["objective"] = {"kind": "dpo"}
    others = {r["name"]: r | {"held_out": True} for r in data["rewards"]}  # one of each name
    data["rewards"] = [{"name": "preference"}, *others.values()]
    data["rollout"] |= {
        "store": {"path": str(folder / STORE)}, "group_size": 2, "tree": {"kind": "ode"},
        "explore": None,
    }  # fmt: skip
    data["prompts"] |= {"balance": None}
    data["run"] |= {"output_dir": str(folder / RUN)}
    return parse_config(data)
