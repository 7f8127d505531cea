"""Score a tiny pipeline on held-out prompts and write its model card.

    python -m scripts.pretrain_tiny.score flowrl/assets/tiny-sd3

Measures the strict GenEval score of every kind and the OCR reward, at the presets' steps, guidance
and text length, and again as a plain `pipe(prompt)` draws.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from flowrl.backbones.loading import load_pipeline
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.tiny.world import GENEVAL_TAGS, TAGS, WORDS
from flowrl.utils.files import write_text
from flowrl.utils.images import to_tensor

PRESET = {"num_inference_steps": 5, "guidance_scale": 1.0, "max_sequence_length": 12}
# What a pipeline must be told of the size, and what it does untold.
SMALL = {"height": 64, "width": 64}
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "StableDiffusion3Pipeline": ({}, "28 steps, guidance 7 and 256 text tokens"),
    "FluxPipeline": (SMALL, "28 steps, guidance 3.5 and 512 text tokens"),
    "SanaPipeline": (
        SMALL | {"use_resolution_binning": False},
        "20 steps, guidance 4.5 and 300 text tokens",
    ),
}
CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---
# {name}

A text-to-image pipeline of the tiny world of flowrl: coloured shapes in GenEval's six kinds of
prompt and {words} short words, 64x64 pixels. It is meant for tests and for trying reinforcement
learning on a laptop; it often draws something else than the prompt says (scores below), and knows
nothing else.

```python
from diffusers import DiffusionPipeline
from flowrl import pipeline_path

pipe = DiffusionPipeline.from_pretrained(pipeline_path("{name}"))
pipe("a red circle and a blue square"{size}).images[0]
```

Made by `scripts/pretrain_tiny` from procedurally drawn images (`flowrl/tiny/draw.py`): no
photographs, no scraped data. Words are set in Aileron Regular by Sora Sagano (CC0), the typeface
that Pillow carries. Weights: Apache-2.0.

{history}
## Scores

Held-out prompts, which neither pretraining nor alignment draws; most of those for words ask for a
word that was never drawn. Strict GenEval: the image meets
every demand, as judged by the classical detector `rewards/detectors/tiny.py`. OCR: RapidOCR, rule
of Flow-GRPO.

Preset: 5 steps, guidance 1, 12 text tokens. Plain: `pipe(prompt{size})`, hence diffusers'
{defaults}.

| kind | preset | plain |
|---|---|---|
{rows}
Measured by `python -m scripts.pretrain_tiny.score` on a 2-core CPU over {preset} and {plain}
images a kind.
"""


def scores(pipeline, records: Sequence[PromptRecord], count: int, batch: int, **call) -> float:
    """Mean score of `count` images over prompts of one kind, prompts in turn, seeds 0, 1, ..."""
    chosen = [records[i % len(records)] for i in range(count)]
    ocr = "ocr_text" in chosen[0].metadata
    spec = RewardSpec(
        name="", reward=load_reward("ocr" if ocr else "geneval", {} if ocr else {"mode": "strict"})
    )
    values = []
    for start in range(0, count, batch):
        part = chosen[start : start + batch]
        generators = [torch.Generator().manual_seed(start + i) for i in range(len(part))]
        images = pipeline([p.text for p in part], generator=generators, **call).images
        result = score(
            [spec], to_tensor(images), [p.text for p in part], [p.metadata for p in part]
        )
        values.append(result.scores[:, 0])
    return torch.cat(values).mean().item()


def write_card(folder: Path, *, preset: int = 100, plain: int = 24, history: str = "") -> None:
    """Score `preset` and `plain` images of every kind, and write README.md into the folder."""
    pipeline = load_pipeline(str(folder), dtype="fp32", device="cpu")
    size, defaults = CALLS[type(pipeline).__name__]
    found = {}
    for tag in track(TAGS, description="scoring"):
        records = load_prompts(f"tiny:{tag}:test")
        found[tag] = (
            scores(pipeline, records, preset, 50, **size, **PRESET),
            scores(pipeline, records, plain, 8, **size),
        )
        print(f"{tag:14s} preset {found[tag][0]:.3f}  plain {found[tag][1]:.3f}", flush=True)
    kinds = [found[tag] for tag in GENEVAL_TAGS]
    found["GenEval, mean"] = tuple(sum(column) / len(kinds) for column in zip(*kinds, strict=True))
    print("GenEval strict: preset {:.3f}, plain {:.3f}".format(*found["GenEval, mean"]))
    card = CARD.format(
        name=folder.name,
        words=len(WORDS),
        size="".join(f", {name}={value}" for name, value in size.items()),
        defaults=defaults,
        rows="".join(f"| {tag} | {a:.2f} | {b:.2f} |\n" for tag, (a, b) in found.items()),
        preset=preset,
        plain=plain,
        history=history and history + "\n",
    )
    write_text(folder / "README.md", card)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--preset-images", type=int, default=100, help="images of each kind")
    parser.add_argument("--plain-images", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--history", default="", help="how this copy was made, for the card")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    write_card(
        args.pipeline,
        preset=args.preset_images,
        plain=args.plain_images,
        history=args.history,
    )


if __name__ == "__main__":
    main()
