"""Attention by diffusers' switch: what can be chosen, and what the sentences say otherwise."""

import copy

import pytest
import torch

from flowrl import attention
from flowrl.attention import set_attention
from flowrl.errors import UserError
from flowrl.pipelines import load_pipeline

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def networks():
    return {
        family: load_pipeline(f"tiny-{family}", dtype="fp32", device="cpu").transformer
        for family in ("sd3", "flux", "sana")
    }


@pytest.fixture(autouse=True)
def as_before():
    """diffusers also keeps the last choice for all networks of the process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before, _ = _AttentionBackendRegistry.get_active_backend()
    yield
    _AttentionBackendRegistry.set_active_backend(before)


def chosen(network):
    processors = (getattr(module, "processor", None) for module in network.modules())
    return {getattr(p, "_attention_backend", None) for p in processors if p is not None}


@pytest.mark.parametrize("family", ["sd3", "flux", "sana"])
def test_native_is_taken_by_every_family(networks, family):
    network = copy.deepcopy(networks[family])
    set_attention(network, "native", CPU)
    assert chosen(network) <= {"native", None}


def test_the_layers_of_flux_and_of_its_copies_hold_the_choice(networks):
    network = copy.deepcopy(networks["flux"])
    set_attention(network, "_Native_Math", CPU)
    assert chosen(network) == chosen(copy.deepcopy(network)) == {"_native_math"}


def test_an_unknown_name_is_answered_with_those_of_diffusers(networks):
    with pytest.raises(UserError, match=r"'flush', expected null or .*flash, .*native, .*xformers"):
        set_attention(networks["flux"], "flush", CPU)


@pytest.mark.parametrize("name", ["flash", "xformers", "sage"])
def test_what_needs_a_gpu_says_so_on_the_cpu(networks, name):
    with pytest.raises(UserError, match=f"'{name}', which needs a GPU"):
        set_attention(networks["flux"], name, CPU)


@pytest.mark.parametrize("family", ["sd3", "sana"])
def test_a_network_that_cannot_be_told_says_so(networks, family):
    with pytest.raises(UserError, match="always computes attention by torch's .* native or null"):
        set_attention(networks[family], "flash", CUDA)


def test_a_missing_library_is_named(networks, monkeypatch):
    from diffusers.models import attention_dispatch

    monkeypatch.setattr(attention_dispatch, "_CAN_USE_XFORMERS_ATTN", False)
    with pytest.raises(UserError, match="cannot be used here.*install `xformers"):
        set_attention(networks["flux"], "xformers", CUDA)


def test_what_works_anywhere_is_known_to_diffusers():
    assert set(attention.ANYWHERE) < set(attention._names())
