"""The architectures with random weights, small, saved and loaded by the real code."""

import json

import numpy as np
import pytest
import torch
from flowrl_rewards.detectors.open_vocabulary import (
    GroundingDinoDetector,
    OpenDetector,
    Owlv2Detector,
)

KINDS = ("owlv2", "grounding_dino")
WORDS = ("cat", "computer", "mouse", "tv", "remote", "a", "photo", "of")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(0)
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    save_owlv2(paths["owlv2"])
    save_grounding_dino(paths["grounding_dino"])
    return {kind: str(path) for kind, path in paths.items()}


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


def save_grounding_dino(path):
    from transformers import (
        BertTokenizer,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoImageProcessor,
    )

    # The network knows [CLS], [SEP], "." and "?" by their numbers in BERT's vocabulary.
    tokens = {i: f"unused{i}" for i in range(1030)}
    tokens |= {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    tokens |= {1012: ".", 1029: "?"} | {200 + i: word for i, word in enumerate(WORDS)}
    (path / "vocab.txt").write_text("\n".join(tokens[i] for i in range(1030)))
    BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    config = GroundingDinoConfig(
        backbone_config={
            "model_type": "swin", "image_size": 32, "embed_dim": 8, "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 2, 2], "window_size": 4, "out_indices": [2, 3, 4],
        },
        text_config={
            "model_type": "bert", "vocab_size": 1030, "hidden_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 16,
        },
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, num_queries=12,
    )  # fmt: skip
    GroundingDinoForObjectDetection(config).save_pretrained(path)
    size = {"shortest_edge": 64, "longest_edge": 128}
    GroundingDinoImageProcessor(size=size).save_pretrained(path)


def made(folders, kind: str, **args) -> OpenDetector:
    return OpenDetector(kind, model=folders[kind], device="cpu", **args)


def random_images(count: int = 3, height: int = 48, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def alike(one, other) -> bool:
    return len(one) == len(other) and all(
        a.name == b.name and np.allclose(a.box, b.box, atol=1e-3) and abs(a.score - b.score) < 1e-5
        for a, b in zip(one, other, strict=True)
    )


def test_boxes_lie_in_the_image_and_have_the_names_that_were_asked_for(folders):
    for kind in KINDS:
        asked = [("cat",), ("computer mouse", "tv remote"), ("computer mouse", "tv remote")]
        found = made(folders, kind, floor=0.0)(random_images(), asked)
        assert [bool(one) for one in found] == [True] * 3
        for names, one in zip(asked, found, strict=True):
            for item in one:
                left, top, right, bottom = item.box
                assert item.name in names and 0 <= item.score <= 1
                assert 0 <= left < right <= 64 and 0 <= top < bottom <= 48


def test_an_image_has_the_same_objects_alone_and_among_others(folders):
    for kind in KINDS:
        images = random_images(5)
        asked = [("cat",)] * 3 + [("tv remote", "cat"), ("cat",)]
        find = made(folders, kind, floor=0.0, batch=2)
        together = find(images, asked)
        assert all(together)
        assert all(
            alike(find(images[i : i + 1], asked[i : i + 1])[0], together[i]) for i in range(5)
        )


def test_what_is_less_sure_than_the_floor_is_not_reported(folders):
    for kind in KINDS:
        asked = [("cat", "tv remote")]
        every = made(folders, kind, floor=0.0, overlap=1.0)(random_images(1), asked)[0]
        scores = sorted(item.score for item in every)
        floor = (scores[len(scores) // 2] + scores[len(scores) // 2 - 1]) / 2
        kept = made(folders, kind, floor=floor, overlap=1.0)(random_images(1), asked)[0]
        assert sorted(item.score for item in kept) == [score for score in scores if score > floor]


def test_the_network_reads_red_green_blue_and_half_precision_finds_about_the_same(folders):
    image, asked = np.zeros((1, 64, 64, 3), np.uint8), [("cat", "tv remote")]
    image[..., 0] = 255
    for kind in KINDS:
        model = made(folders, kind).model
        pixels = model.pixels(image)["pixel_values"][0].mean((1, 2))
        mean, std = (
            torch.tensor(getattr(model.processor, key)) for key in ("image_mean", "image_std")
        )
        assert torch.allclose(pixels, (torch.tensor([1.0, 0.0, 0.0]) - mean) / std, atol=1e-5)
        full, half = (
            made(folders, kind, floor=0.0, overlap=1.0, dtype=dtype)(random_images(1), asked)[0]
            for dtype in ("fp32", "bf16")
        )
        # Half precision has eight bits: scores move by a few hundredths in so wild a network.
        assert len(half) == pytest.approx(len(full), rel=0.3)
        assert max(i.score for i in half) == pytest.approx(max(i.score for i in full), abs=0.1)


def scripted(boxes: list, scores: list, **args) -> OpenDetector:
    """A detector whose network answers with these boxes (xyxy) and scores by class."""
    find = OpenDetector("owlv2", **args)
    find.find = lambda model, images, classes: (
        torch.tensor([boxes] * len(images)).float(),
        torch.tensor([scores] * len(images)),
    )
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


def test_owlv2_boxes_are_shares_of_the_longer_side(folders):
    """The image is padded to a square, so a box in its middle is not in the square's."""
    find = made(folders, "owlv2")
    network = find.model.network

    class Middle:
        device, config = network.device, network.config

        def __call__(self, pixel_values, **inputs):
            boxes = torch.tensor([[[0.5, 0.25, 0.5, 0.25]]])
            return type("Output", (), {"pred_boxes": boxes, "logits": torch.tensor([[[4.0]]])})

    find.model.__dict__["network"] = Middle()
    (found,) = find(random_images(1, 48, 96), [("cat",)])
    assert found[0].box == pytest.approx((24, 12, 72, 36))


def test_a_grounding_dino_class_is_scored_by_its_own_tokens(folders):
    find = made(folders, "grounding_dino", floor=0.0)
    network = find.model.network
    seen = {}

    class Scripted:
        device = network.device

        def __call__(self, input_ids, **inputs):
            seen["ids"] = input_ids[0].tolist()
            logits = torch.full((1, 2, 256), -torch.inf)
            logits[0, 0, 1] = 2.0  # cat
            logits[0, 1, 3], logits[0, 1, 4] = 1.0, 3.0  # computer mouse
            boxes = torch.tensor([[[0.25, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0]]])
            return type("Output", (), {"pred_boxes": boxes, "logits": logits})

    find.model.__dict__["network"] = Scripted()
    (found,) = find(random_images(1, 64, 96), [("cat", "computer mouse")])
    words = find.model.tokenizer.convert_ids_to_tokens(seen["ids"])
    assert words == ["[CLS]", "cat", ".", "computer", "mouse", ".", "[SEP]"]
    by_name = {item.name: item for item in found}
    assert by_name["cat"].box == (0, 0, 48, 64) and by_name["computer mouse"].box[0] == 48
    sigmoid = torch.tensor([2.0, 1.0, 3.0]).sigmoid()
    assert by_name["cat"].score == pytest.approx(sigmoid[0].item())
    assert by_name["computer mouse"].score == pytest.approx(sigmoid[1:].mean().item())


def test_kinds_are_known_and_a_detector_is_cheap_to_make():
    assert "network" not in Owlv2Detector().model.__dict__
    assert GroundingDinoDetector(threshold=0.4).counting_threshold == 0.4
    with pytest.raises(ValueError, match="owlv2, grounding_dino"):
        OpenDetector("yolo")
