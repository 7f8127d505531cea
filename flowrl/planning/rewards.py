"""The memory of a recipe's rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.backbones.loading import DTYPES
from flowrl.config.rewards import HTTPOptions, RewardOptions


@dataclass(frozen=True, slots=True)
class Network:
    """A reward's network, counted by building it from its configuration on the meta device."""

    model: str  # repository, or the name of a detector
    parameters: int
    image: int  # numbers that one image's forward makes at once, at most


VIT_L14 = "openai/clip-vit-large-patch14"
CLIP_L = Network(VIT_L14, 427_616_513, 4_210_688)
CLIP_H = Network("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 986_109_441, 5_263_360)
# HPSv3's has no head for the next token; it is counted on 1,337 tokens of an image of 1024
# pixels a side and 163 of text.
REWARDS: Mapping[str, Network] = {
    "pickscore": Network("yuvalkirstain/PickScore_v1", CLIP_H.parameters, CLIP_H.image),
    "clipscore": CLIP_L,
    "aesthetic": CLIP_L,
    "hpsv2": Network("xswu/HPSv2", CLIP_H.parameters, CLIP_H.image),
    "hpsv3": Network("MizzenAI/HPSv3", 7_748_610_610, 101_376_000),
}
DETECTORS: Mapping[str, Network] = {
    "mask2former": Network("mask2former", 68_741_083, 177_225_318),  # swin-small, COCO instances
}
# Networks that a reward's `model` may name; one that is not here counts as the reward's own.
MODELS = {network.model: network for network in (CLIP_L, CLIP_H)}


def reward_networks(entry: RewardOptions) -> dict[tuple, Network] | None:
    """Return the networks that a reward has in a process, by all that decides one.

    None if unknown; empty for what needs none, or is computed by a server.
    """
    if isinstance(entry.executor, HTTPOptions):
        return {}
    if ":" in entry.name:
        return None
    return _networks_of(entry.name, entry.args)


def _networks_of(name: str, args: Mapping[str, Any]) -> dict[tuple, Network] | None:
    if name == "geneval":
        detector, colors = args.get("detector", "tiny"), args.get("colors")
        if ":" in detector:
            return None
        networks = _network(DETECTORS.get(detector), args.get("detector_args") or {})
        clip = CLIP_L if colors == "clip" else None
        return networks | _network(clip, args.get("colors_args") or {})
    if name == "hpsv3":
        args = {"dtype": "bf16", **args}
    if name == "agreement":  # without a model it compares pixels
        return _network(CLIP_L if args.get("model") else None, args)
    return _network(REWARDS.get(name), args)


def _network(network: Network | None, args: Mapping[str, Any]) -> dict[tuple, Network]:
    if network is None:
        return {}
    network = MODELS.get(str(args.get("model")), network)
    model = str(args.get("model", network.model))
    itemsize = DTYPES[args.get("dtype", "fp32")].itemsize
    return {(model, args.get("revision"), args.get("device"), itemsize): network}


def rewards_bytes(entries: Sequence[RewardOptions], *, cpu: bool = False) -> int:
    """Return the bytes of rewards' weights of a process, as far as they are known.

    Equal networks are held once. cpu: those in the machine's memory, in place of the GPU's.
    """
    held: dict[tuple, Network] = {}
    for entry in entries:
        held |= reward_networks(entry) or {}
    here = {key: network for key, network in held.items() if ("cpu" in key) == cpu}
    return sum(network.parameters * key[-1] for key, network in here.items())


def scoring_bytes(entries: Sequence[RewardOptions], images: int) -> int:
    """Return the bytes of activations while `images` are scored by one reward after the other."""
    sizes = [0]
    for entry in entries:
        networks = reward_networks(entry) or {}
        sizes_here = (n.image * key[-1] for key, n in networks.items() if "cpu" not in key)
        size = max(sizes_here, default=0)
        rows = min(images, getattr(entry.executor, "micro_batch", None) or images)
        sizes.append(size * rows)
    return max(sizes)
