"""Attention by diffusers' switch: what can be chosen, and what the sentences say otherwise."""

import copy

import pytest

from flowrl.backbones.loading import load_pipeline, set_attention
from flowrl.errors import UserError


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


def test_native_attention_is_taken_by_every_family_and_kept_by_copies(networks):
    for family in ["sd3", "flux", "sana"]:
        network = copy.deepcopy(networks[family])
        set_attention(network, "native")
        assert chosen(network) <= {"native", None}
    network = copy.deepcopy(networks["flux"])
    set_attention(network, "_Native_Math")
    assert chosen(network) == chosen(copy.deepcopy(network)) == {"_native_math"}


def test_a_choice_that_cannot_work_is_refused_by_name(networks):
    for family, name, words in (
        ("flux", "flush", "'flush'.*native or null"),
        ("sd3", "flash", "native or null"),
        ("sana", "flash", "native or null"),
    ):
        with pytest.raises(UserError, match=words):
            set_attention(networks[family], name)
