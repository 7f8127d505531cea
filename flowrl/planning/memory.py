"""The memory of each phase of an iteration on one GPU, part by part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from flowrl.errors import UserError
from flowrl.planning.activations import (
    Module,
    Shapes,
    adapter_parameters,
    as_module,
    build,
    decode_peak,
    encode_peak,
    ends_in,
    forward_peak,
    nbytes,
    on_meta,
    shapes_of,
    training_peak,
)
from flowrl.planning.model_specs import Size
from flowrl.quantization.backends import Backend, FP8Rowwise, NVFP4Emulated, NVFP4Native
from flowrl.quantization.layer_rules import choose_layers, matrices, matrix_shape, rules_of
from flowrl.trees.memory import rollout_bytes
from flowrl.trees.plan import TreePlan, count, ode_plan

# --- What decides how much memory a run takes on one GPU, as plain numbers ---------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A second network for rollouts, `flowrl.quantization.rollout_model.Twin`.

    format: nvfp4, nvfp4-emulated or fp8; bf16 is not quantised, in the network's own dtype; auto
    is the larger of fp8 and bf16, as the GPU decides which of them it is.
    merge: the adapter is summed into its weights, else beside them. min_dim, keep: which layers
    stay exact; None for the network's rules.
    """

    format: Literal["nvfp4", "nvfp4-emulated", "fp8", "bf16", "auto"]
    merge: bool = True
    min_dim: int | None = None
    keep: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One process on one GPU: its options, and its share of a rollout.

    dtype: fp32, bf16 or fp16, of the frozen weights and the arithmetic. base_bits: 8, 4 or None
    for `dtype`; base_library: who keeps them. height, width: pixels. text_tokens: of the
    transformer's text, None for the size's own. rank, targets: of the LoRA.
    adapters: the policy with its copies, such as the EMA and the lagging policy.
    rollout_batch, micro_batch, decode_batch, evaluation_batch, encode_batch: most rows at once.
    evaluation_steps: of a held-out image, all of whose latents are held.
    rollout_doubles, training_doubles, evaluation_doubles: whether guidance doubles them.
    reference: the frozen network, or the lagging one, is asked while the gradient's graph is held.
    plan, prompts_per_gpu: the trees of one rollout. candidates: of a second, cheap rollout that
    comes first, of which no tree is kept, or None. copies: networks made for rollouts beside the
    policy's own. merged: the policy's own network is folded for rollouts, which holds adapted
    weights twice meanwhile.
    text_encoders, vae: what becomes of them between uses. reward_bytes: of rewards on this GPU.
    training_copy: the precision that frozen weights are multiplied in while training, beside the
    exact ones; None for none.
    """

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    base_bits: Literal[4, 8] | None = None
    base_library: Literal["bitsandbytes", "torchao"] = "bitsandbytes"
    height: int
    width: int
    text_tokens: int | None = None
    rank: int
    targets: tuple[str, ...]
    adapters: int = 1
    gradient_checkpointing: bool = False
    rollout_batch: int
    micro_batch: int
    decode_batch: int
    evaluation_batch: int = 0
    evaluation_steps: int = 2
    encode_batch: int = 64
    rollout_doubles: bool = False
    training_doubles: bool = False
    evaluation_doubles: bool = False
    reference: bool = False
    plan: TreePlan
    prompts_per_gpu: int
    candidates: TreePlan | None = None
    copies: tuple[Copy, ...] = ()
    training_copy: Copy | None = None
    merged: bool = False
    text_encoders: Literal["keep", "offload", "free"] = "keep"
    vae: Literal["keep", "offload"] = "keep"
    reward_bytes: int = 0

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


# --- Bytes of what lies in memory whatever is computed: weights, adapters, optimiser, copies ---

FP32 = 4
MOMENTS = 2  # of AdamW, each in the adapter's fp32

# Bytes beside the codes of a base in few bits.
NF4_GROUP, NF4_SCALE = 64, 4  # an fp32 maximum for 64 weights (2305.14314), not quantised itself
INT8_SCALE = {"bitsandbytes": 4, "torchao": 2}  # for an output, fp32 or in the weights' dtype

BACKENDS: dict[str, Backend] = {
    "nvfp4": NVFP4Native(),
    "nvfp4-emulated": NVFP4Emulated(),
    "fp8": FP8Rowwise(),
}

AUTO: tuple[Literal["fp8", "bf16"], ...] = ("fp8", "bf16")


@lru_cache(maxsize=8)
def full_network(module: Module, dtype: torch.dtype) -> nn.Module:
    """All blocks, on the meta device, without an adapter: to be looked at only."""
    return build(module, dtype)


def network_of(size: Size, setup: Setup) -> nn.Module:
    return full_network(as_module(size.transformer, size.config), setup.torch_dtype)


def transformer_bytes(network: nn.Module, setup: Setup) -> int:
    """The frozen weights and tables; with `base_bits` the linear layers' weights in few bits."""
    whole = nbytes([*network.parameters(), *network.buffers()])
    if setup.base_bits is None:
        return whole
    itemsize = setup.torch_dtype.itemsize
    for layer in linear_layers(network):
        rows, columns = layer.weight.shape
        few = few_bits_bytes(rows, columns, setup.base_bits, setup.base_library)
        whole += few - rows * columns * itemsize
    return whole


def few_bits_bytes(rows: int, columns: int, bits: int, library: str) -> int:
    """A weight (rows, columns) with its scales, in a library's format."""
    codes = rows * columns * bits // 8
    if bits == 8:
        return codes + rows * INT8_SCALE[library]
    return codes + -(-rows * columns // NF4_GROUP) * NF4_SCALE


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


def widest_bytes(network: nn.Module, setup: Setup) -> int:
    """Few bits are turned back layer by layer to be multiplied: the largest in the dtype."""
    if setup.base_bits is None and setup.training_copy is None:
        return 0
    largest = max(layer.weight.numel() for layer in linear_layers(network))
    # Training in few bits makes its straight-through weight in fp32 and casts it.
    more = 0 if setup.training_copy is None else FP32
    return largest * (setup.torch_dtype.itemsize + more)


def copy_bytes(network: nn.Module, made: Copy, setup: Setup) -> int:
    """What a twin holds beside the policy's own tensors, see `rollout_model.Twin`."""
    if made.format == "auto":
        either = (replace(made, format=format) for format in AUTO)
        return max(copy_bytes(network, one, setup) for one in either)
    packed = packed_layers(network, made)
    found = sum(packed.values())
    for name, layer in matrices(network):
        if ends_in(name, setup.targets):
            rows, columns = matrix_shape(layer)
            if not made.merge:
                found += setup.rank * (rows + columns) * FP32
            elif name not in packed:
                found += rows * columns * setup.torch_dtype.itemsize
    return found


def packed_layers(network: nn.Module, made: Copy) -> dict[str, int]:
    """Bytes of each layer that is packed, as its backend packs a weight of that shape."""
    if made.format == "bf16":
        return {}
    backend = BACKENDS[made.format]
    choices = choose_layers(
        network, rules_of(network), made.format, min_dim=made.min_dim, keep=made.keep
    )
    by_shape = {
        shape: nbytes(backend.pack(on_meta(*shape, dtype=torch.float32)).values())
        for shape in {c.shape for c in choices if c.format}
    }
    return {c.name: by_shape[c.shape] for c in choices if c.format}


def adapted_bytes(network: nn.Module, setup: Setup) -> int:
    """The weights below the adapter, once more in the dtype: folded ones lie beside the frozen."""
    return sum(
        layer.weight.numel() * setup.torch_dtype.itemsize
        for name, layer in matrices(network)
        if ends_in(name, setup.targets)
    )


# --- The memory of each phase of an iteration on one GPU, part by part -------------------------

PHASES = ("encode", "rollout", "decode", "rewards", "training", "evaluation")

# cuBLAS's own buffer on Hopper and later, 8 MiB before (torch's notes on CUDA semantics).
CUBLAS = 32 * 2**20
# What the driver and loaded kernels take from the GPU before any tensor: an assumption, which
# nvidia-smi shows as 0.4 to 0.6 GiB; torch's own statistics do not have it.
CONTEXT = 600 * 2**20
# Share of what comes and goes that lies idle between tensors in the allocator: an assumption.
FRAGMENTS = 0.05
MOVING = ("activations", "latents", "text")
UNSEEN = "context"  # the part that torch.cuda.max_memory_allocated does not have


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The peak of one phase in bytes, as the sum of what it holds then.

    phase: one of PHASES. parts: bytes by name, of "transformer", "text encoders", "autoencoder",
    "adapters", "optimiser", "copies", "folded", "activations", "latents", "text", "rewards",
    "workspace" and "context".
    """

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Of the total, what torch.cuda.max_memory_allocated would say."""
        return self.total - self.parts[UNSEEN]


def peak(found: list[Footprint]) -> Footprint:
    """The phase that needs most."""
    return max(found, key=lambda footprint: footprint.total)


def footprints(size: Size, setup: Setup) -> list[Footprint]:
    """The phases that the setup has, in their order. Raises UserError for sides that the network
    cannot patch."""
    return _Planner(size, setup).phases()


class _Planner:
    def __init__(self, size: Size, setup: Setup):
        self.size, self.setup = size, setup
        self.network: nn.Module = network_of(size, setup)
        self.adapter = adapter_parameters(self.network, setup.rank, setup.targets)
        itemsize = setup.torch_dtype.itemsize
        self.encoders = sum(e.nbytes(setup.torch_dtype) for e in size.text_encoders)
        self.autoencoder = size.autoencoder_params * itemsize
        self.copies = sum(copy_bytes(self.network, copy, setup) for copy in setup.copies)

    def phases(self) -> list[Footprint]:
        setup = self.setup
        moving = {
            "encode": self._encode(),
            "rollout": self._drawing() | {"activations": self._forward(self._rollout_rows())},
            "decode": self._drawing() | self._vae() | {"activations": self._decode(self._leaves())},
            "rewards": self._held(),
            "training": self._held() | self._training(),
        }
        if setup.evaluation_batch:
            moving["evaluation"] = self._vae() | self._evaluation()
        return [self._footprint(phase, moving[phase]) for phase in PHASES if phase in moving]

    def _footprint(self, phase: str, moving: Mapping[str, int]) -> Footprint:
        """What is there in every phase, and over it what a phase has."""
        parts = {**self._resident(), **moving}
        idle = FRAGMENTS * sum(parts.get(name, 0) for name in MOVING)
        parts[UNSEEN] = CONTEXT + int(idle)
        return Footprint(phase=phase, parts=parts)

    def _resident(self) -> dict[str, int]:
        setup = self.setup
        packed = setup.training_copy
        return {
            "transformer": transformer_bytes(self.network, setup),
            "text encoders": self.encoders if setup.text_encoders == "keep" else 0,
            "autoencoder": self.autoencoder if setup.vae == "keep" else 0,
            "adapters": self.adapter * FP32 * setup.adapters,
            "optimiser": self.adapter * FP32 * MOMENTS,
            "copies": self.copies
            + (sum(packed_layers(self.network, packed).values()) if packed else 0),
            "rewards": setup.reward_bytes,
            "workspace": CUBLAS + widest_bytes(self.network, setup),
        }

    # --- phases -----------------------------------------------------------------------------

    def _encode(self) -> dict[str, int]:
        setup = self.setup
        asked = max(setup.prompts_per_gpu, setup.evaluation_batch)
        rows = setup.encode_batch  # of all prompts, where they are encoded at first
        if setup.text_encoders != "free":
            rows = min(rows, asked)
        most = encode_peak(self.size, rows, setup.text_tokens, setup.torch_dtype)
        found = {"text encoders": self.encoders, "activations": most}
        # Texts are encoded before the first step then, and never again.
        return found | ({"optimiser": 0} if setup.text_encoders == "free" else {})

    def _drawing(self) -> dict[str, int]:
        """A batch of candidates' trees is held at once, and before those that are learned from."""
        setup = self.setup
        folded = adapted_bytes(self.network, setup) if setup.merged else 0
        held = self._held()
        if (plan := setup.candidates) is not None:
            batch = self._latents(plan, 1) * self._trees(plan) // plan.roots
            held["latents"] = max(held["latents"], batch)
        return held | {"folded": folded}

    def _held(self) -> dict[str, int]:
        """The latents and texts of the rollout that is learned from."""
        setup = self.setup
        return {
            "latents": self._latents(setup.plan, setup.prompts_per_gpu),
            "text": self._text(setup.prompts_per_gpu, setup.rollout_doubles)
            + self._text(self._frontier(), setup.rollout_doubles),
        }

    def _training(self) -> dict[str, int]:
        """Backward, or the step after it, when gradients of several GPUs are joined and summed."""
        setup = self.setup
        gradients = self.adapter * FP32
        rows = setup.micro_batch * (1 + setup.training_doubles)
        backward = training_peak(
            self._module(), self._shapes(rows), setup.torch_dtype, rank=setup.rank,
            targets=setup.targets, checkpointing=setup.gradient_checkpointing,
            reference=setup.reference,
        )  # fmt: skip
        return {
            "adapters": self.adapter * FP32 * setup.adapters + gradients,
            "activations": max(backward, 2 * gradients),
        }

    def _evaluation(self) -> dict[str, int]:
        """A batch of held-out images, with the latents of all their steps."""
        setup = self.setup
        rows = setup.evaluation_batch
        drawing = self._forward(rows * (1 + setup.evaluation_doubles))
        return {
            "activations": max(drawing, self._decode(rows)),
            "latents": self._latents(ode_plan(setup.evaluation_steps), rows),
            "text": self._text(rows, setup.evaluation_doubles),
        }

    def _vae(self) -> dict[str, int]:
        return {"autoencoder": self.autoencoder}

    # --- what comes and goes ------------------------------------------------------------------

    def _forward(self, rows: int) -> int:
        setup = self.setup
        return forward_peak(
            self._module(), self._shapes(rows), setup.torch_dtype,
            rank=setup.rank, targets=setup.targets,
        )  # fmt: skip

    def _decode(self, images: int) -> int:
        """Of so many that there are at once."""
        s = self._shapes(1)
        module = as_module(self.size.autoencoder, self.size.autoencoder_config)
        latents = (min(self.setup.decode_batch, images), s.channels, s.height, s.width)
        return decode_peak(module, latents, self.setup.torch_dtype)

    def _latents(self, plan: TreePlan, prompts: int) -> int:
        latent, itemsize = self._shapes(1).latent, self.setup.torch_dtype.itemsize
        return rollout_bytes(plan, prompts, latent, itemsize)

    def _text(self, rows: int, doubles: bool) -> int:
        s = self._shapes(rows)
        numbers = s.text_tokens * s.text_width + (s.pooled_width or 0)
        return rows * numbers * self.setup.torch_dtype.itemsize * (1 + doubles)

    def _frontier(self) -> int:
        """Latents that are drawn together: all nodes of a step, of a batch of trees."""
        return max(
            count(plan).peak_frontier // plan.roots * self._trees(plan) for plan in self._plans()
        )

    def _leaves(self) -> int:
        """Images that are there at once to be decoded: those of a batch of trees."""
        return max(count(plan).leaves // plan.roots * self._trees(plan) for plan in self._plans())

    def _plans(self) -> list[TreePlan]:
        candidates = self.setup.candidates
        return [self.setup.plan, *([] if candidates is None else [candidates])]

    def _trees(self, plan: TreePlan) -> int:
        """A batch of them: as many as rows in a forward."""
        return min(self.setup.rollout_batch, plan.roots * self.setup.prompts_per_gpu)

    def _rollout_rows(self) -> int:
        setup = self.setup
        return min(setup.rollout_batch, self._frontier()) * (1 + setup.rollout_doubles)

    def _module(self) -> Module:
        return as_module(self.size.transformer, self.size.config)

    def _shapes(self, rows: int) -> Shapes:
        setup = self.setup
        return shapes_of(self.size, rows, setup.height, setup.width, setup.text_tokens)
