"""HPSv3 read from a file in its published layout gives what its published code gives."""

import json

import pytest
import torch
from flowrl_rewards.hpsv3 import (
    FILE,
    HPSv3,
    build,
    read_question,
    target_size,
    to_patches,
)
from published_layout import weights_by_name
from safetensors.torch import save_file

PROMPTS = ["a red circle", "two blue stars of gold", "a red circle"]
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>",
)  # fmt: skip
REWARD = 256 + len(SPECIAL)  # the number of its own token: the last one
BASE = {  # as Qwen2-VL-7B's config.json, with the sizes of a toy
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
    "vocab_size": 280, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "bos_token_id": 256, "eos_token_id": 258, "image_token_id": 261, "video_token_id": 279,
    "vision_start_token_id": 259, "vision_end_token_id": 260,
    "vision_config": {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "in_chans": 3, "mlp_ratio": 4,
        "model_type": "qwen2_vl", "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "temporal_patch_size": 2,
    },
}  # fmt: skip
QUESTION = '''
import package_that_is_not_there
INSTRUCTION = """
Rate it.
Textual prompt - {text_prompt}
"""
prompt_with_special_token = """
Rating: <|Reward|>
END
"""
'''
# What the classes of the package hpsv3 1.0.0 compute with transformers 4.45.2 for PROMPTS,
# `pictures()`, this question and the weights of `published(...)` (means, in float32).
THEIRS = (0.6505301594734192, 0.6460456252098083, 0.39499062299728394)


def published(text: dict, vision: dict, words: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of HPSv3.safetensors for given sizes."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        shapes.update({f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {}))

    def norm(name: str, size: int) -> None:
        shapes.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    width, side = vision["embed_dim"], vision["patch_size"]
    shapes["visual.patch_embed.proj.weight"] = (width, 3, 2, side, side)
    for block in (f"visual.blocks.{i}" for i in range(vision["depth"])):
        norm(f"{block}.norm1", width)
        norm(f"{block}.norm2", width)
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        linear(f"{block}.mlp.fc1", 4 * width, width)
        linear(f"{block}.mlp.fc2", width, 4 * width)
    norm("visual.merger.ln_q", width)
    linear("visual.merger.mlp.0", 4 * width, 4 * width)
    linear("visual.merger.mlp.2", text["hidden_size"], 4 * width)
    size, between = text["hidden_size"], text["intermediate_size"]
    shared = size // text["num_attention_heads"] * text["num_key_value_heads"]
    shapes["model.embed_tokens.weight"] = (words, size)
    for layer in (f"model.layers.{i}" for i in range(text["num_hidden_layers"])):
        linear(f"{layer}.self_attn.q_proj", size, size)
        linear(f"{layer}.self_attn.k_proj", shared, size)
        linear(f"{layer}.self_attn.v_proj", shared, size)
        linear(f"{layer}.self_attn.o_proj", size, size, bias=False)
        linear(f"{layer}.mlp.gate_proj", between, size, bias=False)
        linear(f"{layer}.mlp.up_proj", between, size, bias=False)
        linear(f"{layer}.mlp.down_proj", size, between, bias=False)
        shapes[f"{layer}.input_layernorm.weight"] = (size,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (size,)
    shapes["model.norm.weight"] = (size,)
    shapes["lm_head.weight"] = (words, size)
    for number, out, into in ((0, 1024, size), (3, 16, 1024), (5, 2, 16)):
        linear(f"rm_head.{number}", out, into)
    return shapes


TINY = published(BASE, BASE["vision_config"], REWARD + 1)


def pictures(random_images):
    """Of the size that the published code brings images to: neither side resizes them."""
    return random_images(3, 448, 448)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The file, the base's sizes and tokenizer (bytes), and the package's source, in one folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hpsv3")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token=SPECIAL[0], additional_special_tokens=[*SPECIAL[1:]]
    )
    tokenizer.save_pretrained(folder)
    save_file(weights_by_name(TINY), folder / FILE)
    (folder / "config.json").write_text(json.dumps(BASE))
    (folder / "data_collator_qwen.py").write_text(QUESTION)
    return folder


def make(folder, **more) -> HPSv3:
    question = str(folder / "data_collator_qwen.py")
    places = {"model": str(folder), "base": str(folder), "question": question}
    return HPSv3(**places | {"device": "cpu", "dtype": "fp32"} | more)


def test_it_scores_as_the_published_code_does(folder, random_images):
    before = torch.get_rng_state()
    scores = make(folder)(pictures(random_images), PROMPTS, [{}] * 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert scores.shape == (3,) and scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx(THEIRS, rel=1e-4)


def test_a_batch_scores_as_its_images_alone_and_gradients_reach_the_pixels(folder, random_images):
    made = make(folder)
    images = random_images(2, 224, 448)
    leaf = images.clone().requires_grad_()
    scores = made(leaf, PROMPTS[:2], [{}] * 2)  # of different lengths: one is padded
    alone = [made(images[i : i + 1], PROMPTS[i : i + 1], [{}]) for i in range(2)]
    torch.testing.assert_close(scores.detach(), torch.cat(alone), rtol=1e-3, atol=1e-4)
    (gradient,) = torch.autograd.grad(scores.sum(), leaf)
    assert made.differentiable is True and (gradient.abs().sum((1, 2, 3)) > 0).all()


def test_names_and_shapes_of_the_published_size_are_those_of_the_network_that_is_built():
    """Qwen2-VL-7B with one token more, without memory for its numbers."""
    from flowrl_rewards.hpsv3 import to_transformers
    from transformers import Qwen2VLConfig, Qwen2VLModel

    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151658}  # fmt: skip
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16,
              "patch_size": 14}  # fmt: skip
    shapes = published(text, vision, 151658)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = Qwen2VLConfig(
        text_config=text | {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        vision_config=vision,
    )  # fmt: skip
    with torch.device("meta"):
        own = Qwen2VLModel(config).state_dict()
    found = to_transformers(state)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in own.items()}


def test_images_get_the_published_size_and_patches(random_images):
    for given, wanted in {
        (512, 512): (448, 448), (448, 448): (448, 448), (256, 256): (448, 448),
        (1024, 1024): (448, 448), (768, 1344): (336, 588), (64, 64): (448, 448),
        (300, 500): (364, 588),
    }.items():  # fmt: skip
        assert target_size(*given, 28) == wanted, given
    images = random_images(2, 28, 56)
    patches = to_patches(images, 14, 2, 2)
    assert patches.shape == (2 * 2 * 4, 3 * 2 * 14 * 14)
    fifth = images[1, :, :14, 28:42]  # of the second image: the square on the right begins
    expected = fifth[:, None].expand(-1, 2, -1, -1).reshape(-1)
    assert torch.equal(patches[8 + 4], expected)
    assert torch.equal(
        patches[8 + 2], images[1, :, 14:, :14][:, None].expand(-1, 2, -1, -1).flatten()
    )


def test_the_question_is_read_from_the_package_and_nothing_of_it_is_run(tmp_path, monkeypatch):
    package = tmp_path / "hpsv3"
    (package / "dataset").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it was run')")
    (package / "dataset" / "data_collator_qwen.py").write_text(QUESTION)
    monkeypatch.syspath_prepend(tmp_path)
    question = read_question(None)
    assert question.startswith("\nRate it.\nTextual prompt - {text_prompt}\n\nRating: <|Reward|>")
    (tmp_path / "other.py").write_text("INSTRUCTION = 'Rate {text_prompt}'")
    with pytest.raises(ValueError, match="other.py does not hold HPSv3's question"):
        read_question(str(tmp_path / "other.py"))


def test_what_is_missing_is_one_sentence(folder, tmp_path, random_images):
    asked = (random_images(1), ["a"], [{}])
    with pytest.raises(FileNotFoundError, match="`pip install --no-deps hpsv3` brings it"):
        HPSv3(model=str(folder), device="cpu")(*asked)
    with pytest.raises(FileNotFoundError, match=f"holds no file {FILE}"):
        make(folder, model=str(tmp_path))(*asked)
    with pytest.raises(ValueError, match=r"a prompt that holds <\|Reward\|>"):
        make(folder)(random_images(1), ["a <|Reward|>"], [{}])


def test_a_file_of_another_layout_is_one_sentence(folder, tmp_path):
    from transformers import AutoConfig

    state = weights_by_name(TINY)
    lacks = {k: v for k, v in state.items() if k != "model.layers.1.mlp.up_proj.weight"}
    for wrong, says in (
        (lacks, "language_model.layers.1.mlp.up_proj.weight is missing$"),
        (state | {"visual.extra": torch.ones(1)}, "visual.extra is unknown"),
        (state | {"rm_head.5.weight": torch.ones(1, 16)}, "HPSv3's head: 5.weight has another"),
        ({"some": torch.ones(1)}, "expected names such as .*, got some"),
    ):
        with pytest.raises(ValueError, match=says) as told:
            build(wrong, tmp_path / FILE, AutoConfig.from_pretrained(folder), torch.float32)
        assert "\n" not in str(told.value)


@pytest.mark.weights
def test_published_weights_know_colours():
    made = HPSv3()
    for found in made.fixtures():
        both = torch.stack([found["better"], found["worse"]])
        scores = made(both, [found["prompt"]] * 2, [{}] * 2)
        assert scores.isfinite().all() and scores[0] > scores[1], found["says"]
