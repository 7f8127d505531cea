"""Loading a pipeline: what is refused before, and how its autoencoder lies in memory."""

import json
from types import SimpleNamespace

import pytest
import torch

from flowrl.api import align
from flowrl.backbones.loading import check_pipeline, load_pipeline
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.planning.dry_run import rehearse
from flowrl.planning.plan import make_plan


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


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("FluxKontextPipeline", "edits images"), ("FluxFillPipeline", "edits images"),
     ("ZImageImg2ImgPipeline", "edits images"), ("StableDiffusionXLPipeline", "removes noise"),
     ("FooBarPipeline", "has no FooBarPipeline")],
)  # fmt: skip
def test_what_cannot_train_is_refused_before_anything_is_loaded(tmp_path, kind, reason):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    config = load_config("quickstart", [f"pipeline.path={tmp_path}"])
    for start in (align, make_plan, lambda c: rehearse(c, tmp_path / "rehearsal")):
        with pytest.raises(UserError, match=reason):
            start(config)
    check_pipeline("tiny-sd3")
