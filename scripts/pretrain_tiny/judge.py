"""Train the second judge of the tiny world, on drawn images alone.

    python -m scripts.pretrain_tiny.judge --work build/judge

Clean drawings, slightly blurred, shifted in level and noisy as an autoencoder leaves them, are
what they are; mixtures of two drawings, faded, cut, displaced, recoloured and heavily blurred
objects are "other", so that the judge accepts nothing half-drawn.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from flowrl_rewards.tiny_judge import LETTERS, OBJECTS, SIGNS, WEIGHTS, JudgeNetwork
from safetensors.torch import save
from torch import Tensor

from flowrl.tiny.world import COLORS, SHAPES, WORDS
from flowrl.utils.files import write_bytes
from scripts.pretrain_tiny.draw import QUARTERS, draw
from scripts.pretrain_tiny.fit import fit, generator_at

NOTHING, OTHER = 0, 1


def scene(rng: random.Random) -> tuple[np.ndarray, list[int], list[int]]:
    """Draw a random image: (64, 64, 3) uint8, its quarters' and its columns' classes."""
    if rng.random() < 0.25:
        made_up = "".join(rng.choice(LETTERS) for _ in range(4))
        word = rng.choice(WORDS) if rng.random() < 0.3 else made_up
        image = draw({"tag": "ocr", "ocr_text": word}, rng)
        return image, [OTHER] * 4, [SIGNS.index(letter) for letter in word]
    places = rng.sample(list(QUARTERS), rng.choice((0, 1, 1, 2, 2, 3, 4)))
    include, labels = [], [NOTHING] * 4
    for place in places:
        shape, color, size = rng.choice(SHAPES), rng.choice(COLORS), rng.choice(("", "small"))
        size = size if rng.random() < 0.6 else ""
        entry = {"class": shape, "count": 1, "color": color, "place": place}
        include.append(entry | ({"size": size} if size else {}))
        labels[list(QUARTERS).index(place)] = OBJECTS.index((shape, color, size))
    image = draw({"tag": "", "include": include}, rng)
    left, right = (OTHER if labels[i] or labels[i + 2] else NOTHING for i in (0, 1))
    return image, labels, [left, left, right, right]


def mild(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (B, 3, 64, 64) as a good autoencoder would leave them."""
    blur = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    share = 0.5 * torch.rand(len(x), 1, 1, 1, generator=generator)
    level = 0.03 * torch.randn(len(x), 3, 1, 1, generator=generator)
    noise = 0.03 * torch.rand(len(x), 1, 1, 1, generator=generator)
    x = (1 - share) * x + share * blur + level
    return (x + noise * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def spoil(
    x: Tensor, quarters: Tensor, columns: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images of which none of the objects and letters is clean, and what they then are."""
    turn = int(torch.randint(5, (), generator=generator))
    order = torch.randperm(len(x), generator=generator)
    u = torch.rand(len(x), 1, 1, 1, generator=generator)
    if turn == 0:  # a mixture with another image: whatever differs is no clean object
        x = x.lerp(x[order], 0.3 + 0.4 * u)
        return x, *(t.where(t == t[order], OTHER) for t in (quarters, columns))
    if turn == 1:  # displaced by half an object; what was empty may hold a part, and is not asked
        x = x.roll((6 + torch.randint(5, (2,), generator=generator)).tolist(), (2, 3))
        return x, *(torch.where(t == NOTHING, -1, OTHER) for t in (quarters, columns))
    if turn == 2:  # faded
        x = x.lerp(x[:, :, :1, :1], 0.4 + 0.4 * u)
    elif turn == 3:  # the half of every object is missing
        missing = (torch.arange(64) % 32 < 16).expand(1, 1, 64, 64)
        missing = missing if u[0] < 0.5 else missing.transpose(2, 3)
        x = torch.where(missing, x[:, :, :1, :1], x)
    else:  # heavy blur
        x = F.avg_pool2d(F.pad(x, (4, 4, 4, 4), mode="replicate"), 9, stride=1)
    return x, *(t.where(t == NOTHING, OTHER) for t in (quarters, columns))


def train(folder: Path, steps: int, batch: int, seed: int, count: int) -> JudgeNetwork:
    """Train a judge on `count` drawn images."""
    drawn = [scene(random.Random(f"judge {seed}/{i}")) for i in range(count)]
    images = torch.from_numpy(np.stack([d[0] for d in drawn])).permute(0, 3, 1, 2)
    quarters, columns = (torch.tensor([d[i] for d in drawn]) for i in (1, 2))
    torch.manual_seed(seed)
    network = JudgeNetwork()

    def loss_at(step: int) -> Tensor:
        generator = generator_at(seed, step)
        rows = torch.randint(count, (batch,), generator=generator)
        x, q, c = images[rows].float() / 255, quarters[rows], columns[rows]
        half = batch // 2
        bad = spoil(x[half:], q[half:], c[half:], generator)
        x, q, c = (torch.cat([good[:half], b]) for good, b in zip((x, q, c), bad, strict=True))
        for_quarters, for_columns = network(mild(x, generator))
        return sum(
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
            for logits, labels in ((for_quarters, q), (for_columns, c))
        )

    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-3)
    fit("judge", network, [optimizer], loss_at, steps=steps, decay=0.5, folder=folder)
    return network.eval()


@torch.no_grad()
def agreement(network: JudgeNetwork, count: int, seed: int) -> float:
    """Return the share of fresh drawings of which the judge names every part."""
    drawn = [scene(random.Random(f"fresh {seed}/{i}")) for i in range(count)]
    right = 0
    for image, quarters, columns in drawn:
        x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
        q, c = (logits[0].argmax(-1).tolist() for logits in network(x))
        right += q == quarters and c == columns
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--images", type=int, default=40_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    network = train(args.work, args.steps, 128, 0, args.images)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: t.half().contiguous() for name, t in network.state_dict().items()}
    write_bytes(args.output, save(weights))
    print(f"Of 4,000 fresh drawings the judge names {agreement(network, 4_000, 1):.4f} wholly.")


if __name__ == "__main__":
    main()
