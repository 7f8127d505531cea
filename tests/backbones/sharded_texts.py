"""Velocities and gradients of each process over a network in parts, for `test_sharding.py`.

python sharded_texts.py FOLDER CLASS writes FOLDER/RANK: the velocities of this process's texts and
the gradient, summed over processes, and the same from the whole network.
"""

import sys
from pathlib import Path

import diffusers
import torch

torch.set_num_threads(1)

import flowrl.api  # noqa: E402, F401  # first, as everybody does
from flowrl.backbones.pipeline import PipelineBackbone  # noqa: E402
from flowrl.backbones.policy import Policy  # noqa: E402
from flowrl.backbones.sharding import shard_network  # noqa: E402
from flowrl.backbones.small import small_pipeline  # noqa: E402
from flowrl.utils.distributed import Runtime  # noqa: E402
from flowrl.utils.files import save_state  # noqa: E402

# The first process has one length of text and one noise level, the second several of each.
TEXTS = (["a red star"] * 3, ["a red star", "two stars", "a blue ring left of two red stars"])
LEVELS = ([0.5, 0.5, 0.5], [0.5, 0.25, 0.75])


def results(name: str, runtime: Runtime, shard: bool) -> dict[str, torch.Tensor]:
    pipeline = small_pipeline(getattr(diffusers, name))
    if shard:
        shard_network(pipeline.transformer, runtime, "all")
    backbone = PipelineBackbone(pipeline, guidance=3.0, height=64, width=64, in_step=runtime.rounds)
    policy = Policy(backbone, rank=2, alpha=2, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    cond = backbone.encode(TEXTS[runtime.rank], [""] * 3)
    x = torch.randn(3, *backbone.latent_shape(), generator=generator)
    seen = {}
    for at, sigma in (("one", torch.tensor(0.5)), ("several", torch.tensor(LEVELS[runtime.rank]))):
        v = policy.velocity(x, sigma, cond)
        v.float().square().sum().backward()
        runtime.reduce_gradients(policy.parameters())
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        seen |= {at: v.detach(), f"{at} gradient": torch.cat([g.flatten() for g in gradients])}
        for parameter in policy.parameters():
            parameter.grad = None
    return seen


if __name__ == "__main__":
    runtime = Runtime(device="cpu")
    whole, parts = (results(sys.argv[2], runtime, shard) for shard in (False, True))
    save_state(Path(sys.argv[1]) / str(runtime.rank), {"whole": whole, "parts": parts})
