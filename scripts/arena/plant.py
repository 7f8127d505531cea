"""Make a world's pipeline and prompt files.

    python -m scripts.arena.plant 17 --folder build/arena

The tiny SANA without defects, which all worlds share (`clean.safetensors`), learns from images
with the world's defects. `world-17` in the folder receives the pipeline, a prompt file for each
split, a store of right and wrong drawings, and `world.json`, which says what was planted. It can be
stopped at any time; the same command resumes it. Worlds 1 to 4 were planted once; the weights of
their transformers come with the clone (`world-1.safetensors` and so on).
"""

import argparse
import copy
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from flowrl.api import collect_pairs
from flowrl.backbones.loading import load_pipeline
from flowrl.config import load_config
from flowrl.tiny.world import TAGS, Prompt
from flowrl.utils.files import write_text
from scripts.arena.methods import BASE, PAIRS
from scripts.arena.world import SPLITS, World, world
from scripts.pretrain_tiny.ceiling import with_weights_of
from scripts.pretrain_tiny.families import save_half, track
from scripts.pretrain_tiny.flow import Stage, Texts, fit_flow
from scripts.pretrain_tiny.images import images
from scripts.pretrain_tiny.latents import encode_all

CLEAN = Path(__file__).with_name("clean.safetensors")  # the transformer's weights, fp16
IMAGES, STEPS, BATCH = 40_000, 5_000, 64
DRAWN_PAIRS = 1_024
SCORED = 150  # prompts of validation, and of each split of the test
# Alone: Muon's bf16 products take a CPU three quarters of a step, and from a trained start its loss
# is no lower (0.44 after 255 steps, AdamW's 0.44 after 250).
LR, BETAS, WEIGHT_DECAY = 1.5e-3, (0.9, 0.99), 1e-3


def world_folder(folder: Path, seed: int) -> Path:
    """Return the folder of a world."""
    return folder / f"world-{seed}"


def planted_weights(seed: int) -> Path:
    """Return the file of a planted transformer's weights; only some worlds have one."""
    return CLEAN.with_name(f"world-{seed}.safetensors")


def pipeline_of(weights: Path, device: str = "cpu") -> Any:
    """Return the tiny SANA in fp32, with the weights of a file in its transformer."""
    pipeline = load_pipeline("tiny-sana", dtype="fp32", device=device)
    pipeline.transformer.load_state_dict({n: t.float() for n, t in load_file(weights).items()})
    return pipeline


def write_prompts(planted: World, folder: Path) -> None:
    """Write the prompts to train on, of validation and of the test, and what was planted.

    Those that are scored alternate by kind; the test has both test splits. None asks for words:
    to read them takes several times longer than to draw the image.
    """
    seen = {split: [p for p in planted.prompts(split) if p["tag"] != "ocr"] for split in SPLITS}
    files = {
        "train": seen["train"],
        "validation": balanced(seen["validation"]),
        "test": [p for split in SPLITS[2:] for p in balanced(seen[split])],
    }
    for name, prompts in files.items():
        lines = [json.dumps(prompt) for prompt in prompts]
        write_text(folder / f"{name}.jsonl", "\n".join(lines) + "\n")
    content = {
        "seed": planted.seed,
        "defects": {tag: [asdict(d) for d in kind] for tag, kind in planted.defects.items()},
        "right": {f"{tag} {number}": share for (tag, number), share in planted.tiers.items()},
        "withheld": sorted(f"{tag} {number}" for tag, number in planted.withheld),
    }
    write_text(folder / "world.json", json.dumps(content, indent=1) + "\n")


def balanced(prompts: Sequence[Prompt], count: int = SCORED) -> list[Prompt]:
    """Return the first prompts, by turns of the kinds of requests."""
    kinds = [[p for p in prompts if p["tag"] == tag] for tag in TAGS]
    return [p for turn in zip_longest(*kinds) for p in turn if p][:count]


def write_pairs(planted: World, folder: Path) -> None:
    """Write a store of pairs: of prompts to train on, a right drawing and one with a defect."""
    drawings, rng = folder / "drawings", random.Random(f"pairs {planted.seed}")
    drawings.mkdir(parents=True, exist_ok=True)
    prompts = [p for p in planted.prompts("train") if p["tag"] != "ocr"]
    lines = []
    for number, prompt in zip(range(DRAWN_PAIRS), itertools.cycle(prompts), strict=False):
        names = {name: f"{number}-{name}.png" for name in ("chosen", "rejected")}
        for file, right in zip(names.values(), (1.0, 0.0), strict=True):
            image = planted.image(prompt | {"right": right}, rng)
            Image.fromarray(image).save(drawings / file)
        lines.append(json.dumps(prompt | names))
    table = drawings / "pairs.jsonl"
    write_text(table, "\n".join(lines) + "\n")
    own = [f"pipeline.path={folder / 'pipeline'}", f"prompts.train={folder / 'train.jsonl'}"]
    config = load_config(
        BASE, [*own, "objective={kind: sft}", f"run.output_dir={drawings / 'run'}"]
    )
    collect_pairs(config, table, folder / PAIRS)


def plant(
    planted: World, folder: Path, *, threads: int, device: str = "cpu", steps: int = STEPS
) -> None:
    """Teach the clean pipeline the world's images, and save it as `pipeline` in the folder."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    pipeline = pipeline_of(CLEAN, device)
    model = with_weights_of(pipeline, "sana", work / "tokenizers")
    drawn, captions = images(work, "planted", planted.sample, IMAGES, planted.seed, threads)
    latents = encode_all(pipeline.vae, drawn, work / "latents.safetensors")
    texts = Texts(model, captions, device)
    ema = copy.deepcopy(model.transformer).requires_grad_(False)
    adamw = torch.optim.AdamW(
        model.transformer.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    fit_flow(
        Stage(name=f"world-{planted.seed}", steps=steps, seed=planted.seed),
        model, ema, texts.examples(captions, latents), texts,
        folder=work, batch=BATCH, optimizers=[adamw], track=track,
    )  # fmt: skip
    save_pipeline(model.pipeline(ema.cpu(), pipeline.vae.cpu()), folder)


def save_pipeline(pipeline: Any, folder: Path) -> None:
    """Save a world's pipeline as `pipeline` in its folder: whole, or not at all."""
    save_half(pipeline, folder / "unfinished")
    (folder / "unfinished").rename(folder / "pipeline")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--folder", type=Path, default=Path("build/arena"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = world_folder(args.folder, args.seed)
    write_prompts(world(args.seed), folder)
    plant(world(args.seed), folder, threads=args.threads, device=args.device)
    write_pairs(world(args.seed), folder)
    print(f"World {args.seed} lies in {folder}.")


if __name__ == "__main__":
    main()
