"""RLG on other networks than a transformer of flowrl's own pipelines: any with adapters of PEFT."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flowrl.backbones.guidance import RLG
from flowrl.errors import UserError
from flowrl.functional.sde import extrapolate


def inject(network: torch.nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    inject_adapter_in_model(config, network)


def test_other_networks_with_adapters_are_guided_or_refused():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    network.is_cache_enabled = True  # type: ignore[assignment]
    inject(network)
    with pytest.raises(UserError, match="disable_cache"), RLG(SimpleNamespace(unet=network)):
        pass
    # A list of outputs is combined one by one. Some transformers return a latent for each
    # image, since sizes may differ.

    class Ragged(torch.nn.Sequential):
        def forward(self, x: list[Tensor]) -> tuple[list[Tensor], str]:  # type: ignore[override]
            return [self[0](row) for row in x], "more"

    network, x = Ragged(torch.nn.Linear(2, 2)), [torch.randn(1, 2), torch.randn(3, 2)]
    base = network(x)[0]
    inject(network)
    expected = [extrapolate(b, a, 0.4) for b, a in zip(base, network(x)[0], strict=True)]
    with RLG(SimpleNamespace(transformer=network), 0.4):
        found, more = network(x)
    assert all(map(torch.equal, found, expected)) and more == "more"
    # Two denoisers are both guided. As of pipelines that change the network halfway.
    first, second = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    x = torch.randn(3, 2)
    bases = [network(x) for network in (first, second)]
    for network in (first, second):
        inject(network)
    pipeline = SimpleNamespace(transformer=first, transformer_2=second)
    expected = [extrapolate(b, n(x), 2.0) for b, n in zip(bases, (first, second), strict=True)]
    with RLG(pipeline, 2.0):
        assert torch.equal(first(x), expected[0]) and torch.equal(second(x), expected[1])
