"""What a LoRA of the tiny SD3 changes in the tiny FLUX by `flowrl sample --transfer`.

    flowrl train quickstart
    python -m scripts.arena.transfer --lora runs/quickstart

Draws one image of each of PROMPTS held-out requests with each arm and weight, all from the same
noise, and scores them. Data and page go to `gallery/transfer`.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.api import named_rewards
from flowrl.backbones.guidance import adapters
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import load_lora
from flowrl.backbones.lora_formats import open_lora
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import switched_off
from flowrl.backbones.transfer import Transfer
from flowrl.prompts.records import load_prompts
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import closing
from flowrl.utils.files import write_text
from scripts.arena.__main__ import GALLERY
from scripts.arena.report import crossed, interval_text
from scripts.arena.runs import RUNS
from scripts.compare.data import read_rows, write_rows

PROMPTS, STEPS, TOKENS, SEED = 120, 10, 12, 0
WEIGHTS = (0.5, 1.0, 1.5)
ARMS = {
    "lora": "the LoRA's change, v_L + w (v_lora - v_base)",
    "shuffled": "the same, of the LoRA with the numbers of each B shuffled and their signs random",
    "mixed": "no LoRA: mixing with the small base, v_L + w (v_base - v_L)",
}
REWARDS = ("tiny_judge", "tiny_quality")


def shuffle(layers: list) -> None:
    """Shuffle the numbers of each layer's B and draw their signs: its norm stays."""
    generator = torch.Generator().manual_seed(SEED)
    for layer in layers:
        for factor in layer.lora_B.values():
            flat = factor.weight.data.flatten()
            signs = torch.randint(0, 2, flat.shape, generator=generator) * 2 - 1
            order = torch.randperm(flat.numel(), generator=generator)
            factor.weight.data = (flat[order] * signs).view_as(factor.weight)


@torch.no_grad()
def draw(transfer: Transfer, texts: list[str], arm: str, weight: float) -> Tensor:
    """Return an image (N, 3, H, W) of each text, by Euler steps from noise of SEED."""
    large, small = transfer.large, transfer.small
    conds = [backbone.encode(texts, [""] * len(texts)) for backbone in (large, small)]
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(len(texts), *large.latent_shape(), generator=generator)
    sigmas = large.sigmas(STEPS)
    for sigma, dt in zip(sigmas, sigmas.diff(), strict=False):
        v = large.velocity(x, sigma, conds[0])
        if arm == "mixed":
            with switched_off(transfer.layers):
                base = small.velocity(transfer.to_small(x), sigma, conds[1])
            change = transfer.to_large(base) - v
        else:
            change = transfer.change(x, sigma, conds[1]) if weight else 0
        x = x + dt * (v + weight * change)
    return large.decode(x)


def score_arms(lora: str, path: Path) -> None:
    """Write a row for each arm, weight and prompt with its scores."""
    large, small = (load_pipeline(name, dtype="fp32", device="cpu") for name in
                    ("tiny-flux", "tiny-sd3"))  # fmt: skip
    load_lora(small, open_lora(lora))
    backbones = (PipelineBackbone(p, max_sequence_length=TOKENS) for p in (large, small))
    transfer, every = Transfer(*backbones), load_prompts("tiny:geneval:test")
    records = [every[i * len(every) // PROMPTS] for i in range(PROMPTS)]
    texts, metadata = [r.text for r in records], [r.metadata for r in records]
    rows, specs = [], named_rewards(REWARDS)
    with closing(specs):
        for arm in ARMS:
            if arm == "shuffled":
                shuffle(adapters(small.transformer))
            for weight in (0.0, *WEIGHTS) if arm == "lora" else WEIGHTS:
                images = draw(transfer, texts, arm, weight)
                scores = score(specs, images, texts, metadata).scores
                by_image = scores.tolist()
                rows += [
                    {"arm": arm, "weight": weight, "prompt": i}
                    | {n: f"{v:.4g}" for n, v in zip(REWARDS, by_image[i], strict=True)}
                    for i in range(PROMPTS)
                ]
    write_rows(path, rows)


def write_page(data: Path) -> Path:
    """Write the page from the data; return it."""
    rows = read_rows(data / RUNS)

    def values(arm: str, weight: float, reward: str) -> np.ndarray:
        return np.array([
            float(row[reward]) for row in rows
            if row["arm"] == arm and float(row["weight"]) == weight
        ])  # fmt: skip

    plain = [f"{values('lora', 0.0, reward).mean():.3f}" for reward in REWARDS]
    lines = [
        "# A small model's LoRA on its larger sibling", "",
        f"The tiny FLUX draws {PROMPTS} held-out requests in {STEPS} steps, with a velocity that "
        "the tiny SD3 of the same autoencoder changes. The LoRA is the quickstart's; FLUX is not "
        f"trained. FLUX alone scores {plain[0]} by `{REWARDS[0]}`, {plain[1]} by `{REWARDS[1]}`. "
        "The table has what is gained, image by image from the same noise, with intervals of 95 % "
        "over requests: of one LoRA, one order of the shuffled one and one noise a request. "
        "Made by `python -m scripts.arena.transfer`.", "",
        f"| arm | w | {' | '.join(f'`{name}`' for name in REWARDS)} |", "|---|---|---|---|",
    ]  # fmt: skip
    for arm, what in ARMS.items():
        for weight in WEIGHTS:
            cells = []
            for reward in REWARDS:
                gains = (values(arm, weight, reward) - values("lora", 0.0, reward))[None]
                cells.append(interval_text(crossed([(gains, np.ones_like(gains))])))
            lines.append(f"| {what} | {weight:g} | {' | '.join(cells)} |")
    write_text(data / "README.md", "\n".join([*lines, ""]))
    return data / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.arena.transfer", description=__doc__)
    parser.add_argument("--lora", help="run of the quickstart; without it only the page is written")
    parser.add_argument("--output", type=Path, default=GALLERY, help="folder of pages")
    options = parser.parse_args()
    if options.lora:
        score_arms(options.lora, options.output / "transfer" / RUNS)
    print(write_page(options.output / "transfer"))


if __name__ == "__main__":
    main()
