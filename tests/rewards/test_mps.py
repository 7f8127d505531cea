"""MPS read from a file in its published layout gives what its published code gives."""

import pytest
import torch
from flowrl_rewards.mps import FILE, MPS, CrossModel, cross_size, likeness, to_parts
from published_layout import weights_by_name
from safetensors.torch import save_file
from torch import nn

PROMPTS = ["a red circle", "two blue stars", "a green ring"]
SIZE, WIDTH = 32, 128  # of the images, and of what the two towers have in common
# What the classes of the repository Kwai-Kolors/MPS compute with transformers 4.45.2 for PROMPTS,
# `random_images(3)`, the condition "red star", a threshold of 0.6 (which leaves 13, 9 and 14 of 14
# tokens) and the weights of `state()`.
# Tokens are made of these words.
WORDS = (
    "a above and art bag bed below bird black blue box bus cake car cat circle circles cow cross "
    "crosses cup dog drawing duck egg fish four fox frog gold green hat home ice jam key left leg "
    "lion map moon net of owl pen photo picture pig purple red right ring rings sign square "
    "squares star stars sun tea text the three toy tree triangle triangles two van web with word "
    "yellow yes zoo"
).split()
THEIRS = (0.6283958554267883, -0.32302573323249817, 0.6835201382637024)


def cross_shapes(width: int, layers: int, heads: int, each: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published layers; `fn` adds the residual."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        cross, parallel = (f"cross_model.layers.{i}.{j}.fn" for j in (0, 1))
        shapes |= {
            f"{cross}.norm.weight": (width,), f"{cross}.norm.bias": (width,),
            f"{cross}.to_q.weight": (heads * each, width),
            f"{cross}.to_kv.weight": (2 * each, width),
            f"{cross}.to_out.weight": (width, heads * each),
            f"{cross}.ff.0.weight": (8 * width, width), f"{cross}.ff.2.weight": (width, 4 * width),
            f"{parallel}.norm.weight": (width,), f"{parallel}.norm.bias": (width,),
            f"{parallel}.rotary_emb.inv_freq": (each // 2,),
            f"{parallel}.fused_attn_ff_proj.weight": ((heads + 2) * each + 8 * width, width),
            f"{parallel}.attn_out.weight": (width, heads * each),
            f"{parallel}.ff_out.1.weight": (width, 4 * width),
        }  # fmt: skip
    return shapes


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the sizes and the tokenizer of a CLIP."""
    from transformers import CLIPConfig

    from scripts.pretrain_tiny.vocab import CLIP_TOKENS, clip_tokenizer

    folder = tmp_path_factory.mktemp("base")
    words = len(clip_tokenizer(folder, WORDS))
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "projection_dim": WIDTH, "hidden_act": "gelu"}  # fmt: skip
    CLIPConfig(
        text_config=tower | {"vocab_size": words, "max_position_embeddings": CLIP_TOKENS},
        vision_config=tower | {"image_size": SIZE, "patch_size": 8}, projection_dim=WIDTH,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def state(base):
    """Weights under the names of the published code."""
    from transformers import CLIPConfig, CLIPModel

    clip = CLIPModel(CLIPConfig.from_pretrained(base)).state_dict()
    shapes = {f"model.{name}": tuple(value.shape) for name, value in clip.items()}
    found = weights_by_name(shapes | cross_shapes(WIDTH, 2, 2, 64))
    for name in found:  # its layer norms have no bias that learns
        if name.startswith("cross_model") and name.endswith("norm.bias"):
            found[name].zero_()
    return found | {"model.logit_scale": torch.tensor(2.0)}


@pytest.fixture(scope="module")
def folder(state, tmp_path_factory):
    """As on the hub: one more prefix."""
    folder = tmp_path_factory.mktemp("mps")
    save_file({f"mps.{name}": value for name, value in state.items()}, folder / FILE)
    return folder


def make(folder, base, **more) -> MPS:
    return MPS(**{"condition": "red star", "threshold": 0.6, "model": str(folder),
                  "base": str(base), "device": "cpu"} | more)  # fmt: skip


def test_it_scores_as_the_published_code_does(folder, base, random_images):
    before = torch.get_rng_state()
    scores = make(folder, base)(random_images(3), PROMPTS, [{}] * 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert scores.shape == (3,) and scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx(THEIRS, abs=2e-5)


def test_the_condition_and_the_threshold_say_which_tokens_count(folder, base, random_images):
    scores = {
        label: make(folder, base, **more)(random_images(3), PROMPTS, [{}] * 3)
        for label, more in {
            "own": {}, "all": {"threshold": -99.0}, "other": {"condition": "two blue rings"},
        }.items()
    }  # fmt: skip
    changed = scores["own"] != scores["all"]
    assert changed.tolist() == [True, True, False]  # of the third prompt every token is kept
    assert not torch.equal(scores["own"], scores["other"])
    tokens = torch.eye(3)[None] * torch.tensor([1.0, 2.0, 4.0])[:, None]
    alike = likeness(tokens, torch.tensor([[[1.0, 1, 0], [0, 0, 1]]]))
    assert alike.tolist() == [[0.25, 0.5, 1.0]]


def test_a_batch_scores_as_its_images_alone_and_gradients_reach_the_pixels(
    folder, base, random_images, right_slopes
):
    made = make(folder, base)
    images = random_images(3, 40, 56)
    alone = [made(images[i : i + 1], PROMPTS[i : i + 1], [{}]) for i in range(3)]
    torch.testing.assert_close(made(images, PROMPTS, [{}] * 3), torch.cat(alone), rtol=0, atol=1e-4)
    assert made.differentiable is True
    right_slopes(lambda x: made(x, PROMPTS, [{}] * 3), images)


def test_names_and_shapes_of_the_published_size_are_those_of_the_layers_that_are_built():
    shapes = cross_shapes(1024, 4, 16, 64)
    found = to_parts({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    size = cross_size(found["cross_model"])
    assert size == (1024, 4, 16, 64)
    with torch.device("meta"):
        own = CrossModel(*size).state_dict()
    wanted = {k: v.shape for k, v in own.items()}
    assert {k: v.shape for k, v in found["cross_model"].items()} == wanted
    assert sum(v.numel() for v in own.values()) == 118_505_472  # as `flowrl plan` counts


def test_a_file_of_another_layout_and_the_published_program_are_one_sentence(
    state, base, tmp_path, random_images
):
    lacks = {k: v for k, v in state.items() if "layers.1.0.fn.to_out" not in k}
    for wrong, says in (
        (nn.Linear(2, 2), r"w.pt is not read as plain weights .*save its state_dict\(\)"),
        (lacks, "its cross-attention.: layers.1.0.to_out.weight is missing$"),
        ({"some.weight": torch.ones(1)}, "MPS .its CLIP.: logit_scale is missing"),
    ):
        torch.save(wrong, tmp_path / "w.pt")
        with pytest.raises(ValueError, match=says) as told:
            make(tmp_path / "w.pt", base)(random_images(1), PROMPTS[:1], [{}])
        assert "\n" not in str(told.value)


@pytest.mark.weights
def test_published_weights_know_colours():
    made = MPS()
    for found in made.fixtures():
        both = torch.stack([found["better"], found["worse"]])
        scores = made(both, [found["prompt"]] * 2, [{}] * 2)
        assert scores[0] > scores[1], found["says"]
