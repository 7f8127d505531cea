"""What decides how much memory a run takes on one GPU, as plain numbers."""

from dataclasses import dataclass
from typing import Literal

import torch

from flowrl.errors import UserError
from flowrl.trees.plan import TreePlan

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
    evaluation_steps: of a held-out picture, all of whose latents are held.
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
