"""The autoencoders of the tiny pipelines: what they learn, and the latents the flow is given."""

import numpy as np
import pytest
import torch

from flowrl.errors import UserError
from scripts.pretrain_tiny import latents, sana, sd3


def test_latents_are_normalised_as_the_pipeline_will_undo_it(tmp_path):
    """SANA's pipeline undoes a scale alone, the others a shift as well."""
    images = np.random.default_rng(0).integers(0, 256, (64, 64, 64, 3), dtype=np.uint8)
    for name, make in (("kl", sd3.autoencoder), ("dc", sana.autoencoder)):
        torch.manual_seed(0)
        vae = make().eval()
        latents.normalise_latents(vae, images)
        encoded = latents.encode_all(vae, images, tmp_path / name).float()  # kept in fp16
        shift = vae.config.get("shift_factor")
        assert (encoded.std() - 1).abs() < 0.01
        assert shift is None or encoded.mean().abs() < 0.01
        with torch.no_grad():
            raw = latents.posterior_of(vae, latents.to_tensor(images[:4])).mean
        undone = encoded[:4] / vae.config.scaling_factor + (shift or 0.0)
        torch.testing.assert_close(undone, raw, rtol=0, atol=2e-3 / vae.config.scaling_factor)
        with pytest.raises(UserError, match="holds 64 images, not 65"):
            latents.encode_all(vae, np.concatenate([images, images[:1]]), tmp_path / name)
