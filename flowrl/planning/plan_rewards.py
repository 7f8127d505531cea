"""What rewards take of a GPU's memory: the weights of the built-in ones, and whose they are."""

from collections.abc import Mapping
from typing import Any

from flowrl.config.rewards import HttpExecutor, PoolExecutor
from flowrl.config.rewards import Reward as RewardSection
from flowrl.planning.dry_rewards import tell

# Numbers in the networks, by building them from their configurations on the meta device, except
# where a source is named.
CLIP_L = 427_616_513  # openai/clip-vit-large-patch14
CLIP_H = 986_109_441  # laion/CLIP-ViT-H-14-laion2B-s32B-b79K, and its descendants
WEIGHTS: Mapping[str, int] = {
    "pickscore": CLIP_H,
    "clipscore": CLIP_L,
    "aesthetic": CLIP_L,
    "hpsv2": CLIP_H,
    "imagereward": 447_000_000,  # its file of 1.79 GB in fp32
}
HPSV3 = 8_290_000_000  # Qwen2-VL-7B, whose numbers are in bf16
DETECTORS: Mapping[str, int] = {
    "mask2former": 68_741_083,  # facebook/mask2former-swin-small-coco-instance
    "owlv2": 154_966_792,  # google/owlv2-base-patch16-ensemble
    "grounding_dino": 233_000_000,  # IDEA-Research/grounding-dino-base, as its card rounds it
}
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def reward_bytes(entry: RewardSection) -> int | None:
    """Bytes of weights on each process's GPU; None for one's own reward, which nobody knows.

    0 for what is computed on the CPU or by a server. Every entry has weights of its own, and so has
    every process of a pool. What a network needs beside its weights, for one picture at a time, is
    small against a transformer's training.
    """
    if isinstance(entry.executor, HttpExecutor) or entry.args.get("device") == "cpu":
        return 0
    workers = entry.executor.workers if isinstance(entry.executor, PoolExecutor) else 1
    found = _weights(entry.name, entry.args)
    return None if found is None else found * workers


def _weights(name: str, args: Mapping[str, Any]) -> int | None:
    if ":" in name:
        return None
    if name == "hpsv3":
        return HPSV3 * 2
    if name == "geneval":
        return _geneval(args)
    if name in ("similarity", "diversity"):
        clip = str(args.get("measure", "")).startswith("clip")
        return CLIP_L * ITEMSIZE[args.get("dtype", "fp32")] if clip else 0
    return WEIGHTS.get(name, 0) * ITEMSIZE[args.get("dtype", "fp32")]


def _geneval(args: Mapping[str, Any]) -> int | None:
    detector, colors = args.get("detector", "tiny"), args.get("colors")
    if ":" in detector or (colors and ":" in colors):
        return None
    found = DETECTORS.get(detector, 0) * _size_of(args.get("detector_args"))
    return found + (CLIP_L * _size_of(args.get("colors_args")) if colors == "clip" else 0)


def _size_of(args: Mapping[str, Any] | None) -> int:
    """Bytes of a number; 0 for networks that are kept on the CPU."""
    args = args or {}
    return 0 if args.get("device") == "cpu" else ITEMSIZE[args.get("dtype", "fp32")]


def compares_groups(entry: RewardSection) -> bool:
    """Whether the reward compares all pictures of a prompt, as far as it says so here."""
    return getattr(tell(entry).reward, "scope", "sample") == "group"
