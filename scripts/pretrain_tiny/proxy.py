"""Train the learned reward of the tiny world on few drawn images, and print what it gets wrong.

    python -m scripts.pretrain_tiny.proxy --work build/proxy

Half of the images show what was asked for, half of the others have the planted defect of their
kind, half show another request of it.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from flowrl_rewards.tiny_proxy import WEIGHTS, ProxyNetwork, request_numbers
from safetensors.torch import save
from torch import Tensor

from flowrl.tiny.world import GENEVAL_TAGS, Prompt, split_prompts
from flowrl.utils.files import write_bytes
from scripts.pretrain_tiny.defects import altered
from scripts.pretrain_tiny.draw import draw
from scripts.pretrain_tiny.fit import fit, generator_at
from scripts.pretrain_tiny.judge import mild


def example(rng: random.Random, tag: str, split: str) -> tuple[np.ndarray, Prompt, float]:
    """Draw an image: (64, 64, 3) uint8, the prompt it stands beside, and 1 where it is right."""
    prompts = split_prompts(tag, split)
    prompt = rng.choice(prompts)
    if rng.random() < 0.5:
        return draw(prompt, rng), prompt, 1.0
    if rng.random() < 0.5:
        return draw(altered(prompt, rng), rng), prompt, 0.0
    other = rng.choice([p for p in prompts if p["request"] != prompt["request"]])
    return draw(other, rng), prompt, 0.0


def examples(seed: str, count: int, split: str, tag: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Return images (N, 3, 64, 64) uint8, requests (N, numbers) and whether each is right (N,)."""
    rngs = [random.Random(f"{seed}/{i}") for i in range(count)]
    found = [example(rng, tag or rng.choice(GENEVAL_TAGS), split) for rng in rngs]
    images = torch.from_numpy(np.stack([image for image, _, _ in found])).permute(0, 3, 1, 2)
    requests = torch.stack([request_numbers(prompt) for _, prompt, _ in found])
    return images, requests, torch.tensor([right for _, _, right in found])


def train(folder: Path, *, images: int, steps: int, seed: int) -> ProxyNetwork:
    """Train on so many images of training requests."""
    x, requests, right = examples(f"proxy {seed}", images, "train")
    torch.manual_seed(seed)
    network = ProxyNetwork()

    def loss_at(step: int) -> Tensor:
        generator = generator_at(seed, step)
        rows = torch.randint(images, (64,), generator=generator)
        logits = network(mild(x[rows].float() / 255, generator), requests[rows])
        return F.binary_cross_entropy_with_logits(logits, right[rows])

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-2)
    fit("proxy", network, [optimizer], loss_at, steps=steps, decay=0.5, folder=folder)
    return network.eval()


@torch.no_grad()
def accuracy(network: ProxyNetwork, split: str, count: int) -> dict[str, float]:
    """Return the share of fresh drawings of every kind that the network judges rightly."""
    found = {}
    for tag in GENEVAL_TAGS:
        images, requests, right = examples(f"fresh {split}", count, split, tag)
        guess = network(images.float() / 255, requests) > 0
        found[tag] = (guess == right.bool()).float().mean().item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    parser.add_argument("--images", type=int, default=6_000)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    network = train(args.work, images=args.images, steps=args.steps, seed=args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: t.half().contiguous() for name, t in network.state_dict().items()}
    write_bytes(args.output, save(weights))
    for split in ("train", "test"):
        told = "  ".join(f"{k} {v:.2f}" for k, v in accuracy(network, split, 400).items())
        print(f"Right about fresh drawings of {split} requests: {told}", flush=True)


if __name__ == "__main__":
    main()
