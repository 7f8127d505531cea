"""The architectures with random weights, small, saved and loaded by the real code."""

import json

import numpy as np
import pytest
import torch
from flowrl_rewards.detectors.open_vocabulary import Owlv2Detector


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("owlv2")
    save_owlv2(path)
    return str(path)


def make(folder: str, **args) -> Owlv2Detector:
    return Owlv2Detector(model=folder, device="cpu", **args)


def save_owlv2(path):
    from transformers import (
        CLIPTokenizer,
        Owlv2Config,
        Owlv2ForObjectDetection,
        Owlv2ImageProcessor,
    )

    letters = [chr(c) for c in range(97, 123)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    (path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt")).save_pretrained(path)
    common = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    text = common | {
        "vocab_size": len(tokens), "max_position_embeddings": 48, "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }  # fmt: skip
    vision = common | {"image_size": 64, "patch_size": 16}
    config = Owlv2Config(text_config=text, vision_config=vision, projection_dim=16)
    network = Owlv2ForObjectDetection(config)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1 and "box_head" not in name:
            parameter.data.mul_(4)
    network.save_pretrained(path)
    Owlv2ImageProcessor(size={"height": 64, "width": 64}).save_pretrained(path)


def random_images(count: int = 3, height: int = 48, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def alike(one, other) -> bool:
    return len(one) == len(other) and all(
        a.name == b.name and np.allclose(a.box, b.box, atol=1e-3) and abs(a.score - b.score) < 1e-5
        for a, b in zip(one, other, strict=True)
    )


def test_an_image_has_the_same_objects_alone_and_in_a_batch_with_the_names_asked_for(folder):
    images = random_images(5)
    names = [("cat",)] * 3 + [("tv remote", "cat"), ("cat",)]
    find = make(folder, floor=0.0, batch=2)
    together = find(images, names)
    assert all(alike(find(images[i : i + 1], names[i : i + 1])[0], together[i]) for i in range(5))
    for allowed, detections in zip(names, together, strict=True):
        assert detections
        for item in detections:
            left, top, right, bottom = item.box
            assert item.name in allowed and 0 <= item.score <= 1
            assert 0 <= left < right <= 64 and 0 <= top < bottom <= 48
    scores = sorted(item.score for item in together[0])
    floor = scores[len(scores) // 2]
    fewer = make(folder, floor=floor)(images[:1], names[:1])[0]
    assert fewer and all(item.score > floor for item in fewer)


def scripted(boxes: list, scores: list) -> Owlv2Detector:
    """A detector whose network answers with these boxes (xyxy) and scores by class."""
    find = Owlv2Detector()
    answer = torch.tensor([boxes]).float(), torch.tensor([scores])
    find.find = lambda images, classes: answer
    return find


def test_a_box_counts_once_has_the_class_that_fits_best_and_is_cut_at_the_images_edges():
    boxes = [(0, 0, 20, 20), (1, 1, 21, 21), (0, 0, 20, 20), (40, 40, 60, 60)]
    scores = [(0.5, 0.1), (0.6, 0.1), (0.2, 0.4), (0.3, 0.1)]
    (found,) = scripted(boxes, scores)(random_images(1, 64, 64), [("cat", "dog")])
    assert sorted((item.name, round(item.score, 3), item.box) for item in found) == [
        ("cat", 0.3, (40, 40, 60, 60)),
        ("cat", 0.6, (1, 1, 21, 21)),
        ("dog", 0.4, (0, 0, 20, 20)),  # another class may lie in the same place
    ]
    boxes = [(-10, -10, 20, 80), (70, 0, 90, 20)]
    (found,) = scripted(boxes, [(0.5,), (0.9,)])(random_images(1, 48, 64), [("cat",)])
    assert [item.box for item in found] == [(0, 0, 20, 48)]


def test_owlv2_boxes_are_shares_of_the_longer_side(folder):
    """The image is padded to a square, so a box in its middle is not in the square's."""
    find = make(folder)
    network = find.model.network

    class Middle:
        device, config = network.device, network.config

        def __call__(self, pixel_values, **inputs):
            boxes = torch.tensor([[[0.5, 0.25, 0.5, 0.25]]])
            return type("Output", (), {"pred_boxes": boxes, "logits": torch.tensor([[[4.0]]])})

    find.model.__dict__["network"] = Middle()
    (found,) = find(random_images(1, 48, 96), [("cat",)])
    assert found[0].box == pytest.approx((24, 12, 72, 36))
