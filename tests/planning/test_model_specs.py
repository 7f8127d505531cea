"""Shapes of pipelines: published ones against their parameter counts, and folders."""

from functools import partial

import diffusers
import pytest
import torch

from flowrl.backbones.loading import load_pipeline, outline
from flowrl.backbones.small import small_folder
from flowrl.errors import UserError
from flowrl.planning.model_specs import MODEL_SPECS, build_network, spec_for

# Billions of parameters of the transformers, as published; SD3.5-Large's and FLUX.1's are those of
# the files on the Hub.
BILLIONS = {
    "flux.1-dev": 11.90, "flux.2-klein-4b": 3.88, "flux.2-klein-9b": 9.08, "krea-2": 12.9,
    "qwen-image": 20.43, "qwen-image-2.1": 7.1, "sana-1.5-1.6b": 1.60, "sana-1.5-4.8b": 4.72,
    "sana-1.6b": 1.60, "sd3.5-large": 8.06, "sd3.5-medium": 2.24, "z-image": 6.15,
}  # fmt: skip
# The same of their text encoders, and the factor and channels of a latent.
TEXTS = {
    "flux.1-dev": [0.123, 4.76], "flux.2-klein-4b": [4.02], "flux.2-klein-9b": [8.19],
    "krea-2": [4.44], "qwen-image": [8.29], "qwen-image-2.1": [8.77], "z-image": [4.02],
    "sana-1.6b": [2.61],
}  # fmt: skip


def test_every_published_size_has_its_parameters_and_a_source():
    assert set(BILLIONS) == set(MODEL_SPECS)
    for name, spec in MODEL_SPECS.items():
        network = build_network(spec.transformer, spec.config, torch.bfloat16)
        count = sum(p.numel() for p in network.parameters())
        assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01), name
        autoencoder = build_network(spec.autoencoder, spec.autoencoder_config, torch.bfloat16)
        assert sum(p.numel() for p in autoencoder.parameters()) == spec.autoencoder_params
        assert {p.device.type for p in network.parameters()} == {"meta"}
        assert spec.source and spec.native_pixels == 1024
    for name, counts in TEXTS.items():
        encoders = MODEL_SPECS[name].text_encoders
        assert [n / 1e9 for n in encoders] == pytest.approx(counts, rel=0.01)


def test_latents_have_the_published_shapes_and_sides_make_whole_patches():
    shapes = {
        "sd3.5-large": (16, 128, 128), "flux.1-dev": (16, 128, 128), "sana-1.6b": (32, 32, 32),
        "flux.2-klein-4b": (32, 128, 128), "qwen-image": (16, 128, 128), "z-image": (16, 128, 128),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert MODEL_SPECS[name].latent_shape(1024) == shape
    for name, pixels in [("flux.1-dev", 520), ("sana-1.6b", 0), ("z-image", 1032)]:
        with pytest.raises(UserError, match=str(pixels)):
            MODEL_SPECS[name].latent_shape(pixels)


@pytest.mark.parametrize("name", ["Flux2KleinPipeline", "QwenImagePipeline", "SanaPipeline"])
def test_a_folder_of_any_class_says_its_sizes(name, tmp_path):
    kind = getattr(diffusers, name)
    folder = small_folder(kind, tmp_path / "pipeline")
    spec, pipeline = spec_for(str(folder)), kind.from_pretrained(folder)

    def count(*modules) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    network = build_network(spec.transformer, spec.config, torch.float32)
    assert spec.pipeline == name and count(network) == count(pipeline.transformer)
    assert spec.autoencoder_params == count(pipeline.vae)
    encoders = [c for n, c in pipeline.components.items() if n.startswith("text_encoder") and c]
    assert sum(spec.text_encoders) == count(*encoders)
    (folder / "model_index.json").write_text("[" * 100_000)
    for read in (spec_for, outline, partial(load_pipeline, dtype="fp32", device="cpu")):
        with pytest.raises(UserError, match="model_index.json"):
            read(str(folder))
    with pytest.raises(UserError, match="somebody/something"):
        spec_for("somebody/something")
