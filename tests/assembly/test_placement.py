"""Every placement and release of a pipeline's parts in whole runs, on a device that is pretended.

Tensors that are moved to the device stay in the CPU's memory, but say that they are on it, and are
known as long as their storage lives.
"""

import weakref

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from flowrl import api

GET_DEVICE = torch.Tensor.device.__get__
HERE = torch.device("cpu:0")  # in calls, so that the CPU does what the device is asked for
DEVICE = torch.device("mps")


def here(value):
    """Return an argument with the CPU in place of the pretended device."""
    is_device = isinstance(value, torch.device) and value.type == DEVICE.type
    return HERE if is_device or value is DEVICE.type else value


def moved_to(args, kwargs):
    """Return the device that a call of Tensor.to names, None if it names none."""
    named = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.device | str)]
    return torch.device(named[0]) if named else None


class PretendedDevice(TorchFunctionMode):
    """Records which parts of pipelines have weights on the device, at every move and forward."""

    def __init__(self):
        super().__init__()
        self.held = {}  # address of a storage on the device -> its weak reference
        self.parts = []  # (name, weak reference to a module)
        self.seen = []  # names of the parts on the device, one set a moment
        self.worked = set()  # names of parts that computed there

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == GET_DEVICE:
            return DEVICE if self.has(args[0]) else func(*args)
        args = tuple(map(here, args))
        kwargs = {name: here(value) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        target = moved_to(args, kwargs) if func is torch.Tensor.to else None
        if target is None:
            return out
        if self.has(args[0]) != (target == HERE) and out is args[0]:
            out = out.clone()  # a copy elsewhere
        if target == HERE:
            self.hold(out)
            self.look()
        return out

    def hold(self, tensor):
        ref = StorageWeakRef(tensor.untyped_storage())
        self.held[ref.cdata] = ref

    def has(self, tensor):
        ref = self.held.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def on_device(self):
        alive = [(name, ref()) for name, ref in self.parts]
        return {n for n, p in alive if p is not None and any(map(self.has, p.parameters()))}

    def look(self):
        self.seen.append(self.on_device())

    def watch(self, name, module):
        self.parts.append((name, weakref.ref(module)))

        def before(*_):
            self.look()
            self.worked |= {name} & self.seen[-1]

        module.register_forward_pre_hook(before)


@pytest.fixture
def placements(monkeypatch):
    """Train and evaluate on the pretended device with these options -> what it recorded."""

    def run(config):
        device = PretendedDevice()
        register, runtime = DiffusionPipeline.register_modules, api.training_runtime

        def watched(self, **modules):
            for name, module in modules.items():
                if isinstance(module, nn.Module):
                    device.watch(name, module)
            register(self, **modules)

        def pretended(config):
            found = runtime(config)
            found.device = DEVICE
            return found

        monkeypatch.setattr(DiffusionPipeline, "register_modules", watched)
        monkeypatch.setattr(api, "training_runtime", pretended)
        with device:
            api.align(config)
        return device

    return run


FAMILIES = ["sd3", pytest.param("flux", marks=pytest.mark.slow),
            pytest.param("sana", marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoders", ["free", pytest.param("offload", marks=pytest.mark.slow)])
def test_encoders_and_transformer_are_never_on_the_device_together(
    tiny_config, placements, tmp_path, family, encoders
):
    config = tiny_config(
        pipeline={"path": f"tiny-{family}"},
        memory={"text_encoders": encoders, "vae": "offload"},
        rollout={"group_size": 2, "num_inference_steps": 2},
        evaluation={"prompts": "tiny:geneval:test", "num_images": 2, "num_inference_steps": 2},
        run={"iterations": 1, "output_dir": str(tmp_path / "run")},
    )
    device = placements(config)
    names = {name for name in set.union(*device.seen) if name.startswith("text_encoder")}
    assert names and names <= device.worked and "transformer" in device.worked
    assert not [seen for seen in device.seen if "transformer" in seen and names & seen]
    # The autoencoder is there for its turn, and not while texts are encoded.
    assert not [seen for seen in device.seen if "vae" in seen and names & seen]
    assert device.seen[-1] <= {"transformer", "vae"}
    assert {"transformer"} in device.seen and {"transformer", "vae"} in device.seen
