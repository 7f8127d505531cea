import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flowrl_rewards.detectors.clip_colors import COLORS, TEMPLATES, ClipColors, cut_out
from flowrl_rewards.geneval_rules import Detection

pytestmark = pytest.mark.filterwarnings("ignore:.*reads 14 tokens")


def random_image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)


def thing(box=(10, 5, 30, 25), mask=None, name="cat") -> Detection:
    return Detection(box=box, score=0.9, name=name, mask=mask)


def test_the_object_is_cut_out_and_grey_where_its_mask_is_not():
    image, mask = random_image(), np.zeros((40, 60), bool)
    mask[5:25, 10:20] = True
    cut = cut_out(image, thing(mask=mask))
    assert cut.shape == (20, 20, 3)
    assert (cut[:, :10] == image[5:25, 10:20]).all() and (cut[:, 10:] == 0x99).all()
    # Without a mask the background stays, and a cut holds at least one pixel.
    assert (cut_out(image, thing()) == image[5:25, 10:30]).all()
    for box in ((3.2, 3.2, 3.4, 3.4), (-5, -5, 2.5, 2.5), (59.5, 39.5, 70, 70)):
        assert cut_out(image, thing(box)).size > 0


def test_the_colour_is_the_nearest_mean_of_the_three_templates(tiny_clip):
    """Against transformers' own forward pass with one text at a time."""
    from transformers import AutoTokenizer, CLIPModel

    find = ClipColors(tiny_clip, device="cpu")
    boxes = {  # as large as the network's input
        "red": (0, 0, 32, 32), "star": (20, 5, 52, 37), "cat": (28, 8, 60, 40),
        "blue": (5, 2, 37, 34),
    }  # fmt: skip
    found = [thing(box, name=name) for name, box in boxes.items()]
    names = find(random_image(), found)

    model = CLIPModel.from_pretrained(tiny_clip)
    tokenizer = AutoTokenizer.from_pretrained(tiny_clip)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    for detection, name in zip(found, names, strict=True):
        cut = torch.from_numpy(cut_out(random_image(), detection)).permute(2, 0, 1) / 255
        pixels = ((cut - mean) / std)[None]
        cosines = []
        for color in COLORS:
            texts = []
            for template in TEMPLATES:
                text = template.format(color=color, name=detection.name)
                told = tokenizer(text, truncation=True, max_length=14, return_tensors="pt")
                with torch.no_grad():
                    out = model(**told, pixel_values=pixels)
                texts.append(out.text_embeds[0])
            text = F.normalize(torch.stack(texts).mean(0), dim=0)
            cosines.append((text @ out.image_embeds[0]).item())
        assert name == COLORS[int(np.argmax(cosines))]
    assert len(set(names)) > 1  # else the comparison would say little
