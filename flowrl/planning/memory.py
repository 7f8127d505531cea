"""The memory of each phase of an iteration on one GPU, part by part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flowrl.assembly.text import ROWS, rows_first
from flowrl.backbones.families import layer_rules_of
from flowrl.backbones.loading import DTYPES
from flowrl.errors import UserError
from flowrl.planning.activations import (
    Forward,
    count_decode,
    nbytes,
    network_inputs,
    transformer_peak,
)
from flowrl.planning.model_specs import ModelSpec, build_network
from flowrl.quantization.backends import Backend, FP8Rowwise, NVFP4Emulated, NVFP4Native
from flowrl.quantization.layer_rules import choose_layers, matrices, matrix_shape
from flowrl.trees.memory import rollout_bytes
from flowrl.trees.plan import TreePlan, count, ode_plan

FP32 = 4  # bytes, of adapters, their gradients and each of AdamW's two moments

# cuBLAS's own buffer on Hopper and later, 8 MiB before (torch's notes on CUDA semantics).
CUBLAS = 32 * 2**20
# What the driver and loaded kernels take from the GPU before any tensor: an assumption, which
# nvidia-smi shows as 0.4 to 0.6 GiB; torch's own statistics do not have it.
CONTEXT = 600 * 2**20
# Share of what comes and goes that lies idle between tensors in the allocator: an assumption.
FRAGMENTS = 0.05
COMES_AND_GOES = ("activations", "latents", "text embeddings")
OVERHEAD = "CUDA overhead"

# Bytes beside the codes of a base in few bits.
NF4_GROUP, NF4_SCALE = 64, 4  # an fp32 maximum for 64 weights (2305.14314), not quantised itself
INT8_SCALE = {"bitsandbytes": 4, "torchao": 2}  # for an output, fp32 or in the weights' dtype

BACKENDS: dict[str, Backend] = {
    "nvfp4": NVFP4Native(),
    "nvfp4-emulated": NVFP4Emulated(),
    "fp8": FP8Rowwise(),
}
AUTO: tuple[Literal["fp8", "bf16"], ...] = ("fp8", "bf16")  # what precision auto may become


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCopy:
    """A copy of the transformer for rollouts, see `flowrl.quantization.rollout_model`."""

    format: Literal["nvfp4", "nvfp4-emulated", "fp8", "bf16", "auto"]  # bf16: not quantised
    merge: bool = True  # the adapter is summed into its weights, else beside them
    min_dim: int | None = None  # None for the network's own rules


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetup:
    """All that decides how much memory one process takes on one GPU."""

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"  # of the frozen weights and the arithmetic
    base_bits: Literal[4, 8] | None = None  # of the frozen weights, None for `dtype`
    base_library: Literal["bitsandbytes", "torchao"] = "bitsandbytes"
    height: int  # pixels
    width: int
    text_tokens: int  # of a text, at most
    rank: int  # of the LoRA
    targets: tuple[str, ...]
    adapters: int = 1  # the policy with its copies, such as the EMA and the old policy
    gradient_checkpointing: bool = False
    rollout_batch: int  # most rows at once, as are the next three
    micro_batch: int
    decode_batch: int
    evaluation_batch: int = 0
    evaluation_steps: int = 2  # of a held-out image, all of whose latents are held
    evaluation_height: int | None = None  # pixels, None for those of rollouts; so the next
    evaluation_width: int | None = None
    rollout_doubles: bool = False  # guidance doubles the rows, as in the next two
    training_doubles: bool = False
    evaluation_doubles: bool = False
    reference: bool = False  # another policy is asked while the gradient's graph is held
    plan: TreePlan  # of the rollout that is learned from
    prompts_per_gpu: int
    candidates: TreePlan | None = None  # of previews before it, of which no tree is kept
    copies: tuple[NetworkCopy, ...] = ()  # for rollouts
    training_copy: NetworkCopy | None = None  # low-bit weights that training multiplies by
    merged: bool = False  # the LoRA is merged into the policy's own network for rollouts
    text_encoders: Literal["keep", "offload", "free"] = "keep"
    vae: Literal["keep", "offload"] = "keep"
    vae_tiling: bool = False
    evaluation_encodes: bool = False  # the pipeline's own call, which wants its text encoders
    prompts: int = 0  # texts that the whole run encodes, at most
    host_reward_bytes: int = 0  # weights of reward models in the machine's memory
    reward_bytes: int = 0  # weights of reward models on this GPU
    offloaded_bytes: int = 0  # of those, which are on the CPU while nothing is asked of them
    parts: int = 1  # GPUs that share one copy of the transformer

    def __post_init__(self) -> None:
        if self.base_bits == 4 and self.base_library == "torchao":
            raise UserError(
                "memory.base_bits is 4 with torchao, on whose 4-bit weights PEFT puts no adapter: "
                "use bitsandbytes, or 8 bits"
            )
        counts = ("rank", "adapters", "rollout_batch", "micro_batch", "decode_batch")
        for name in (*counts, "prompts_per_gpu"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, expected 1 or more")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The peak of one phase in bytes, as the sum of its parts; docs/memory.md explains them."""

    phase: str  # encode, rollout, decode, rewards, training or evaluation
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Return the part of the total that torch.cuda.max_memory_allocated would show."""
        return self.total - self.parts[OVERHEAD]


def peak(footprints: list[Footprint]) -> Footprint:
    """Return the phase that needs most."""
    return max(footprints, key=lambda footprint: footprint.total)


def footprints(spec: ModelSpec, setup: MemorySetup) -> list[Footprint]:
    """Return the phases in order. Raises UserError for images that make no whole patches."""
    return _Planner(spec, setup).footprints()


def forward_of(spec: ModelSpec, setup: MemorySetup, rows: int) -> Forward:
    """Return a forward of some rows, twice as many as images with guidance."""
    return Forward(
        spec=spec, rows=rows, height=setup.height, width=setup.width, dtype=setup.torch_dtype,
        text_tokens=setup.text_tokens, rank=setup.rank, targets=setup.targets,
    )  # fmt: skip


class _Planner:
    def __init__(self, spec: ModelSpec, setup: MemorySetup):
        e = setup.evaluation_height, setup.evaluation_width
        for side in (setup.height, setup.width, *filter(None, e)):
            spec.latent_shape(side)  # raises
        self.spec, self.setup = spec, setup
        self.network = full_network(spec, setup.torch_dtype)
        self.adapter = adapter_parameters(self.network, setup.rank, setup.targets)
        self.encoders = sum(e.nbytes(setup.torch_dtype) for e in spec.text_encoders)
        self.autoencoder = spec.autoencoder_params * setup.torch_dtype.itemsize
        self.plans = [setup.plan, *([setup.candidates] if setup.candidates else [])]

    def footprints(self) -> list[Footprint]:
        setup = self.setup
        # Nodes of one step, and images, of a batch of trees: they are there together.
        frontier = max(count(p).peak_frontier // p.roots * self.trees(p) for p in self.plans)
        images = max(count(p).leaves // p.roots * self.trees(p) for p in self.plans)
        rows = min(setup.rollout_batch, frontier) * (1 + setup.rollout_doubles)
        # The latents and texts of the rollout that is learned from.
        held = {
            "latents": self.latents(setup.plan, setup.prompts_per_gpu),
            "text embeddings": self.text(setup.prompts_per_gpu + frontier, setup.rollout_doubles),
        }
        sampling = held | self.sampling(held["latents"])
        vae = {"autoencoder": self.autoencoder}
        parts: dict[str, dict[str, int]] = {
            "encode": self.encode(),
            "rollout": sampling | {"activations": transformer_peak(self.forward(rows), "sample")},
            "decode": sampling | vae | {"activations": self.decode(images)},
            "rewards": held | {"reward models": setup.reward_bytes},
            "training": held | self.training(),
        }
        if setup.evaluation_batch:
            rewards = {"reward models": setup.reward_bytes}
            parts["evaluation"] = vae | rewards | self.at_evaluation().evaluation()
        resident, found = self.resident(), []
        for phase, own in parts.items():
            apart = phase == "encode" and setup.text_encoders != "keep"
            whole = own if apart else resident | own
            idle = FRAGMENTS * sum(whole.get(name, 0) for name in COMES_AND_GOES)
            whole[OVERHEAD] = CONTEXT + int(idle)
            found.append(Footprint(phase=phase, parts=whole))
        return found

    def resident(self) -> dict[str, int]:
        """Return what is there in every phase."""
        setup, network = self.setup, self.network
        copies = sum(copy_bytes(network, copy, setup) for copy in setup.copies)
        if setup.training_copy is not None:
            copies += sum(packed_layers(network, setup.training_copy).values())
        return {
            "transformer": sharded_bytes(network, setup),
            "text encoders": self.encoders if setup.text_encoders == "keep" else 0,
            "autoencoder": self.autoencoder if setup.vae == "keep" else 0,
            "LoRA adapters": self.adapter * FP32 * setup.adapters,
            "optimiser": 2 * self.adapter * FP32,
            "network copies": copies,
            "reward models": setup.reward_bytes - setup.offloaded_bytes,
            "matmul buffers": CUBLAS + widest_bytes(network, setup),
        }

    def encode(self) -> dict[str, int]:
        """Unless the encoders stay, all texts are encoded before anything else is there.

        By one encoder at a time then, where they do not fit together.
        """
        setup, dtype = self.setup, self.setup.torch_dtype
        weights, rows = self.encoders, rows_first(setup.text_tokens)
        if setup.text_encoders == "keep":
            rows = min(ROWS, max(setup.prompts_per_gpu, setup.evaluation_batch))
        else:
            weights = max((e.nbytes(dtype) for e in self.spec.text_encoders), default=0)
        widest = max((e.token_width for e in self.spec.text_encoders), default=0)
        return {
            "text encoders": weights,
            # Without gradients nothing of earlier layers is kept: one layer's states, at most.
            "activations": rows * setup.text_tokens * dtype.itemsize * widest,
            "reward models": setup.reward_bytes - setup.offloaded_bytes,
            "matmul buffers": CUBLAS,
        }

    def sampling(self, latents: int) -> dict[str, int]:
        """A batch of candidates' trees is held at once, before those that are learned from."""
        setup, plan = self.setup, self.setup.candidates
        if plan is not None:
            latents = max(latents, self.latents(plan, 1) * self.trees(plan) // plan.roots)
        merged = adapted_bytes(self.network, setup) if setup.merged else 0
        return {"latents": latents, "merged weights": merged}

    def training(self) -> dict[str, int]:
        """Backward, or the step after it, when gradients of several GPUs are joined and summed."""
        setup = self.setup
        gradients = self.adapter * FP32
        backward = transformer_peak(
            self.forward(setup.micro_batch * (1 + setup.training_doubles)),
            "train_with_reference" if setup.reference else "train",
            checkpointing=setup.gradient_checkpointing,
        )
        return {
            "LoRA adapters": self.adapter * FP32 * setup.adapters + gradients,
            "activations": max(backward, 2 * gradients),
        }

    def at_evaluation(self) -> "_Planner":
        """Return the planner of the images of evaluation, which may have another size."""
        s = self.setup
        if s.evaluation_height is s.evaluation_width is None:
            return self
        height, width = s.evaluation_height or s.height, s.evaluation_width or s.width
        return _Planner(self.spec, replace(s, height=height, width=width))

    def evaluation(self) -> dict[str, int]:
        """A batch of held-out images, with the latents of all their steps."""
        setup, rows = self.setup, self.setup.evaluation_batch
        forward = self.forward(rows * (1 + setup.evaluation_doubles))
        return {
            "activations": max(transformer_peak(forward, "sample"), self.decode(rows)),
            "latents": self.latents(ode_plan(setup.evaluation_steps), rows),
            "text embeddings": self.text(rows, setup.evaluation_doubles),
        } | ({"text encoders": self.encoders} if setup.evaluation_encodes else {})

    def forward(self, rows: int) -> Forward:
        return forward_of(self.spec, self.setup, rows)

    def decode(self, images: int) -> int:
        s = self.setup
        rows = min(s.decode_batch, images)
        return count_decode(
            self.spec, rows, s.height, s.width, s.torch_dtype, tiling=s.vae_tiling
        ).peak

    def latents(self, plan: TreePlan, prompts: int) -> int:
        spec, setup = self.spec, self.setup
        latent = spec.channels * (setup.height // spec.factor) * (setup.width // spec.factor)
        return rollout_bytes(plan, prompts, latent, setup.torch_dtype.itemsize)

    def text(self, rows: int, doubles: bool) -> int:
        names = list(network_inputs(self.forward(1)).items())[1:]  # without the latents
        tensors = [t for _, value in names for t in tree_leaves(value) if isinstance(t, Tensor)]
        return rows * nbytes([t for t in tensors if t.ndim > 1]) * (1 + doubles)

    def trees(self, plan: TreePlan) -> int:
        """Return the trees of a batch: as many as rows in a forward."""
        return min(self.setup.rollout_batch, plan.roots * self.setup.prompts_per_gpu)


# --- bytes of weights ---------------------------------------------------------------------------


@lru_cache(maxsize=8)
def full_network(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """Build the transformer with all blocks on the meta device, without an adapter."""
    return build_network(spec.transformer, spec.config, dtype)


def adapter_parameters(network: nn.Module, rank: int, targets: tuple[str, ...]) -> int:
    """Return the parameters of a LoRA: rank * (in + out) of every adapted layer."""
    found = 0
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and is_adapted(name, targets):
            found += rank * (layer.weight.shape[0] + layer.weight[0].numel())
    return found


def is_adapted(name: str, targets: tuple[str, ...]) -> bool:
    """Apply PEFT's rule for lists: the name itself is a target, or its last parts are."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def transformer_bytes(network: nn.Module, setup: MemorySetup) -> int:
    """Return the frozen weights and buffers, linear layers in `base_bits`."""
    whole = nbytes([*network.parameters(), *network.buffers()])
    if setup.base_bits is None:
        return whole
    for layer in linear_layers(network):
        rows, columns = layer.weight.shape
        few = few_bits_bytes(rows, columns, setup.base_bits, setup.base_library)
        whole += few - rows * columns * setup.torch_dtype.itemsize
    return whole


def sharded_bytes(network: nn.Module, setup: MemorySetup) -> int:
    """Return a GPU's part of the weights, with what is gathered while a block computes.

    That is what is no block, such as embeddings, and the largest block twice: while one computes,
    the next is gathered.
    """
    whole = transformer_bytes(network, setup)
    if setup.parts == 1:
        return whole
    blocks = [
        nbytes([*block.parameters(), *block.buffers()])
        for child in network.children()
        if isinstance(child, nn.ModuleList)
        for block in child
    ]
    return -(-whole // setup.parts) + whole - sum(blocks) + 2 * max(blocks, default=0)


def host_bytes(spec: ModelSpec, setup: MemorySetup, processes: int) -> dict[str, int]:
    """Return what the processes of a machine hold in its own memory at most, by what it is.

    Each reads a pipeline before it goes to its GPU, its transformer after the texts are encoded; of
    a transformer in parts one process alone.
    """
    planner = _Planner(spec, setup)
    network = nbytes([*planner.network.parameters(), *planner.network.buffers()])
    read = network if setup.parts > 1 else processes * network
    beside = planner.autoencoder + (planner.encoders if setup.text_encoders != "free" else 0)
    first = planner.autoencoder + planner.encoders
    doubles = setup.rollout_doubles or setup.evaluation_doubles
    return {
        "loading": max(processes * first, read + processes * beside),
        "encoded prompts": processes * planner.text(setup.prompts, doubles),
        "reward models": processes * setup.host_reward_bytes,
    }


def few_bits_bytes(rows: int, columns: int, bits: int, library: str) -> int:
    """Return the bytes of a weight (rows, columns) with its scales, in a library's format."""
    codes = rows * columns * bits // 8
    if bits == 8:
        return codes + rows * INT8_SCALE[library]
    return codes + -(-rows * columns // NF4_GROUP) * NF4_SCALE


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


def widest_bytes(network: nn.Module, setup: MemorySetup) -> int:
    """Return the largest layer in `dtype`: few bits are dequantised layer by layer to multiply."""
    if setup.base_bits is None and setup.training_copy is None:
        return 0
    largest = max(layer.weight.numel() for layer in linear_layers(network))
    # Training in few bits makes its straight-through weight in fp32 and casts it.
    more = 0 if setup.training_copy is None else FP32
    return largest * (setup.torch_dtype.itemsize + more)


def copy_bytes(network: nn.Module, copy: NetworkCopy, setup: MemorySetup) -> int:
    """Return what a copy holds beside the policy's own tensors."""
    if copy.format == "auto":  # the GPU decides: the larger
        return max(copy_bytes(network, replace(copy, format=f), setup) for f in AUTO)
    packed = packed_layers(network, copy)
    found = sum(packed.values())
    for name, layer in matrices(network):
        if is_adapted(name, setup.targets):
            rows, columns = matrix_shape(layer)
            if not copy.merge:
                found += setup.rank * (rows + columns) * FP32
            elif name not in packed:
                found += rows * columns * setup.torch_dtype.itemsize
    return found


def packed_layers(network: nn.Module, copy: NetworkCopy) -> dict[str, int]:
    """Return the bytes of each quantised layer, as its backend packs a weight of that shape."""
    if copy.format == "bf16":
        return {}
    choices = choose_layers(network, layer_rules_of(network), copy.format, min_dim=copy.min_dim)
    backend, chosen = BACKENDS[copy.format], [c for c in choices if c.format]
    by_shape = {
        shape: nbytes(backend.pack(torch.empty(shape, dtype=torch.float32, device="meta")).values())
        for shape in {c.shape for c in chosen}
    }
    return {c.name: by_shape[c.shape] for c in chosen}


def adapted_bytes(network: nn.Module, setup: MemorySetup) -> int:
    """Return the adapted layers' weights once more: merged ones lie beside the frozen ones."""
    return sum(
        layer.weight.numel() * setup.torch_dtype.itemsize
        for name, layer in matrices(network)
        if is_adapted(name, setup.targets)
    )
