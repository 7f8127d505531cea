import numpy as np
import pytest
import torch
from flowrl_rewards.networks.clip import Clip
from PIL import Image

PROMPTS = ["a red circle", "two blue stars", "a red circle", "a green ring"]


@pytest.fixture(scope="module")
def clip(tiny_clip):
    return Clip(tiny_clip, reward="a test", device="cpu")


@pytest.fixture(scope="module")
def reference(tiny_clip):
    """transformers' own forward, with the processor that works on PIL's images."""
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model, tokenizer = (
        CLIPModel.from_pretrained(tiny_clip),
        AutoTokenizer.from_pretrained(tiny_clip),
    )
    size = model.config.vision_config.image_size
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )

    def logits(images, prompts):
        levels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
        pixels = processor([Image.fromarray(image) for image in levels], return_tensors="np")
        text = tokenizer(prompts, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            return model(
                pixel_values=torch.from_numpy(np.array(pixels["pixel_values"])),
                input_ids=text["input_ids"],
                attention_mask=text["attention_mask"],
            ).logits_per_image

    return logits


def test_row_by_row_is_the_diagonal_of_transformers_own_forward(clip, reference, random_images):
    images = random_images(4)
    expected = reference(images, PROMPTS).diagonal()
    torch.testing.assert_close(clip.scale * clip.cosine(images, PROMPTS), expected)
    assert expected.std() > 1  # the networks look at what they are shown


def test_long_prompts_are_cut_with_a_warning(clip):
    long = "a red circle " * 9
    with pytest.warns(UserWarning, match=r"a test reads 14 tokens .* prompt of 29"):
        cut = clip.texts([long])
    assert torch.equal(cut, clip.texts([long])) and cut.isfinite().all()
