"""The architecture with random weights, small, saved and loaded by the real code."""

import numpy as np
import pytest
import torch
from flowrl_rewards.detectors.mask2former import Mask2FormerDetector

NAMES = ("cat", "mouse", "sofa")
CLASSES = ("cat", "computer mouse", "couch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network whose masks are spread and whose scores differ."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    torch.manual_seed(0)
    backbone = SwinConfig(
        image_size=32, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=16, dim_feedforward=16, encoder_layers=1, decoder_layers=2,
        num_attention_heads=2, num_queries=12, id2label=dict(enumerate(NAMES)),
        label2id={name: i for i, name in enumerate(NAMES)},
    )  # fmt: skip
    network = Mask2FormerForUniversalSegmentation(config)
    network.class_predictor.weight.data.mul_(20)
    for name, parameter in network.named_parameters():
        if "mask_embedder" in name or "mask_projection" in name:
            parameter.data.mul_(3)
    path = tmp_path_factory.mktemp("mask2former")
    network.save_pretrained(path)
    size = {"shortest_edge": 64, "longest_edge": 128}
    Mask2FormerImageProcessor(size=size, size_divisor=32).save_pretrained(path)
    return str(path)


def made(folder: str, **args) -> Mask2FormerDetector:
    small = {"shortest": 64, "longest": 128}
    return Mask2FormerDetector(folder, classes=CLASSES, device="cpu", **small | args)


def random_images(count: int = 3, height: int = 48, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def seeing(find: Mask2FormerDetector, masks) -> Mask2FormerDetector:
    """The detector with a network that finds one computer mouse, on the masks of its pixels."""
    from transformers.models.mask2former.modeling_mask2former import (
        Mask2FormerForUniversalSegmentationOutput as Output,
    )

    def network(pixel_values):
        classes = torch.full((len(pixel_values), 12, 4), -20.0)
        classes[:, :, 3], classes[:, 0, 1], classes[:, 0, 3] = 20, 20, -20
        return Output(class_queries_logits=classes, masks_queries_logits=masks(pixel_values))

    network.device, network.config = find.network.device, find.network.config
    find.__dict__["network"] = network
    return find


def test_objects_have_boxes_around_their_masks_and_names_as_geneval_has_them(folder):
    found = made(folder)(random_images())
    assert len(found) == 3 and all(found)
    for item in (item for one in found for item in one):
        left, top, right, bottom = map(int, item.box)
        assert item.name in CLASSES and 0.05 <= item.score <= 1
        assert item.mask.shape == (48, 64) and item.mask.dtype == bool
        assert 0 <= left < right <= 64 and 0 <= top < bottom <= 48
        inside = item.mask[top:bottom, left:right]
        assert inside.sum() == item.mask.sum() > 0
        assert inside[0].any() and inside[-1].any() and inside[:, 0].any() and inside[:, -1].any()


def test_an_image_has_the_same_objects_alone_and_among_others(folder):
    images, find = random_images(5), made(folder)
    for i, together in enumerate(made(folder, batch=3)(images)):
        (alone,) = find(images[i : i + 1])
        assert [(one.box, one.name) for one in alone] == [(one.box, one.name) for one in together]
        scores = [one.score for one in together]
        assert [one.score for one in alone] == pytest.approx(scores, abs=1e-5)


def test_masks_lie_where_the_network_saw_the_object(folder):
    """A network whose one object is wherever the image is bright, in the lower right."""

    def bright(pixels):
        light = pixels.mean(1, keepdim=True)
        return torch.where(light > 0, 20.0, -20.0)[..., ::4, ::4].repeat(1, 12, 1, 1)

    image = np.zeros((1, 48, 96, 3), np.uint8)  # not square: each axis has its own scale
    image[:, 24:, 64:] = 255
    (found,) = seeing(made(folder), bright)(image)
    assert [item.name for item in found] == ["computer mouse"]
    assert found[0].box == pytest.approx((64, 24, 96, 48), abs=2)


def test_images_keep_their_proportions_as_published(folder):
    """512 x 512 is seen as 800 x 800, a panorama by its longer edge; sides become multiples of 32
    by zeros that no mask keeps."""
    shapes = []

    def everything(pixels):
        shapes.append(tuple(pixels.shape[2:]))
        assert pixels[..., -1, -1].abs().max() == 0 or shapes[-1][0] % 32 == 0
        return torch.full((1, 12, shapes[-1][0] // 4, shapes[-1][1] // 4), 20.0)

    find = seeing(Mask2FormerDetector(folder, classes=CLASSES, device="cpu"), everything)
    for (height, width), expected in [((512, 512), (800, 800)), ((100, 400), (352, 1344))]:
        (found,) = find(np.full((1, height, width, 3), 200, np.uint8))
        assert shapes[-1] == expected
        assert found[0].box == (0, 0, width, height) and found[0].mask.shape == (height, width)
