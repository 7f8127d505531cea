"""Loading a pipeline: how its autoencoder lies in memory."""

from types import SimpleNamespace

import torch

from flowrl.backbones.loading import load_pipeline


def test_autoencoders_of_videos_load_and_keep_their_weights(monkeypatch):
    from diffusers import AutoencoderKLQwenImage, DiffusionPipeline

    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    whole = SimpleNamespace(vae=vae, set_progress_bar_config=lambda **_: None, to=lambda _: whole)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: whole)
    loaded = load_pipeline("tiny-sd3", dtype="fp32", device="cpu").vae
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    axes = {tensor.ndim for tensor in loaded.parameters()}
    assert {4, 5} <= axes
    for tensor in loaded.parameters():
        if tensor.ndim == 4:
            assert tensor.is_contiguous(memory_format=torch.channels_last)
