"""Score a tiny pipeline and write its model card.

    python -m scripts.pretrain_tiny.score build/tiny-sana --ceiling build/sana/ceiling --images 60

Draws the requests of the test split as the quickstart of the pipeline is evaluated, at its own few
steps and at 28, and as a plain `pipe(prompt)`, and asks the second judge and the classical
detector. The scores and settings lie in scores.json beside the card, which is made from them;
`--card` makes it again.
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
QUICKSTARTS = {
    "StableDiffusion3Pipeline": "quickstart",
    "FluxPipeline": "quickstart-flux",
    "SanaPipeline": "quickstart-sana",
}
SETTINGS = ("preset", "28 steps")  # of the quickstart's evaluation
DEFAULTS = {
    "StableDiffusion3Pipeline": "28 steps, guidance 7 and 256 text tokens",
    "FluxPipeline": "28 steps, guidance 3.5 and 512 text tokens",
    "SanaPipeline": "20 steps, guidance 4.5 and 300 text tokens, with DPM-Solver++",
}
BATCH = 50
MEAN = "GenEval, mean"
SCORES = "scores.json"
GUIDED = "scores-guidance-2.json"  # of an earlier preset, where there was one
CEILING = "*Ceiling*: this pipeline trained without the planted defects."  # from its plateau on
LOWER_BOUND = """
*Ceiling*: a lower bound. This pipeline was trained further, without guidance, on images without the
planted defects (`scripts/pretrain_tiny/ceiling.py`).
"""
WITH_GUIDANCE = """
With guidance {guidance:g}, at {steps[0]} and {steps[1]} steps, this pipeline has {base[0]:.2f} and
{base[1]:.2f}, and one that was pretrained without the defects {ceiling[0]:.2f} and {ceiling[1]:.2f}
(`{file}`).
"""
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

Made by `scripts/pretrain_tiny` from images that its `draw.py` draws: no photographs, no
scraped data. Words are set in Aileron Regular by Sora Sagano (CC0), the typeface that Pillow
carries. Weights: Apache-2.0.

{planted}

## Scores

Of images of the test split's requests, by the second judge (`rewards/tiny_judge.py`), a network
that learned from drawn images alone; an image is right when it shows all that was asked for, and
nothing else. *Detector*: by GenEval's strict rules over the classical detector
(`rewards/detectors/tiny.py`), which overlook objects of other shapes.
{ceiling}

At {few} and {many} steps: guidance {guidance:g}, {tokens} text tokens, Euler's method. Plain:
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
    """Return the keywords of a pipeline's call: preset (its quickstart's), 28 steps or plain."""
    if setting == "plain":
        return CALLS[kind]
    config = load_config(QUICKSTARTS[kind])
    steps = dict(zip(SETTINGS, config.evaluation.num_inference_steps, strict=True))
    return CALLS[kind] | {
        "guidance_scale": config.evaluation.guidance_scale,
        "max_sequence_length": config.pipeline.max_sequence_length,
        "num_inference_steps": steps[setting],
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
        by_kind[MEAN] = statistics.mean(by_kind[tag] for tag in GENEVAL_TAGS)
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


def means_of(found: dict[str, Any], part: str) -> list[float]:
    """Return the judge's means at both step counts.

    found: as scores.json has it; part: base or ceiling.
    """
    return [found[part][setting]["judge"][MEAN] for setting in SETTINGS]


def ceiling_told(folder: Path, found: dict[str, Any]) -> str:
    """Return what a card says of the ceiling: how it was made, and what it is with guidance."""
    told = LOWER_BOUND if found["lower_bound"] else CEILING
    if (folder / GUIDED).is_file():
        guided = json.loads((folder / GUIDED).read_text(encoding="utf-8"))
        settings = [guided["settings"][setting] for setting in SETTINGS]
        told += WITH_GUIDANCE.format(
            file=GUIDED,
            guidance=settings[0]["guidance_scale"],
            steps=[setting["num_inference_steps"] for setting in settings],
            base=means_of(guided, "base"),
            ceiling=means_of(guided, "ceiling"),
        )
    return textwrap.fill(" ".join(told.split()), 100, break_on_hyphens=False)


def card(folder: Path) -> str:
    """Return the text of a pipeline's card, from its scores.json."""
    found = json.loads((folder / SCORES).read_text(encoding="utf-8"))
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    kind = index["_class_name"]
    base, ceiling = found["base"], found.get("ceiling", {})
    settings = found["settings"]
    few, many = (settings[setting]["num_inference_steps"] for setting in SETTINGS)
    columns = {
        f"{few} steps": base["preset"]["judge"],
        f"{many} steps": base["28 steps"]["judge"],
        "plain": base.get("plain", {}).get("judge", {}),
        f"detector, {few} steps": base["preset"]["detector"],
        f"ceiling, {few} steps": ceiling.get("preset", {}).get("judge", {}),
        f"ceiling, {many} steps": ceiling.get("28 steps", {}).get("judge", {}),
    }
    columns = {name: column for name, column in columns.items() if column}
    lines = ["| kind | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for row in base["preset"]["judge"]:
        cells = [f"{column[row]:.2f}" if row in column else "" for column in columns.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    preset = settings["preset"]
    named = {"preset": f"{few} steps"}
    counts = [
        f"{n} images a kind ({named.get(setting, setting)})"
        for setting, n in found["images"].items()
    ]
    return CARD.format(
        name=folder.name,
        words=len(WORDS),
        size="".join(f", {key}={value}" for key, value in CALLS[kind].items()),
        planted=textwrap.fill(planted(), 100),
        ceiling=ceiling_told(folder, found),
        few=few,
        many=many,
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
    parser.add_argument(
        "--lower-bound", action="store_true", help="the ceiling was made by `ceiling.py`"
    )
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
        index = json.loads((args.pipeline / "model_index.json").read_text(encoding="utf-8"))
        found: dict[str, Any] = {
            "images": counts,
            "settings": {name: call_of(index["_class_name"], name) for name in SETTINGS},
            "lower_bound": args.lower_bound,
            "base": measure(args.pipeline, counts),
        }
        if args.ceiling:
            both = {"preset": args.images, "28 steps": args.images}
            found["ceiling"] = measure(args.ceiling, both)
        write_text(args.pipeline / SCORES, json.dumps(found, indent=1) + "\n")
    write_text(args.pipeline / "README.md", card(args.pipeline))


if __name__ == "__main__":
    main()
