import sys

import numpy as np
import pytest
import torch
from flowrl_rewards.detectors.object_model import ObjectModel


def made(model: str = "nobody/no-such-model", **args) -> ObjectModel:
    settings = {"family": "Owlv2", "kind": "Owlv2ForObjectDetection", "device": "cpu"}
    return ObjectModel(model, **(settings | {"dtype": "fp32"} | args))


def test_images_are_resized_with_pillow_whether_torchvision_is_there_or_not(tmp_path):
    from transformers import Owlv2ImageProcessor

    Owlv2ImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    model = made(str(tmp_path))
    assert type(model.processor).__name__ in ("Owlv2ImageProcessorPil", "Owlv2ImageProcessor")
    assert "Torchvision" not in "".join(c.__name__ for c in type(model.processor).__mro__)
    model.network = torch.nn.Linear(1, 1)
    model.network.device = torch.device("cpu")
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model.dtype = dtype
        pixels = model.pixels(np.zeros((2, 20, 30, 3), np.uint8))["pixel_values"]
        assert pixels.dtype == expected and pixels.shape == (2, 3, 32, 32)


def test_what_is_missing_is_said_in_one_sentence(monkeypatch):
    with pytest.raises(FileNotFoundError, match="hf download nobody/no-such-model"):
        made().network  # noqa: B018
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match="the detector Owlv2 needs scipy"):
        made().network  # noqa: B018
