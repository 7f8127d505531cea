import pytest
import torch
from flowrl_rewards.aesthetic_v2_5 import FILE, MODEL, AestheticV25
from safetensors import safe_open
from torch import nn

SIDE, WIDTH = 28, 32
ASKED = (["any"] * 3, [{}] * 3)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    """A folder with a SigLIP of both towers, as the published one, a thousandth of its size."""
    from transformers import SiglipConfig, SiglipModel

    folder = tmp_path_factory.mktemp("siglip")
    tower = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = SiglipModel(SiglipConfig(
            text_config=tower | {"vocab_size": 40, "projection_size": WIDTH},
            vision_config=tower | {"image_size": SIDE, "patch_size": 14},
        ))  # fmt: skip
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "vision_model.head.probe" in set(file.keys())  # as published
    return folder, model.eval()


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head in its published layout: dropout has numbers of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = nn.Sequential(
            nn.Linear(WIDTH, 1024), nn.Dropout(0.5), nn.Linear(1024, 128), nn.Dropout(0.5),
            nn.Linear(128, 64), nn.Dropout(0.5), nn.Linear(64, 16), nn.Dropout(0.2),
            nn.Linear(16, 1),
        )  # fmt: skip
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    folder = tmp_path_factory.mktemp("head")
    torch.save({f"scoring_head.{k}": v for k, v in layers.state_dict().items()}, folder / FILE)
    return folder, layers.eval()


def test_it_is_the_published_head_on_the_unit_pooled_vector(siglip, head, random_images):
    images = random_images(3, SIDE, SIDE)
    with torch.no_grad():
        pooled = siglip[1].vision_model(pixel_values=images * 2 - 1).pooler_output
        expected = head[1](pooled / pooled.norm(dim=-1, keepdim=True)).squeeze(1)
    made = AestheticV25(str(head[0]), model=str(siglip[0]), device="cpu")
    before = torch.get_rng_state()
    scores = made(images, *ASKED)
    assert torch.equal(torch.get_rng_state(), before)
    assert scores.shape == (3,) and scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.01


def test_images_are_squashed_and_gradients_reach_every_pixel(
    siglip, head, random_images, right_slopes
):
    made = AestheticV25(str(head[0] / FILE), model=str(siglip[0]), device="cpu")
    assert made.differentiable is True
    right_slopes(lambda images: made(images, *ASKED), random_images(3, 40, 56))
    wide = random_images(1, 28, 84).requires_grad_()
    (gradient,) = torch.autograd.grad(made(wide, [""], [{}]).sum(), wide)
    assert gradient[..., :14].abs().sum() > 0 and gradient[..., -14:].abs().sum() > 0


def test_rewards_with_the_same_network_load_it_once_and_run_it_once(
    siglip, head, random_images, monkeypatch
):
    from transformers import SiglipVisionModel

    forwards = []
    real = SiglipVisionModel.forward
    monkeypatch.setattr(
        SiglipVisionModel, "forward", lambda *a, **k: forwards.append(1) or real(*a, **k)
    )
    rewards = [AestheticV25(str(head[0]), model=str(siglip[0]), device="cpu") for _ in range(2)]
    a, b = (reward(random_images(3), *ASKED) for reward in rewards)
    assert torch.equal(a, b) and len(forwards) == 1
    assert rewards[0]._network is rewards[1]._network


def test_a_missing_or_another_head_is_one_sentence(siglip, tmp_path, random_images):
    images = random_images(1)
    for absent in (None, str(tmp_path / "nowhere")):
        with pytest.raises(FileNotFoundError, match=f"needs the file {FILE}, .*as `head`") as told:
            AestheticV25(absent, model=str(siglip[0]), device="cpu")(images, [""], [{}])
        assert "AGPL-3.0" in str(told.value)
    made = AestheticV25(str(tmp_path), model=str(siglip[0]), device="cpu")
    for state, says in (
        ({"scoring_head.0.weight": torch.ones(4, 4)}, "Aesthetic v2.5 of widths 32-1024-128-64-16"),
        ({"scoring_head": nn.Linear(2, 2)}, "plain weights"),
    ):
        torch.save(state, tmp_path / FILE)
        with pytest.raises(ValueError, match=says) as told:
            made(images, [""], [{}])
        assert "\n" not in str(told.value)


def test_its_version_names_the_network():
    assert MODEL in AestheticV25().version
    assert AestheticV25(dtype="bf16").version != AestheticV25().version
