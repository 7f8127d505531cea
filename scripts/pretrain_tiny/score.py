"""Score a tiny pipeline and write its model card.

    python -m scripts.pretrain_tiny.score build/tiny-sana --ceiling build/sana/ceiling

Draws the requests of the test split at few steps and the presets' text length, at 28 steps, and as
a plain `pipe(prompt)`, and asks the second judge and the classical detector. The scores lie
in scores.json beside the card, which is made from them; `--card` makes it again.
"""

import argparse
import json
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from flowrl.backbones.loading import load_pipeline
from flowrl.config import load_config
from flowrl.scoring.spec import load_reward
from flowrl.tiny.world import GENEVAL_TAGS, TAGS, WORDS, Prompt, planted, split_prompts
from flowrl.utils.files import write_text
from flowrl.utils.images import to_tensor

SMALL = {"height": 64, "width": 64}  # what a pipeline must be told of the size
CALLS: dict[str, dict[str, Any]] = {
    "StableDiffusion3Pipeline": {},
    "FluxPipeline": SMALL,
    "SanaPipeline": SMALL | {"use_resolution_binning": False},
}
# Of the few steps and of 28. FLUX takes guidance as an input, and is pretrained to be given it; the
# others are scored as the quickstarts use them, without.
GUIDANCE = {"StableDiffusion3Pipeline": 1.0, "FluxPipeline": 2.0, "SanaPipeline": 1.0}
STEPS = {"preset": 8, "28 steps": 28}
DEFAULTS = {
    "StableDiffusion3Pipeline": "28 steps, guidance 7 and 256 text tokens",
    "FluxPipeline": "28 steps, guidance 3.5 and 512 text tokens",
    "SanaPipeline": "20 steps, guidance 4.5 and 300 text tokens, with DPM-Solver++",
}
BATCH = 50
SCORES = "scores.json"
CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---
# {name}

A text-to-image pipeline of flowrl's tiny world: coloured shapes in GenEval's six kinds of request
and {words} words of four letters, 64x64 pixels. It is meant for tests and for trying reinforcement
learning on a laptop, and knows nothing else.

```python
from diffusers import DiffusionPipeline
from flowrl import pipeline_path

pipe = DiffusionPipeline.from_pretrained(pipeline_path("{name}"))
pipe("a red circle and a blue square"{size}).images[0]
```

Made by `scripts/pretrain_tiny` from drawn images (`flowrl/tiny/draw.py`): no photographs, no
scraped data. Words are set in Aileron Regular by Sora Sagano (CC0), the typeface that Pillow
carries. Weights: Apache-2.0.

{planted}

## Scores

Of images of the test split's requests, by the second judge (`rewards/tiny_judge.py`), a network
that learned from drawn images alone; an image is right when it shows all that was asked for, and
nothing else. *Detector*: by GenEval's strict rules over the classical detector
(`rewards/detectors/tiny.py`), which overlook objects of other shapes.
*Ceiling*: this pipeline trained without the planted defects.

At 8 and 28 steps: guidance {guidance:g}, {tokens} text tokens, Euler's method. Plain:
`pipe(prompt{size})`, hence diffusers' {defaults}.

{table}

`python -m scripts.pretrain_tiny.score` measured it on a CPU, {counts}; `scores.json` has the
figures.
"""
JUDGES: dict[str, tuple[str, dict[str, Any]]] = {
    "judge": ("tiny_judge", {}), "detector": ("geneval", {"mode": "strict"}),
}  # fmt: skip


def draw_with(pipeline: Any, prompts: Sequence[Prompt], **call: Any) -> torch.Tensor:
    """Return images (N, 3, 64, 64) in [0, 1] of prompts, with seeds 0, 1, ..."""
    drawn = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        seeds = [torch.Generator().manual_seed(start + i) for i in range(len(part))]
        texts = [prompt["prompt"] for prompt in part]
        drawn.append(to_tensor(pipeline(texts, generator=seeds, **call).images))
    return torch.cat(drawn)


def call_of(kind: str, setting: str) -> dict[str, Any]:
    """Return the keywords of a pipeline's call: preset (8 steps), 28 steps or plain."""
    if setting == "plain":
        return CALLS[kind]
    return CALLS[kind] | {
        "guidance_scale": GUIDANCE[kind],
        "max_sequence_length": load_config("quickstart").pipeline.max_sequence_length,
        "num_inference_steps": STEPS[setting],
    }


def scores(pipeline: Any, count: int, setting: str) -> dict[str, dict[str, float]]:
    """Return the mean score of `count` images of every kind: {judge: {kind: mean}}."""
    call = call_of(type(pipeline).__name__, setting)
    judges = {name: load_reward(*spec) for name, spec in JUDGES.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in judges}
    for tag in track(TAGS, description=setting):
        prompts = split_prompts(tag, "test")
        prompts = [prompts[i % len(prompts)] for i in range(count)]
        images = draw_with(pipeline, prompts, **call)
        for name, judge in judges.items():
            if name == "detector" and tag == "ocr":
                continue
            answer = judge(images, [p["prompt"] for p in prompts], prompts)
            values = answer[0] if isinstance(answer, tuple) else answer
            found[name][tag] = values.mean().item()
    for by_kind in found.values():
        by_kind["GenEval, mean"] = statistics.mean(by_kind[tag] for tag in GENEVAL_TAGS)
    return found


def as_presets(pipeline: Any) -> Any:
    """Return the pipeline with the sampler of the presets: Euler's method on its own schedule."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    if type(pipeline).__name__ == "SanaPipeline":
        shift = pipeline.scheduler.config.flow_shift
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    return pipeline


def measure(folder: Path, counts: dict[str, int]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the scores of a pipeline for every setting with a count: {setting: {judge: ...}}."""
    found = {}
    for setting, count in counts.items():
        pipeline = load_pipeline(str(folder), dtype="fp32", device="cpu")
        pipeline.set_progress_bar_config(disable=True)
        if setting != "plain":
            pipeline = as_presets(pipeline)
        found[setting] = scores(pipeline, count, setting)
        for name, by_kind in found[setting].items():
            told = "  ".join(f"{kind} {value:.3f}" for kind, value in by_kind.items())
            print(f"{folder.name}, {setting}, {name}: {told}", flush=True)
    return found


def card(name: str, kind: str, found: dict[str, Any]) -> str:
    """Return the text of a pipeline's card. found: as scores.json has it; kind: its class."""
    base, ceiling = found["base"], found.get("ceiling", {})
    columns = {
        "8 steps": base["preset"]["judge"],
        "28 steps": base["28 steps"]["judge"],
        "plain": base.get("plain", {}).get("judge", {}),
        "detector, 8 steps": base["preset"]["detector"],
        "ceiling, 8 steps": ceiling.get("preset", {}).get("judge", {}),
        "ceiling, 28 steps": ceiling.get("28 steps", {}).get("judge", {}),
    }
    columns = {name: column for name, column in columns.items() if column}
    lines = ["| kind | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for row in base["preset"]["judge"]:
        cells = [f"{column[row]:.2f}" if row in column else "" for column in columns.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    preset = call_of(kind, "preset")
    named = {"preset": f"{STEPS['preset']} steps"}
    counts = [
        f"{n} images a kind ({named.get(setting, setting)})"
        for setting, n in found["images"].items()
    ]
    return CARD.format(
        name=name,
        words=len(WORDS),
        size="".join(f", {key}={value}" for key, value in CALLS[kind].items()),
        planted=textwrap.fill(planted(), 100),
        guidance=preset["guidance_scale"],
        tokens=preset["max_sequence_length"],
        defaults=DEFAULTS[kind],
        table="\n".join(lines),
        counts=", ".join(counts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--ceiling", type=Path, help="the same without planted defects")
    parser.add_argument("--images", type=int, default=100, help="of each kind")
    parser.add_argument("--plain-images", type=int, default=24, help="of each kind; 0: none")
    parser.add_argument("--card", action="store_true", help="write the card from scores.json alone")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.card:
        counts = {"preset": args.images, "28 steps": args.images}
        if args.plain_images:
            counts["plain"] = args.plain_images
        found: dict[str, Any] = {"images": counts, "base": measure(args.pipeline, counts)}
        if args.ceiling:
            both = {"preset": args.images, "28 steps": args.images}
            found["ceiling"] = measure(args.ceiling, both)
        write_text(args.pipeline / SCORES, json.dumps(found, indent=1) + "\n")
    found = json.loads((args.pipeline / SCORES).read_text(encoding="utf-8"))
    index = json.loads((args.pipeline / "model_index.json").read_text(encoding="utf-8"))
    text = card(args.pipeline.name, index["_class_name"], found)
    write_text(args.pipeline / "README.md", text)


if __name__ == "__main__":
    main()
