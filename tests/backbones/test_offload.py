"""Parts that visit the device: there while they work, untouched afterwards."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowrl.backbones.offload import (
    are_freed,
    encoders_of,
    moved_to,
    place_pipeline,
)
from flowrl.backbones.pipeline import PipelineBackbone

META, CPU = torch.device("meta"), torch.device("cpu")  # meta stands for a device


class Pipeline(SimpleNamespace):
    @property
    def components(self):
        return vars(self)


def network():
    found = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    found[1].weight = found[0].weight
    return found


def tensors(module):
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


def test_a_visitor_is_on_the_device_inside_and_home_after():
    module = network()
    before = tensors(module)
    with moved_to([module], META):
        assert {t.device for t in tensors(module).values()} == {META}
        assert module[0].weight is module[1].weight
        assert isinstance(module[0].weight, nn.Parameter) and not module[0].weight.requires_grad
    after = tensors(module)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert module.state_dict().keys() == network().state_dict().keys()
    module = network()
    with pytest.raises(RuntimeError), moved_to([module], META):
        raise RuntimeError
    assert {t.device for t in tensors(module).values()} == {CPU}
    # Who is there already is left alone.
    module = network()
    weight = module[0].weight
    with moved_to([module], CPU):
        assert module[0].weight is weight


def test_encoders_stay_on_the_cpu_and_the_autoencoder_visits(load_tiny):
    pipeline = place_pipeline(load_tiny(), META, ("text_encoder", "vae"))
    with PipelineBackbone(pipeline).autoencoder_on_device():
        assert pipeline.vae.device == META
    assert pipeline.vae.device == pipeline.text_encoder.device == CPU
    pipeline = Pipeline(
        transformer=network(), text_encoder=network(), text_encoder_2=network(), scheduler=object()
    )
    assert place_pipeline(pipeline, META, ("text_encoder",)) is pipeline
    devices = [getattr(pipeline, n)[0].weight.device for n in pipeline.components if n[0] == "t"]
    assert devices == [META, CPU, CPU]
    assert encoders_of(None) == [] and not are_freed(None)
    assert not are_freed(Pipeline(transformer=network()))
