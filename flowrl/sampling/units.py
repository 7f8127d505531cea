"""Units of work: a batch of trees that any worker samples and scores, with the same bits.

A unit holds everything that decides its answer, but for the recipe and the adapter's weights, of
which it holds the digest. So its own digest names the answer: the first one that comes is the
right one, wherever it was made. Units and answers travel as safetensors files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from torch import Tensor

from flowrl.prompts.records import PromptRecord
from flowrl.sampling.rollout import (
    RolloutGenerator,
    RolloutRequest,
    decode,
    sample_request,
    submit_images,
)
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardResult
from flowrl.trajectory import Conditioning, Tree
from flowrl.trees.plan import TreePlan
from flowrl.utils.digests import digest, notes_of

_PLAN = TypeAdapter(TreePlan)
_TREE = [f.name for f in fields(Tree) if f.type is Tensor]
_COND, _NAME = "cond.", "content"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Which generator of a recipe samples, and which rewards it asks."""

    precision: str | None = None  # of candidates; None: the network of images to learn from
    num_inference_steps: int
    rewards: tuple[str, ...]  # names


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """R trees that are sampled together."""

    request: RolloutRequest  # with their prompts alone
    plan: TreePlan
    cond: Conditioning  # of the request's prompts
    rows: int  # of each call of the network
    stage: Stage
    adapter: str  # digest of the weights that sample
    keep: bool = True  # trees and images are answered, not their scores alone

    def to_bytes(self) -> bytes:
        request = self.request
        tensors = {name: getattr(request, name) for name in ("prompt", "group", "root")}
        tensors |= {_COND + name: tensor for name, tensor in self.cond.tensors.items()}
        content = {
            "prompts": [asdict(prompt) for prompt in request.prompts],
            "seed": request.seed,
            "iteration": request.iteration,
            "same_noise": request.same_noise,
            "plan": _PLAN.dump_python(self.plan, mode="json"),
            "rows": self.rows,
            "stage": asdict(self.stage),
            "adapter": self.adapter,
            "keep": self.keep,
        }
        return _pack(tensors, content)

    @staticmethod
    def from_bytes(data: bytes) -> "Unit":
        tensors, content = _unpack(data)
        prompts = [
            PromptRecord(**prompt | {"paraphrases": tuple(prompt["paraphrases"])})
            for prompt in content["prompts"]
        ]
        stage = content["stage"]
        request = RolloutRequest(
            prompts=prompts,
            **{name: tensors[name] for name in ("prompt", "group", "root")},
            **{name: content[name] for name in ("seed", "iteration", "same_noise")},
        )
        cond = {n.removeprefix(_COND): t for n, t in tensors.items() if n.startswith(_COND)}
        return Unit(
            request=request,
            plan=_PLAN.validate_python(content["plan"]),
            cond=Conditioning(tensors=cond),
            rows=content["rows"],
            stage=Stage(**stage | {"rewards": tuple(stage["rewards"])}),
            adapter=content["adapter"],
            keep=content["keep"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAnswer:
    """What a worker made of a unit."""

    key: str  # digest of the unit
    digest: str  # of the latents
    seconds: float
    result: RewardResult  # of the stage's rewards
    tree: Tree | None  # on the CPU; `prompt` counts in the unit's prompts
    levels: Tensor | None  # (R * leaves, 3, H, W) uint8, the images as rewards see them

    def to_bytes(self) -> bytes:
        result = self.result
        tensors = {f"result.{n}": getattr(result, n) for n in ("scores", "valid", "applicable")}
        content: dict[str, Any] = {
            "key": self.key,
            "digest": self.digest,
            "seconds": self.seconds,
            "names": result.names,
            "errors": result.errors,
            "reward_seconds": result.seconds,
        }
        if self.tree is not None and self.levels is not None:
            tensors |= {f"tree.{name}": getattr(self.tree, name) for name in _TREE}
            tensors["levels"] = self.levels
            content |= {"forwards": self.tree.forwards, "rows": self.tree.rows}
        return _pack(tensors, content)

    @staticmethod
    def from_bytes(data: bytes) -> "UnitAnswer":
        tensors, content = _unpack(data)
        result = RewardResult(
            **{n: tensors[f"result.{n}"] for n in ("scores", "valid", "applicable")},
            names=tuple(content["names"]),
            errors=content["errors"],
            seconds=content["reward_seconds"],
        )
        tree = None
        if "forwards" in content:
            own = {name: tensors[f"tree.{name}"] for name in _TREE}
            tree = Tree(**own, forwards=content["forwards"], rows=content["rows"])
        return UnitAnswer(
            key=content["key"],
            digest=content["digest"],
            seconds=content["seconds"],
            result=result,
            tree=tree,
            levels=tensors.get("levels"),
        )


def sample_unit(generator: RolloutGenerator, unit: Unit) -> tuple[Tree, Tensor, Scoring]:
    """Sample a unit as its generator samples a batch; return trees, images and asked rewards."""
    scoring = Scoring(specs=generator.specs, phase="rollout")
    cond = unit.cond.to(generator.backbone.device)
    with torch.no_grad(), generator.network() as velocity:
        tree = sample_request(
            generator.backbone, velocity, cond, unit.request, unit.plan, generator.schedule(),
            unit.rows,
        )  # fmt: skip
        images = decode(generator.backbone, tree.leaves(), generator.decode_batch)
        return tree, submit_images(scoring, images, unit.request, len(tree.leaf)), scoring


def tree_digest(tree: Tree) -> str:
    """Return a digest of a tree's latents and of the means that they were drawn around."""
    return digest(save({"x": _plain(tree.x), "mean_old": _plain(tree.mean_old)}))


def pack_weights(tensors: Sequence[Tensor]) -> bytes:
    """Return an adapter's weights as a file."""
    return save({f"{i:06d}": _plain(tensor) for i, tensor in enumerate(tensors)})


def unpack_weights(data: bytes) -> list[Tensor]:
    found = load(data)
    return [found[name] for name in sorted(found)]


def with_prompts(tree: Tree, prompt: Tensor, device: torch.device) -> Tree:
    """Return an answered tree on the device, its prompts counted as in the whole request."""
    moved = {name: getattr(tree, name).to(device) for name in _TREE}
    return replace(tree, **moved | {"prompt": prompt.to(device)})


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _pack(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True)
    return save({n: _plain(t).clone() for n, t in tensors.items()}, metadata={_NAME: text})


def _unpack(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load(data), json.loads(notes_of(data)[_NAME])
