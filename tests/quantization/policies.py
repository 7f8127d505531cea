"""Small policies on the networks of diffusers, and what models of them are compared by."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.backbones.policy import Policy
from flowrl.quantization.rollout_model import RolloutModel
from flowrl.sampling.rollout import with_network
from flowrl.trajectory import Conditioning

RANK, ALPHA = 4, 6


def disturb(policy: Policy, scale: float = 0.1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters():
        p.data += scale * torch.randn(p.shape, generator=generator)


def tensors(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())


def adapted(policy: Policy) -> dict[str, Any]:
    names = [name for name, _ in policy.network.named_modules() if name.endswith(".lora_A")]
    return {(n := name.removesuffix(".lora_A")): policy.network.get_submodule(n) for name in names}


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.no_grad()
def velocity(model: RolloutModel, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    return with_network(model.policy.backbone, model.network).velocity(x, sigma, cond)


class SmallSana(SimpleNamespace):
    lora_targets = ("to_q", "to_v", "conv_inverted", "conv_point")
    dtype = torch.float32

    def __init__(self) -> None:
        from diffusers import SanaTransformer2DModel

        torch.manual_seed(0)
        self.transformer = SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32,
            num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=32,
            cross_attention_dim=64, caption_channels=32, mlp_ratio=2.5, sample_size=4,
            patch_size=1,
        )  # fmt: skip

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return self.transformer(
            hidden_states=x,
            timestep=(sigma * 1000).expand(len(x)),
            encoder_hidden_states=cond.tensors["embeds"],
            return_dict=False,
        )[0]

    def inputs(self) -> tuple[Tensor, Tensor, Conditioning]:
        generator = torch.Generator().manual_seed(0)
        cond = Conditioning(tensors={"embeds": torch.randn(2, 5, 32, generator=generator)})
        return torch.randn(2, 4, 4, 4, generator=generator), torch.tensor(0.7), cond


class SmallFlux(SimpleNamespace):
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    dtype = torch.float32

    def __init__(self) -> None:
        from diffusers import FluxTransformer2DModel

        torch.manual_seed(0)
        self.transformer = FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=32,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
            guidance_embeds=True, axes_dims_rope=(8, 12, 12),
        )  # fmt: skip

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        text = cond.tensors
        return self.transformer(
            hidden_states=x,
            timestep=sigma.expand(len(x)),
            guidance=torch.ones(len(x)),
            encoder_hidden_states=text["embeds"],
            pooled_projections=text["pooled"],
            img_ids=torch.arange(x.shape[1])[:, None].expand(-1, 3),
            txt_ids=torch.zeros(text["embeds"].shape[1], 3),
            return_dict=False,
        )[0]

    def inputs(self) -> tuple[Tensor, Tensor, Conditioning]:
        generator = torch.Generator().manual_seed(0)
        embeds = torch.randn(2, 5, 32, generator=generator)
        pooled = torch.randn(2, 32, generator=generator)
        cond = Conditioning(tensors={"embeds": embeds, "pooled": pooled})
        return torch.randn(2, 16, 16, generator=generator), torch.tensor(0.7), cond
