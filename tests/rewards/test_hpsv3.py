"""HPSv3 read from a file in its published layout gives what its published code gives."""

import pytest
import torch
from flowrl_rewards.hpsv3 import (
    HPSv3,
    read_question,
    to_patches,
    to_transformers,
)
from published_layout import QUESTION, hpsv3_shapes

PROMPTS = ["a red circle", "two blue stars of gold", "a red circle"]
# What the classes of the package hpsv3 1.0.0 compute with transformers 4.45.2 for PROMPTS,
# `pictures()`, this question and the weights of `published(...)` (means, in float32).
THEIRS = (0.6505301594734192, 0.6460456252098083, 0.39499062299728394)


def make(folder: str, **more) -> HPSv3:
    question = f"{folder}/data_collator_qwen.py"
    paths = {"model": folder, "base": folder, "question": question}
    return HPSv3(**paths | {"device": "cpu", "dtype": "fp32"} | more)


def test_it_scores_as_the_published_code_does_and_gradients_reach_the_pixels(
    tiny_hpsv3, random_images
):
    images = random_images(3, 448, 448).requires_grad_()  # of a size that neither side resizes
    scores = make(tiny_hpsv3)(images, PROMPTS, [{}] * 3)
    assert scores.tolist() == pytest.approx(THEIRS, rel=1e-4)
    (gradient,) = torch.autograd.grad(scores.sum(), images)
    assert (gradient.abs().sum((1, 2, 3)) > 0).all()


def test_names_and_shapes_of_the_published_size_are_those_of_the_network_that_is_built():
    """Qwen2-VL-7B with one token more, without memory for its numbers."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151658}  # fmt: skip
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16,
              "patch_size": 14}  # fmt: skip
    shapes = hpsv3_shapes(text, vision, 151658)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = Qwen2VLConfig(
        text_config=text | {"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        vision_config=vision,
    )  # fmt: skip
    with torch.device("meta"):
        wanted = Qwen2VLModel(config).state_dict()
    renamed = to_transformers(state)
    assert {k: v.shape for k, v in renamed.items()} == {k: v.shape for k, v in wanted.items()}


def test_images_get_the_published_patches(random_images):
    images = random_images(2, 28, 56)
    patches = to_patches(images, 14, 2, 2)
    assert patches.shape == (2 * 2 * 4, 3 * 2 * 14 * 14)
    fifth = images[1, :, :14, 28:42]  # of the second image: the square on the right begins
    expected = fifth[:, None].expand(-1, 2, -1, -1).reshape(-1)
    assert torch.equal(patches[8 + 4], expected)
    assert torch.equal(
        patches[8 + 2], images[1, :, 14:, :14][:, None].expand(-1, 2, -1, -1).flatten()
    )


def test_the_question_is_needed_and_read_from_the_package_and_nothing_of_it_is_run(
    tiny_hpsv3, random_images, tmp_path, monkeypatch
):
    with pytest.raises(FileNotFoundError, match="`pip install --no-deps hpsv3`"):
        HPSv3(model=tiny_hpsv3, device="cpu")(random_images(1), ["a"], [{}])
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
    # Its own token in a prompt would be taken for the question's.
    with pytest.raises(ValueError, match=r"<\|Reward\|>"):
        make(tiny_hpsv3)(random_images(1), ["a <|Reward|>"], [{}])
