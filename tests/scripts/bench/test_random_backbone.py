"""Networks of published make with random weights, tiny ones here."""

import pytest
import torch

from flowrl.errors import UserError
from flowrl.planning.model_specs import MODEL_SPECS
from flowrl.sampling.rollout import with_network
from flowrl.trajectory import Conditioning
from scripts.bench.random_model import RandomBackbone

CPU = torch.device("cpu")


@pytest.fixture
def backbone(monkeypatch, tiny_size):
    def make(name: str, pixels: int = 64, **options) -> RandomBackbone:
        monkeypatch.setitem(MODEL_SPECS, name, tiny_size(name))
        return RandomBackbone(name, device=CPU, dtype=torch.float32, pixels=pixels, **options)

    return make


def inputs(backbone: RandomBackbone, rows: int = 3) -> tuple[torch.Tensor, Conditioning]:
    x = torch.randn(rows, *backbone.latent_shape(), generator=torch.Generator().manual_seed(0))
    return x, backbone.encode([str(i) for i in range(rows)], [""] * rows)


@torch.no_grad()
def test_velocities_follow_all_inputs_row_by_row_and_decode(backbone):
    for name in ["sd3.5-large", "sd3.5-medium", "flux.1-dev", "sana-1.6b"]:
        made = backbone(name)
        x, cond = inputs(made)
        v = made.velocity(x, torch.tensor(0.5), cond)
        assert v.shape == x.shape and bool(v.isfinite().all())
        assert not torch.allclose(v, made.velocity(x.flip(0), torch.tensor(0.5), cond))
        assert not torch.allclose(v, made.velocity(x, torch.tensor(0.9), cond))
        other = Conditioning(tensors={n: t.flip(0) for n, t in cond.tensors.items()})
        assert not torch.allclose(v, made.velocity(x, torch.tensor(0.5), other))
    for name in ["sd3.5-large", "flux.1-dev", "sana-1.6b"]:
        made = backbone(name)
        x, cond = inputs(made)
        whole = made.velocity(x, torch.tensor(0.5), cond)
        alone = made.velocity(x[1:2], torch.tensor(0.5), cond.take(torch.tensor([1])))
        torch.testing.assert_close(whole[1:2], alone, atol=1e-5, rtol=1e-4)
    for name in ["sd3.5-large", "flux.1-dev", "sana-1.6b"]:
        made = backbone(name)
        images = made.decode(inputs(made)[0])
        assert images.shape == (3, 3, *made.image_size()) and images.dtype == torch.float32
        assert 0 <= images.min() < images.max() <= 1
    for name, middle in [("sd3.5-large", 0.707), ("flux.1-dev", 0.61), ("sana-1.6b", 0.75)]:
        sigmas = backbone(name).sigmas(10)
        assert sigmas.shape == (11,) and 0.999 < sigmas[0] <= 1 and sigmas[-1] == 0
        assert bool((sigmas.diff() < 0).all())
        # 16 tokens shift FLUX's less than the others' fixed 3 does; SD3's ends higher than SANA's.
        assert sigmas[5].item() == pytest.approx(middle, abs=0.02)


@torch.no_grad()
def test_flux_gets_its_tokens_as_diffusers_packs_them(backbone):
    from diffusers import FluxPipeline

    made, seen = backbone("flux.1-dev"), {}
    x, cond = inputs(made)
    forward = made.transformer.forward

    def watched(**given):
        seen.update(given)
        return forward(**given)

    made.transformer.forward = watched
    v = made.velocity(x, torch.tensor(0.5), cond)
    assert torch.equal(seen["hidden_states"], x)
    ids = FluxPipeline._prepare_latent_image_ids(3, 4, 4, "cpu", torch.float32)
    assert torch.equal(seen["img_ids"], ids)
    assert torch.equal(v, forward(**seen)[0])
    z = FluxPipeline._unpack_latents(x, 64, 64, 8)
    vae = made.family.pipeline.vae
    z = z / vae.config.scaling_factor + vae.config.shift_factor
    images = (vae.decode(z, return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1)
    torch.testing.assert_close(made.decode(x), images, atol=1e-5, rtol=0)


@torch.no_grad()
def test_guidance_doubles_the_forward_where_it_is_no_input(backbone):
    rows: list[int] = []

    def hook(module, args, given):
        rows.append(len(given.get("hidden_states", *args)))

    for name, forwards in [("sd3.5-large", 6), ("flux.1-dev", 3), ("sana-1.6b", 6)]:
        plain, made = backbone(name), backbone(name, guidance=3.0)
        x, cond = inputs(made)
        made.transformer.register_forward_pre_hook(hook, with_kwargs=True)
        rows.clear()
        v = made.velocity(x, torch.tensor(0.5), cond)
        assert rows == [forwards]
        unguided = plain.velocity(x, torch.tensor(0.5), plain.encode(["a"] * 3, [""] * 3))
        assert not torch.allclose(v, unguided, atol=1e-3)


def test_a_copy_computes_with_its_network_and_bad_sizes_are_refused(backbone):
    made, other = backbone("sana-1.6b"), backbone("sana-1.6b", seed=1)
    x, cond = inputs(made)
    both = with_network(made, other.transformer)
    with torch.no_grad():
        v, own = (one.velocity(x, torch.tensor(0.5), cond) for one in (both, made))
        expected = other.velocity(x, torch.tensor(0.5), cond)
    assert torch.equal(v, expected) and not torch.equal(v, own)
    with pytest.raises(UserError, match="images of 40 pixels a side: expected a multiple of 16"):
        backbone("flux.1-dev", pixels=40)
