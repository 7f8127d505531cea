import sys
import types

import pytest
import torch
from flowrl_rewards.imagereward import ImageReward
from flowrl_rewards.images import to_uint8
from flowrl_rewards.networks.preprocess import clip_pixels
from torch import nn

PROMPTS = ["a red circle", "two blue stars", "a red circle"]


class Sight(nn.Module):
    """Images (B, 3, 224, 224) -> one vector for each of 16 patches, (B, 16, 24)."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 56, 56)

    def forward(self, pixels):
        return self.patches(pixels).flatten(2).transpose(1, 2)


@pytest.fixture(scope="module")
def network(tiny_clip):
    """The parts of the package's model: a BLIP text encoder that looks at images, and a head."""
    from transformers import AutoTokenizer, BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    tokenizer = AutoTokenizer.from_pretrained(tiny_clip)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = BlipTextConfig(
            vocab_size=len(tokenizer), hidden_size=32, encoder_hidden_size=24, num_hidden_layers=1,
            intermediate_size=64, num_attention_heads=4, projection_dim=16, is_decoder=True,
        )  # fmt: skip
        blip = nn.Module()
        blip.visual_encoder, blip.tokenizer = Sight(), tokenizer
        blip.text_encoder = BlipTextModel(config, add_pooling_layer=False)
        for parameter in blip.parameters():
            parameter.data.mul_(10)
        whole = nn.Module()
        whole.blip, whole.mlp = blip, nn.Linear(32, 1)
    whole.mean, whole.std = 0.16717362830052426, 1.0333394966054072
    return whole.eval()


@pytest.fixture
def made(network, monkeypatch):
    package = types.ModuleType("ImageReward")
    package.load = lambda name, device: network
    monkeypatch.setitem(sys.modules, "ImageReward", package)
    return ImageReward(device="cpu")


def one(network, image, prompt):
    """The published way: one image, one prompt."""
    text = network.blip.tokenizer(
        prompt, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
    )
    seen = network.blip.visual_encoder(clip_pixels(image[None]))
    read = network.blip.text_encoder(
        text.input_ids,
        attention_mask=text.attention_mask,
        encoder_hidden_states=seen,
        encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long),
        return_dict=True,
    )
    raw = network.mlp(read.last_hidden_state[:, 0, :]).item()
    return (raw - network.mean) / network.std


def test_each_image_is_scored_with_its_own_prompt_as_if_alone_in_one_pass(
    made, network, random_images
):
    rows = []
    hook = network.blip.text_encoder.register_forward_hook(
        lambda module, given, output: rows.append(len(output.last_hidden_state))
    )
    images = random_images(3, 64, 80)
    scores = made(images, PROMPTS, [{}] * 3)
    hook.remove()
    assert rows == [3]  # and not one for each pair
    assert scores.shape == (3,) and scores.dtype == torch.float32
    alone = [one(network, image, prompt) for image, prompt in zip(images, PROMPTS, strict=True)]
    assert scores.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-5)
    assert scores.std() > 0.01


def test_prompts_beyond_35_tokens_are_cut_with_a_warning(made, random_images):
    long = "a red circle " * 20
    with pytest.warns(UserWarning, match="ImageReward reads 35 tokens"):
        cut = made(random_images(1), [long], [{}])
    with pytest.warns(UserWarning):
        assert torch.equal(cut, made(random_images(1), [long + "and two stars"], [{}]))


def test_without_its_package_one_sentence_says_what_to_do(random_images):
    with pytest.raises(ImportError) as caught:
        ImageReward()(random_images(1), PROMPTS[:1], [{}])
    for words in ("pip install image-reward", "docs/reward-servers.md"):
        assert words in str(caught.value)


@pytest.mark.weights
def test_published_weights_score_as_the_package_does_and_know_colours():
    package = pytest.importorskip(
        "ImageReward", reason="needs the package image-reward", exc_type=ImportError
    )
    from PIL import Image

    made, theirs = ImageReward(device="cpu"), package.load("ImageReward-v1.0", device="cpu")
    for found in made.fixtures():  # of 224 pixels: neither side resizes them
        both, prompt = torch.stack([found["better"], found["worse"]]), found["prompt"]
        scores = made(both, [prompt] * 2, [{}] * 2)
        expected = [theirs.score(prompt, Image.fromarray(image)) for image in to_uint8(both)]
        assert scores.tolist() == pytest.approx(expected, abs=1e-3)
        assert scores[0] > scores[1], found["says"]
