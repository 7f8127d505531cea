"""ImageReward read from a file in its published layout gives what its published code gives."""

import pytest
import torch
from flowrl_rewards.imagereward import ImageReward, sizes, to_transformers
from published_layout import imagereward_shapes

PROMPTS = ["a red circle", "two blue stars of gold", "a red circle"]
# What the package image-reward 1.5 computes for PROMPTS, `random_images(3)` and the weights of
# `published(...)`, with torch 2.15: its networks were made of its own classes in these sizes.
THEIRS = (8.946487426757812, 12.364703178405762, 11.878607749938965)


@pytest.fixture
def reward(tiny_imagereward):
    return ImageReward(model=tiny_imagereward, tokenizer=tiny_imagereward, device="cpu")


def test_it_scores_as_the_published_code_does_in_one_pass(reward, random_images):
    rows = []
    hook = reward._loaded.text.register_forward_hook(
        lambda module, inputs, output: rows.append(len(output.last_hidden_state))
    )
    scores = reward(random_images(3), PROMPTS, [{}] * 3)
    hook.remove()
    assert rows == [3]  # and not one for each pair
    assert scores.tolist() == pytest.approx(THEIRS, rel=1e-4)


def test_names_and_shapes_of_the_published_size_are_those_of_the_networks_that_are_built():
    from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    shapes = imagereward_shapes(
        width=1024, blocks=24, side=224, text=768, layers=12, between=3072, words=30524, places=512
    )
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    vision, text = sizes(state)
    assert (vision["image_size"], vision["num_attention_heads"]) == (224, 16)
    assert text["num_attention_heads"] == 12
    with torch.device("meta"):
        networks = {
            "vision": BlipVisionModel(BlipVisionConfig(**vision)),
            "text": BlipTextModel(BlipTextConfig(**text), add_pooling_layer=False),
        }
    for name, found in to_transformers(state).items():
        wanted = {k: v.shape for k, v in networks[name].state_dict().items()}
        assert {k: v.shape for k, v in found.items()} == wanted
