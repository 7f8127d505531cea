"""Score a tiny pipeline and write its model card.

    python -m scripts.pretrain_tiny.score flowrl/assets/tiny-sana --ceiling build/sana/ceiling

Draws the requests of the test split at the presets' steps, guidance and text length, at 28 steps,
and as a plain `pipe(prompt)`, and asks the second judge and the classical detector.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from flowrl.backbones.loading import load_pipeline
from flowrl.scoring.spec import load_reward
from flowrl.tiny.world import GENEVAL_TAGS, TAGS, Prompt, split_prompts
from flowrl.utils.files import write_text
from flowrl.utils.images import to_tensor

PRESET = {"guidance_scale": 1.0, "max_sequence_length": 12}
SETTINGS: dict[str, dict[str, Any]] = {
    "preset": PRESET | {"num_inference_steps": 6},
    "28 steps": PRESET | {"num_inference_steps": 28},
    "plain": {},
}
SMALL = {"height": 64, "width": 64}  # what a pipeline must be told of the size
CALLS: dict[str, dict[str, Any]] = {
    "StableDiffusion3Pipeline": {},
    "FluxPipeline": SMALL,
    "SanaPipeline": SMALL | {"use_resolution_binning": False},
}
BATCH = 50
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


def scores(pipeline: Any, count: int, setting: str) -> dict[str, dict[str, float]]:
    """Return the mean score of `count` images of every kind: {judge: {kind: mean}}."""
    call = CALLS[type(pipeline).__name__] | SETTINGS[setting]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--ceiling", type=Path, help="the same without planted defects")
    parser.add_argument("--images", type=int, default=100, help="of each kind")
    parser.add_argument("--plain-images", type=int, default=24, help="of each kind; 0: none")
    parser.add_argument("--output", type=Path, help="a JSON file for the scores")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = {"preset": args.images, "28 steps": args.images}
    if args.plain_images:
        counts["plain"] = args.plain_images
    found = {"base": measure(args.pipeline, counts)}
    if args.ceiling:
        found["ceiling"] = measure(args.ceiling, {"preset": args.images, "28 steps": args.images})
    if args.output:
        write_text(args.output, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
