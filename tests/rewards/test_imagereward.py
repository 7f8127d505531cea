"""ImageReward read from a file in its published layout gives what its published code gives."""

import json

import pytest
import torch
from flowrl_rewards.imagereward import FILE, ImageReward, sizes, to_transformers
from published_layout import weights_by_name
from torch import nn

PROMPTS = ["a red circle", "two blue stars of gold", "a red circle"]
WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"a red circle two blue stars of gold".split(),
)
# What the package image-reward 1.5 computes for PROMPTS, `random_images(3)` and the weights of
# `published(...)`, with torch 2.15: its networks were made of its own classes in these sizes.
THEIRS = (8.946487426757812, 12.364703178405762, 11.878607749938965)


def published(  # noqa: PLR0913
    *,
    width: int,
    blocks: int,
    side: int,
    text: int,
    layers: int,
    between: int,
    words: int,
    places: int,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of ImageReward.pt for given sizes, in the order of its code."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int) -> None:
        shapes.update({f"{name}.weight": (out, into), f"{name}.bias": (out,)})

    def norm(name: str, size: int) -> None:
        shapes.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    see, read = "blip.visual_encoder", "blip.text_encoder"
    shapes[f"{see}.cls_token"] = (1, 1, width)
    shapes[f"{see}.pos_embed"] = (1, (side // 16) ** 2 + 1, width)
    shapes[f"{see}.patch_embed.proj.weight"] = (width, 3, 16, 16)
    shapes[f"{see}.patch_embed.proj.bias"] = (width,)
    for block in (f"{see}.blocks.{i}" for i in range(blocks)):
        norm(f"{block}.norm1", width)
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        norm(f"{block}.norm2", width)
        linear(f"{block}.mlp.fc1", 4 * width, width)
        linear(f"{block}.mlp.fc2", width, 4 * width)
    norm(f"{see}.norm", width)
    shapes[f"{read}.embeddings.position_ids"] = (1, places)
    shapes[f"{read}.embeddings.word_embeddings.weight"] = (words, text)
    shapes[f"{read}.embeddings.position_embeddings.weight"] = (places, text)
    norm(f"{read}.embeddings.LayerNorm", text)
    for layer in (f"{read}.encoder.layer.{i}" for i in range(layers)):
        for name, source in (("attention", text), ("crossattention", width)):
            linear(f"{layer}.{name}.self.query", text, text)
            linear(f"{layer}.{name}.self.key", text, source)
            linear(f"{layer}.{name}.self.value", text, source)
            linear(f"{layer}.{name}.output.dense", text, text)
            norm(f"{layer}.{name}.output.LayerNorm", text)
        linear(f"{layer}.intermediate.dense", between, text)
        linear(f"{layer}.output.dense", text, between)
        norm(f"{layer}.output.LayerNorm", text)
    linear("blip.vision_proj", 16, width)  # of BLIP's own training, not used
    linear("blip.text_proj", 16, text)
    for number, out, into in (
        (0, 1024, text),
        (2, 128, 1024),
        (4, 64, 128),
        (6, 16, 64),
        (7, 1, 16),
    ):
        linear(f"mlp.layers.{number}", out, into)
    return shapes


TINY = published(
    width=128, blocks=2, side=32, text=64, layers=2, between=96, words=24, places=40
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """ImageReward.pt with small weights, and BERT's tokenizer with few words."""
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("imagereward")
    torch.save(weights_by_name(TINY), folder / FILE)
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text())
    return folder


@pytest.fixture
def made(folder):
    return ImageReward(model=str(folder), tokenizer=str(folder), device="cpu")


def test_it_scores_as_the_published_code_does(made, random_images):
    before = torch.get_rng_state()
    scores = made(random_images(3), PROMPTS, [{}] * 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert scores.shape == (3,) and scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx(THEIRS, rel=1e-4)


def test_each_image_is_scored_with_its_own_prompt_as_if_alone_in_one_pass(made, random_images):
    rows = []
    hook = made._loaded.text.register_forward_hook(
        lambda module, given, output: rows.append(len(output.last_hidden_state))
    )
    images = random_images(3, 64, 80)
    scores = made(images, PROMPTS, [{}] * 3)
    hook.remove()
    assert rows == [3]  # and not one for each pair
    alone = [made(images[i : i + 1], PROMPTS[i : i + 1], [{}]) for i in range(3)]
    torch.testing.assert_close(scores, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert scores.std() > 0.1


def test_names_and_shapes_of_the_published_size_are_those_of_the_networks_that_are_built():
    from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    shapes = published(
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


def test_gradients_reach_the_pixels(made, random_images, right_slopes):
    assert made.differentiable is True
    right_slopes(lambda images: made(images, PROMPTS, [{}] * 3), random_images(3, 40, 56))


def test_prompts_beyond_35_tokens_are_cut_with_a_warning(made, random_images):
    long = "a red circle " * 20
    with pytest.warns(UserWarning, match="ImageReward reads 35 tokens"):
        cut = made(random_images(1), [long], [{}])
    with pytest.warns(UserWarning):
        assert torch.equal(cut, made(random_images(1), [long + "and two stars"], [{}]))


def test_bf16_stays_near_and_says_so(folder, made, random_images):
    half = ImageReward(model=str(folder), tokenizer=str(folder), device="cpu", dtype="bf16")
    scores = half(random_images(3), PROMPTS, [{}] * 3)
    torch.testing.assert_close(scores, made(random_images(3), PROMPTS, [{}] * 3), rtol=0.05, atol=0)
    assert scores.dtype == torch.float32 and half.version != made.version


def test_a_file_of_another_layout_is_one_sentence(folder, tmp_path, random_images):
    made = ImageReward(model=str(tmp_path), tokenizer=str(folder), device="cpu")
    state = weights_by_name(TINY)
    lacks = dict(state)
    del lacks["blip.text_encoder.encoder.layer.1.crossattention.self.key.bias"]
    narrow = state | {"mlp.layers.7.weight": torch.ones(1, 8)}
    extra = state | {"blip.visual_encoder.blocks.0.attn.scale": torch.ones(1)}
    for wrong, says in (
        ({"model": state}, "lacks 'patch_embed.proj.weight'"),
        (lacks, "encoder.layer.1.crossattention.self.key.bias is missing"),
        (extra, "attn.scale is unknown"),
        (narrow, "head of ImageReward of widths 64-1024-128-64-16-1"),
        ({"blip": nn.Linear(2, 2)}, "is not read as plain weights"),
    ):
        torch.save(wrong, tmp_path / FILE)
        with pytest.raises(ValueError, match=says) as told:
            made(random_images(1), PROMPTS[:1], [{}])
        assert "\n" not in str(told.value)


def test_without_its_weights_one_sentence_says_what_to_fetch(random_images):
    with pytest.raises(FileNotFoundError, match="`hf download THUDM/ImageReward ImageReward.pt`"):
        ImageReward(device="cpu")(random_images(1), PROMPTS[:1], [{}])


@pytest.mark.weights
def test_published_weights_know_colours():
    made = ImageReward()
    for found in made.fixtures():
        both, prompt = torch.stack([found["better"], found["worse"]]), found["prompt"]
        scores = made(both, [prompt] * 2, [{}] * 2)
        assert scores[0] > scores[1], found["says"]
