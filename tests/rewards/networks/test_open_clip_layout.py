"""Folders that open_clip wrote give transformers' CLIP the network that open_clip has."""

import json

import open_clip
import pytest
import torch
from flowrl_rewards.clipscore import CLIPScore
from flowrl_rewards.networks.open_clip_layout import to_transformers, transformers_config
from transformers import CLIPConfig, CLIPModel

PROMPTS = ["a red circle", "Two Blue  stars!", "a green ring"]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
NARROW = {"layers": 2, "width": 32}
MODEL = {
    "embed_dim": 16,
    "vision_cfg": NARROW | {"image_size": 32, "patch_size": 8, "head_width": 16},
    "text_cfg": NARROW | {"context_length": 77, "vocab_size": 49408, "heads": 4},
}


def written(folder, *, quick_gelu: bool, file: str, preprocess: dict | None = None):
    """open_clip's network with random weights, and its folder as the hub has it."""
    model_cfg = MODEL | ({"quick_gelu": True} if quick_gelu else {})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = open_clip.CLIP(**model_cfg).eval()
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4)
    config = {"model_cfg": model_cfg, "preprocess_cfg": preprocess or {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        from safetensors.torch import save_file

        save_file(network.state_dict(), folder / file)
    else:
        torch.save(network.state_dict(), folder / file)
    return network


def clipscore(folder) -> CLIPScore:
    return CLIPScore(model=f"local-dir:{folder}", device="cpu")


@pytest.mark.parametrize("quick_gelu", [True, False])
def test_the_score_is_the_cosine_of_open_clips_own_forward(tmp_path, random_images, quick_gelu):
    file = "open_clip_model.safetensors" if quick_gelu else "open_clip_pytorch_model.bin"
    preprocess = {"mean": MEAN, "std": STD, "resize_mode": "squash", "interpolation": "bicubic"}
    network = written(tmp_path, quick_gelu=quick_gelu, file=file, preprocess=preprocess)
    images = random_images(3)
    pixels = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        seen, read, _ = network(pixels, open_clip.get_tokenizer("ViT-H-14")(PROMPTS))
    expected = (seen * read).sum(-1)
    scores = clipscore(tmp_path)(images, PROMPTS, [{}] * 3)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.01


def test_images_are_squashed_or_cropped_as_the_folder_says(tmp_path, random_images):
    images = random_images(2, 40, 80)
    found = {}
    for mode in ("squash", "shortest"):
        folder = tmp_path / mode
        folder.mkdir()
        written(folder, quick_gelu=True, file="open_clip_pytorch_model.bin",
                preprocess={"resize_mode": mode})  # fmt: skip
        reward = clipscore(folder)
        found[mode] = reward(images, PROMPTS[:2], [{}] * 2)
        other = images.clone()
        other[..., :10] = 1 - other[..., :10]  # beyond the centre
        changed = reward(other, PROMPTS[:2], [{}] * 2)
        assert torch.equal(changed, found[mode]) is (mode == "shortest")
    assert not torch.allclose(found["squash"], found["shortest"])


@pytest.mark.slow
def test_gradients_reach_the_pixels_and_long_prompts_are_cut(tmp_path, random_images, right_slopes):
    written(tmp_path, quick_gelu=True, file="open_clip_pytorch_model.bin",
            preprocess={"resize_mode": "squash"})  # fmt: skip
    reward = clipscore(tmp_path)
    right_slopes(lambda images: reward(images, PROMPTS, [{}] * 3), random_images(3, 40, 56))
    with pytest.warns(UserWarning, match="CLIPScore reads 77 tokens .* prompt of 78"):
        reward.clip.texts([" ".join(["cat"] * 76)])


@pytest.mark.parametrize(
    "name",
    [
        "ViT-H-14-quickgelu",
        pytest.param("ViT-H-14-378-quickgelu", marks=pytest.mark.slow),
        pytest.param("ViT-L-14", marks=pytest.mark.slow),
    ],
)
def test_published_networks_have_every_name_and_shape_of_the_one_that_is_built(name):
    """DFN's two ViT-H/14 and another, without memory for their numbers."""
    model = open_clip.get_model_config(name)
    with torch.device("meta"):
        theirs = open_clip.CLIP(**model).state_dict()
        ours = CLIPModel(CLIPConfig(**transformers_config(model))).state_dict()
    found = to_transformers(theirs)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in ours.items()}


def test_a_folder_of_another_network_is_one_clear_sentence(tmp_path, random_images):
    network = written(tmp_path, quick_gelu=False, file="open_clip_pytorch_model.bin")
    asked = (random_images(1), ["a"], [{}])
    weights, config = tmp_path / "open_clip_pytorch_model.bin", tmp_path / "open_clip_config.json"

    state = network.state_dict()
    del state["visual.ln_post.bias"]
    torch.save(state | {"visual.attn_pool.query": torch.ones(1)}, weights)
    with pytest.raises(ValueError, match="post_layernorm.bias is missing, .*query is unknown$"):
        clipscore(tmp_path)(*asked)

    for change, says in (
        ({"text_cfg": MODEL["text_cfg"] | {"hf_model_name": "roberta-base"}}, "hf_model_name"),
        ({"vision_cfg": MODEL["vision_cfg"] | {"layers": [3, 4, 6, 3]}}, "layers is"),
        ({"custom_text": True}, "custom_text is True"),
    ):
        config.write_text(json.dumps({"model_cfg": MODEL | change}))
        with pytest.raises(ValueError, match=f"describes no CLIP that can be read .*{says}"):
            clipscore(tmp_path)(*asked)
    for preprocess in ({"interpolation": "bilinear"}, {"resize_mode": "longest"}):
        config.write_text(json.dumps({"model_cfg": MODEL, "preprocess_cfg": preprocess}))
        with pytest.raises(ValueError, match="images are resized by"):
            clipscore(tmp_path)(*asked)
    config.unlink()
    with pytest.raises(FileNotFoundError, match="holds no file open_clip_config.json"):
        clipscore(tmp_path)(*asked)
