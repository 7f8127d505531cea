"""The memory of each phase of an iteration on one GPU, part by part, and of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flowrl.assembly.text import ROWS, rows_first
from flowrl.assembly.work_split import WorkSplit
from flowrl.backbones.families import family_of, layer_rules_of, lora_targets
from flowrl.backbones.loading import DTYPES
from flowrl.backbones.text_cache import CAPACITY
from flowrl.config import Config
from flowrl.config.rollout import Precision, ReferenceOptions
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.planning.activations import (
    Activations,
    Forward,
    count_decode,
    count_forward,
    nbytes,
    network_inputs,
    transformer_peak,
)
from flowrl.planning.model_specs import ModelSpec, build_network
from flowrl.planning.rewards import rewards_bytes, scoring_bytes
from flowrl.planning.work import IterationKind, doubles
from flowrl.prompts.sources import HUB, read_rows
from flowrl.quantization.backends import BACKENDS
from flowrl.quantization.layer_rules import choose_layers, matrices, matrix_shape
from flowrl.trees.plan import TreePlan, count, level_widths, ode_plan

FP32 = 4  # bytes, of adapters, their gradients and each of AdamW's two moments

# cuBLAS's own buffer on Hopper and later, 8 MiB before (torch's notes on CUDA semantics).
CUBLAS = 32 * 2**20
# What the driver and loaded kernels take from the GPU before any tensor: an assumption, which
# nvidia-smi shows as 0.4 to 0.6 GiB; torch's own statistics do not have it.
CONTEXT = 600 * 2**20
# Share of what comes and goes that lies idle between tensors in the allocator: an assumption.
FRAGMENTS = 0.05
# Numbers of a token in a text encoder's layer, states and feed-forward: those of Qwen2.5-VL 7B, the
# widest of the published ones.
TOKEN_WIDTH = 8 * 3584 + 2 * 18944
STEP_COPIES = 5  # of the frontier in fp32 within a step: latent, velocity, mean, noise, result
COMES_AND_GOES = ("activations", "latents", "text embeddings")
OVERHEAD = "CUDA overhead"

# Bytes beside the codes of a base in few bits.
NF4_GROUP, NF4_SCALE = 64, 4  # an fp32 maximum for 64 weights (2305.14314), not quantised itself
INT8_SCALE = 2  # for an output, in the weights' dtype

AUTO = "fp8"  # what precision auto is counted as, where the card has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The peak of one phase in bytes, as the sum of its parts; docs/memory.md explains them."""

    phase: str  # encode, rollout, decode, rewards, training or evaluation
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def peak(footprints: list[Footprint]) -> Footprint:
    """Return the phase that needs most."""
    return max(footprints, key=lambda footprint: footprint.total)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of the busiest GPU in iterations of one kind.

    `footprints` has the table of parts by phase; a method below it computes each part.
    """

    config: Config
    spec: ModelSpec
    needs: Needs
    split: WorkSplit
    kind: IterationKind

    def footprints(self) -> list[Footprint]:
        """Return the phases in order. Raises UserError for images that make no whole patches."""
        config, spec = self.config, self.spec
        for side in (self.height, self.width):
            spec.latent_shape(side)  # raises
        # Nodes of one step, and images, of a batch of trees: they are there together.
        plans = [plan for plan in (self.kind.plan, self.kind.candidates) if plan is not None]
        frontier = max(count(p).peak_frontier // p.roots * self.trees(p) for p in plans)
        images = max(count(p).leaves // p.roots * self.trees(p) for p in plans)
        guided = doubles(config, config.rollout.guidance_scale)
        rows = min(config.rollout.batch_size, frontier) * (1 + guided)
        # The latents and texts of the rollout that is learned from.
        held = {
            "latents": self.latents(self.kind.plan, self.prompts),
            "text embeddings": self.text(self.prompts + frontier, guided),
        }
        sampling = held | self.sampling(held["latents"])
        parts: dict[str, dict[str, int]] = {
            "encode": self.encode(),
            "rollout": sampling | {"activations": transformer_peak(self.forward(rows), "sample")},
            "decode": sampling | self.vae | {"activations": self.decode(images).peak},
            "rewards": held | {"activations": scoring_bytes(config.rewards, images)},
            "training": held | self.training(),
        }
        if self.evaluation_batch:
            parts["evaluation"] = self.vae | self.evaluation()
        resident, footprints = self.resident(), []
        for phase, extra in parts.items():
            alone = phase == "encode" and config.memory.text_encoders != "keep"
            whole = extra if alone else resident | extra
            idle = FRAGMENTS * sum(whole.get(name, 0) for name in COMES_AND_GOES)
            whole[OVERHEAD] = CONTEXT + int(idle)
            footprints.append(Footprint(phase=phase, parts=whole))
        return footprints

    # --- parts that are there in every phase, and those of one phase ----------------------------

    def resident(self) -> dict[str, int]:
        """Return what is there in every phase."""
        memory, rewards = self.config.memory, self.config.rewards
        copies = self.candidates_bytes() + sum(
            self.packed_layers(self.config.pipeline.precision).values()
        )
        return {
            "transformer": self.sharded_bytes(),
            "text encoders": self.encoders if memory.text_encoders == "keep" else 0,
            "autoencoder": self.vae["autoencoder"] if memory.vae == "keep" else 0,
            "LoRA adapters": self.adapter * FP32 * self.adapters,
            "optimiser": 2 * self.adapter * FP32,
            "network copies": copies,
            "reward models": rewards_bytes(rewards),
            "matmul buffers": CUBLAS + self.widest_bytes(),
        }

    def encode(self) -> dict[str, int]:
        """Unless the encoders stay, all texts are encoded before anything else is there.

        By one encoder at a time then, where they do not fit together.
        """
        rewards, tokens = self.config.rewards, self.text_tokens
        weights, rows = self.encoders, rows_first(tokens)
        if self.config.memory.text_encoders == "keep":
            rows = min(ROWS, max(self.prompts, self.evaluation_batch))
        else:
            weights = max(self.spec.text_encoders, default=0) * self.dtype.itemsize
        return {
            "text encoders": weights,
            # Without gradients nothing of earlier layers is kept: one layer's states, at most.
            "activations": rows * tokens * self.dtype.itemsize * TOKEN_WIDTH,
            "reward models": rewards_bytes(rewards),
            "matmul buffers": CUBLAS,
        }

    def sampling(self, latents: int) -> dict[str, int]:
        """A batch of candidates' trees is held at once, before those that are learned from.

        Where selected ones go on, all of them are, until they were selected; then these are.
        """
        plan = self.kind.candidates
        if plan is not None:
            trees = self.trees(plan) if plan.continuation is None else plan.roots * self.prompts
            candidates = self.latents(plan, 1) * trees // plan.roots
            if plan.continuation is not None:
                latents += candidates * plan.continuation.roots // plan.roots
            latents = max(latents, candidates)
        return {"latents": latents, "merged weights": self.adapted_bytes({}) if self.merged else 0}

    def training(self) -> dict[str, int]:
        """Backward, or the step after it, when gradients of several GPUs are joined and summed."""
        gradients = self.adapter * FP32
        load = self.split.load
        rows = max(max(share.rows) for share in self.split.shares) * load.row_forwards
        rows = min(self.config.optim.micro_batch, max(rows, 1))
        compared = self.needs.reference or self.needs.old or self.needs.teachers
        guided = doubles(self.config, self.config.rollout.learning_guidance_scale)
        backward = transformer_peak(
            self.forward(rows * (1 + guided)),
            "train_with_reference" if compared else "train",
            checkpointing=self.config.memory.gradient_checkpointing,
        )
        return {
            "LoRA adapters": self.adapter * FP32 * self.adapters + gradients,
            "activations": max(backward, 2 * gradients),
        }

    def evaluation(self) -> dict[str, int]:
        """A batch of held-out images, with the latents of all their steps."""
        e, rows = self.config.evaluation, self.evaluation_batch
        guided = doubles(self.config, e.guidance_scale)
        sampled = transformer_peak(self.forward(rows * (1 + guided)), "sample")
        scored = scoring_bytes(self.config.rewards, rows)
        encodes = e.as_deployed and e.prompts is not None  # by the pipeline's own call
        return {
            "activations": max(sampled, self.decode(rows).peak, scored),
            "latents": self.latents(ode_plan(max(e.step_counts)), rows),
            "text embeddings": self.text(rows, guided),
        } | ({"text encoders": self.encoders} if encodes else {})

    # --- sizes of batches -----------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of the frozen weights and the arithmetic."""
        return DTYPES[self.config.pipeline.dtype]

    @property
    def height(self) -> int:
        return self.config.pipeline.height or self.spec.native_pixels

    @property
    def width(self) -> int:
        return self.config.pipeline.width or self.spec.native_pixels

    @property
    def text_tokens(self) -> int:
        return self.config.pipeline.max_sequence_length

    @property
    def prompts(self) -> int:
        """Return the prompts of the busiest GPU."""
        share = max(self.split.shares, key=lambda share: share.trees)
        return max(1, -(-share.trees // self.split.load.roots))

    @property
    def evaluation_batch(self) -> int:
        e = self.config.evaluation
        share = -(-e.num_images // self.split.gpus) if self.config.held_out else 0
        return min(e.batch_size, share)

    def trees(self, plan: TreePlan) -> int:
        """Return the trees of a batch: as many as rows in a forward."""
        return min(self.config.rollout.batch_size, plan.roots * self.prompts)

    def forward(self, rows: int) -> Forward:
        """Return a forward of some rows, twice as many as images with guidance."""
        return Forward(
            spec=self.spec, rows=rows, height=self.height, width=self.width, dtype=self.dtype,
            text_tokens=self.text_tokens, rank=self.config.lora.rank, targets=self.targets,
        )  # fmt: skip

    def decode(self, images: int) -> Activations:
        """Count a call of the decoder, for at most `images` latents."""
        rows = min(self.config.pipeline.decode_batch, images)
        tiling = self.config.memory.vae_tiling
        return count_decode(self.spec, rows, self.height, self.width, self.dtype, tiling=tiling)

    def forward_operations(self) -> float:
        """Return the multiplications and additions of one image's forward, with the adapter's."""
        rows = self.config.rollout.batch_size
        rows *= 1 + doubles(self.config, self.config.rollout.guidance_scale)
        return count_forward(self.forward(rows), gradients=False).operations / rows

    def decode_operations(self) -> float:
        """Return the multiplications and additions of decoding one latent."""
        rows = self.config.pipeline.decode_batch
        return self.decode(rows).operations / rows

    def latents(self, plan: TreePlan, prompts: int) -> int:
        """Return the bytes of the latents of `prompts` prompts' trees."""
        factor = self.spec.factor
        latent = self.spec.channels * (self.height // factor) * (self.width // factor)
        return rollout_bytes(plan, prompts, latent, self.dtype.itemsize)

    def text(self, rows: int, guided: bool) -> int:
        """Return the bytes of the embeddings of `rows` prompts."""
        names = list(network_inputs(self.forward(1)).items())[1:]  # without the latents
        tensors = [t for _, value in names for t in tree_leaves(value) if isinstance(t, Tensor)]
        return rows * nbytes([t for t in tensors if t.ndim > 1]) * (1 + guided)

    # --- weights and their copies ---------------------------------------------------------------

    @cached_property
    def network(self) -> nn.Module:
        return full_network(self.spec, self.dtype)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Return the layers to adapt. Raises UserError where none are named."""
        lora, family = self.config.lora, family_of(self.spec.pipeline)
        return tuple(lora.targets or lora_targets(family, self.network))

    @cached_property
    def adapter(self) -> int:
        layers = [
            layer
            for name, layer in self.network.named_modules()
            if isinstance(layer, nn.Linear | nn.Conv2d) and is_adapted(name, self.targets)
        ]
        sides = sum(layer.weight.shape[0] + layer.weight[0].numel() for layer in layers)
        return self.config.lora.rank * sides

    @property
    def adapters(self) -> int:
        """Return the number of adapters: the policy, its copies and teachers."""
        moving = self.config.reference != ReferenceOptions()
        copies = (self.config.ema.decay is not None) + (self.needs.old is not None) + moving
        return 1 + copies + sum(lora is not None for lora in self.needs.teachers)

    @property
    def encoders(self) -> int:
        return sum(self.spec.text_encoders) * self.dtype.itemsize

    @property
    def vae(self) -> dict[str, int]:
        return {"autoencoder": self.spec.autoencoder_params * self.dtype.itemsize}

    @property
    def merged(self) -> bool:
        """Return whether the LoRA is merged into the policy's own network for rollouts."""
        p, merge = self.config.pipeline, self.config.rollout.merge_lora
        return p.dtype == "fp32" and self.mergeable if merge == "auto" else merge

    @property
    def mergeable(self) -> bool:
        """Return whether a LoRA can be merged into the frozen weights: whole and unquantised."""
        whole = self.config.pipeline.precision is None and self.config.runtime.shard is None
        return whole and self.config.memory.base_bits is None

    def transformer_bytes(self) -> int:
        """Return the frozen weights and buffers, linear layers in `memory.base_bits`."""
        whole = nbytes([*self.network.parameters(), *self.network.buffers()])
        memory = self.config.memory
        if memory.base_bits is None:
            return whole
        for layer in linear_layers(self.network):
            rows, columns = layer.weight.shape
            few = few_bits_bytes(rows, columns, memory.base_bits)
            whole += few - rows * columns * self.dtype.itemsize
        return whole

    def sharded_bytes(self) -> int:
        """Return a GPU's part of the weights, with what is gathered while a block computes.

        That is what is no block, such as embeddings, and the largest block twice: while one
        computes, the next is gathered.
        """
        whole = self.transformer_bytes()
        if self.config.runtime.shard is None or self.split.gpus == 1:
            return whole
        blocks = [
            nbytes([*block.parameters(), *block.buffers()])
            for child in self.network.children()
            if isinstance(child, nn.ModuleList)
            for block in child
        ]
        gathered = whole - sum(blocks) + 2 * max(blocks, default=0)
        return -(-whole // self.split.gpus) + gathered

    def widest_bytes(self) -> int:
        """Return the largest layer in `dtype`: few bits are dequantised layer by layer."""
        trained = self.config.pipeline.precision not in (None, "bf16")
        if self.config.memory.base_bits is None and not trained:
            return 0
        largest = max(layer.weight.numel() for layer in linear_layers(self.network))
        # Training in few bits makes its straight-through weight in fp32 and casts it.
        return largest * (self.dtype.itemsize + (FP32 if trained else 0))

    def candidates_bytes(self) -> int:
        """Return what the network of candidates holds beside the policy's own tensors."""
        e, in_place = self.config.rollout.explore, self.config.rollout.prunes_in_place
        if e is None or in_place or (e.precision == "bf16" and self.mergeable == self.merged):
            return 0
        packed = self.packed_layers(e.precision)
        return sum(packed.values()) + self.adapted_bytes(packed)

    def adapted_bytes(self, packed: Mapping[str, int]) -> int:
        """Return the bytes of the adapted layers' weights, merged, that are not packed."""
        shapes = (
            matrix_shape(layer)
            for name, layer in matrices(self.network)
            if is_adapted(name, self.targets) and name not in packed
        )
        return sum(rows * columns for rows, columns in shapes) * self.dtype.itemsize

    def packed_layers(self, precision: Precision | None) -> dict[str, int]:
        """Return the bytes of each quantised layer, as its backend packs a weight of that shape."""
        if precision in (None, "bf16"):
            return {}
        format = AUTO if precision == "auto" else precision
        rules, least = layer_rules_of(self.network), self.config.pipeline.min_dim
        choices = choose_layers(self.network, rules, min_dim=least)
        backend, chosen = BACKENDS[format], [c for c in choices if c.quantised]
        by_shape = {
            shape: nbytes(backend.pack(torch.empty(shape, device="meta")).values())
            for shape in {c.shape for c in chosen}
        }
        return {c.name: by_shape[c.shape] for c in chosen}

    # --- the machine's memory -------------------------------------------------------------------

    def host_bytes(self) -> dict[str, int]:
        """Return what the processes of a machine hold in its own memory at most, by what it is.

        Each reads a pipeline before it goes to its GPU, its transformer after the texts are
        encoded; of a transformer in parts one process alone.
        """
        config, processes = self.config, self.split.gpus
        network = nbytes([*self.network.parameters(), *self.network.buffers()])
        read = network if config.runtime.shard is not None else processes * network
        beside, first = self.vae["autoencoder"], self.vae["autoencoder"] + self.encoders
        if config.memory.text_encoders != "free":
            beside = first
        guided = any(
            doubles(config, section.guidance_scale)
            for section in (config.rollout, config.evaluation)
        )
        return {
            "loading": max(processes * first, read + processes * beside),
            "encoded prompts": processes * self.text(encoded_prompts(config), guided),
            "reward models": processes * rewards_bytes(config.rewards, cpu=True),
        }


def rollout_bytes(plan: TreePlan, prompts: int, latent: int, itemsize: int) -> int:
    """Return the peak bytes of the trees of `prompts` prompts.

    Nodes take `itemsize` bytes per element twice: stored, and concatenated. Trained edges take
    their fp32 mean twice, stored and batched for training, and their batched parents and children.
    A step computes the whole frontier in fp32.
    latent: elements of one latent.
    """
    c = count(plan).times(prompts)
    stored = 2 * c.nodes * itemsize
    if plan.continuation is not None:  # the velocities of the nodes where it stops
        stored += level_widths(plan)[-1] * plan.roots * prompts * itemsize
    learned = c.trained_edges * (8 + itemsize) + c.train_forwards * itemsize
    return latent * (stored + learned + STEP_COPIES * c.peak_frontier * FP32)


def encoded_prompts(config: Config) -> int:
    """Return how many encoded prompts a process holds, at most: those of the files if they are
    there, and no more than the run reaches."""
    e, m = config.evaluation, config.memory
    evaluated = 0 if e.prompts is None else e.num_images
    trained = config.run.iterations * config.rollout.prompts_per_iteration
    prompts = min(trained, prompt_count(config.prompts.train) or trained) + evaluated
    bounded = m.text_encoders == "keep" or m.prompt_cache is not None
    return min(prompts, CAPACITY) if bounded else prompts


@lru_cache(maxsize=8)
def prompt_count(source: str) -> int | None:
    """Return the different prompts of a source on this machine; None where there is none yet."""
    if source.startswith(HUB):
        return None
    try:
        return len({row["prompt"] for row in read_rows(source)})
    except UserError:
        return None


# --- bytes of weights ---------------------------------------------------------------------------


@lru_cache(maxsize=8)
def full_network(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """Build the transformer with all blocks on the meta device, without an adapter."""
    return build_network(spec.transformer, spec.config, dtype)


def is_adapted(name: str, targets: tuple[str, ...]) -> bool:
    """Apply PEFT's rule for lists: the name itself is a target, or its last parts are."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def few_bits_bytes(rows: int, columns: int, bits: int) -> int:
    """Return the bytes of a weight (rows, columns) with its scales."""
    codes = rows * columns * bits // 8
    if bits == 8:
        return codes + rows * INT8_SCALE
    return codes + -(-rows * columns // NF4_GROUP) * NF4_SCALE


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
