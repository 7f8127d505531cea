"""Measure how far flowrl's latents are from those of the pipeline's own call, from the same noise.

python -m scripts.deployed_difference tiny-sana --steps 8
"""

import argparse

import torch

from flowrl.assembly.learner import ProvidedObjects, build_evaluator
from flowrl.backbones.loading import load_pipeline
from flowrl.config import parse_config
from flowrl.sampling.rollout import sample_request
from flowrl.scoring.spec import RewardSpec
from flowrl.trees.plan import ode_plan


def differences(path: str, dtype: str, steps: int, prompts: str, images: int) -> torch.Tensor:
    """Return |ours - theirs| / |ours| of each image's latent. (images,)"""
    pipeline = load_pipeline(path, dtype=dtype, device=torch.device("cpu"))
    config = parse_config(
        {
            "pipeline": {"path": path, "dtype": dtype, "device": "cpu"}
            | {"max_sequence_length": 12},
            "prompts": {"train": prompts},
            "rewards": [{"name": "brightness"}],
            "evaluation": {"prompts": prompts, "num_images": images, "batch_size": images}
            | {"num_inference_steps": steps, "as_deployed": True},
        }
    )
    specs = [RewardSpec(name="mean", reward=lambda images, *_: images.mean((1, 2, 3)))]
    evaluator = build_evaluator(config, pipeline, specs, ProvidedObjects())
    assert evaluator is not None and evaluator.call is not None
    backbone, request = evaluator.backbone, evaluator.request()
    with torch.no_grad():
        cond = evaluator.text_cache(request.prompts)
        tree = sample_request(
            backbone, backbone.velocity, cond, request, ode_plan(steps), evaluator.schedule, images
        )
        noise = request.noise((), 0, "init", backbone.latent_shape()).to(backbone.dtype)
        call = {**evaluator.call.settings, "num_inference_steps": steps, "output_type": "latent"}
        theirs = pipeline([p.read for p in evaluator.prompts], latents=noise, **call).images
    ours = tree.leaves().float()
    return (ours - theirs.float()).flatten(1).norm(dim=1) / ours.flatten(1).norm(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pipelines", nargs="+", help="names or folders of diffusers pipelines")
    parser.add_argument("--steps", type=int, nargs="+", default=[8])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--prompts", default="tiny:geneval:test")
    parser.add_argument("--images", type=int, default=48)
    asked = parser.parse_args()
    print("pipeline | dtype | steps | mean | median | largest")
    for path in asked.pipelines:
        for dtype in asked.dtypes:
            for steps in asked.steps:
                found = differences(path, dtype, steps, asked.prompts, asked.images)
                shown = (found.mean(), found.median(), found.max())
                numbers = " | ".join(f"{value.item():.4f}" for value in shown)
                print(f"{path} | {dtype} | {steps} | {numbers}", flush=True)


if __name__ == "__main__":
    main()
