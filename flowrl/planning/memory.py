"""The memory of each phase of an iteration on one GPU, part by part."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from flowrl.planning.activations import forward_peak, training_peak
from flowrl.planning.network import (
    Module,
    Shapes,
    adapter_parameters,
    as_module,
    shapes_of,
)
from flowrl.planning.pictures import decode_peak, encode_peak
from flowrl.planning.setup import Setup
from flowrl.planning.sizes import Size
from flowrl.planning.weights import (
    FP32,
    MOMENTS,
    adapted_bytes,
    copy_bytes,
    network_of,
    packed_layers,
    transformer_bytes,
    widest_bytes,
)
from flowrl.trees.memory import rollout_bytes
from flowrl.trees.plan import TreePlan, ode_plan
from flowrl.trees.shape import count

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
        """A batch of held-out pictures, with the latents of all their steps."""
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

    def _decode(self, pictures: int) -> int:
        """Of so many that there are at once."""
        s = self._shapes(1)
        module = as_module(self.size.autoencoder, self.size.autoencoder_config)
        latents = (min(self.setup.decode_batch, pictures), s.channels, s.height, s.width)
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
        """Pictures that are there at once to be decoded: those of a batch of trees."""
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
