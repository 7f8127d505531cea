"""Which precision runs where: every cell is the documented one, and an error names the others."""

import itertools

import pytest
import torch

from flowrl.errors import UserError
from flowrl.quantization.backends import (
    PRECISIONS,
    Capability,
    capability_of,
    native_formats,
    resolve,
)


def gpu(name: str, compute: tuple[int, int] | None, scaled_mm: bool = True) -> Capability:
    return Capability(device="cuda", name=name, compute=compute, scaled_mm=scaled_mm)


DEVICES = {
    "cpu": Capability(device="cpu", name="cpu", compute=None, scaled_mm=True),
    "mps": Capability(device="mps", name="mps", compute=None, scaled_mm=True),
    "rocm": gpu("AMD Instinct MI300X", None),
    "ampere": gpu("NVIDIA A100", (8, 0)),
    "consumer ampere": gpu("NVIDIA GeForce RTX 3090", (8, 6)),
    "ada": gpu("NVIDIA GeForce RTX 4090", (8, 9)),
    "hopper": gpu("NVIDIA H100", (9, 0)),
    "blackwell": gpu("NVIDIA B200", (10, 0)),
    "consumer blackwell": gpu("NVIDIA GeForce RTX 5090", (12, 0)),
    "blackwell, old torch": gpu("NVIDIA B200", (10, 0), scaled_mm=False),
}
NATIVE = dict.fromkeys(DEVICES, ("bf16",)) | {
    "ada": ("fp8", "bf16"),
    "hopper": ("fp8", "bf16"),
    "blackwell": ("nvfp4", "fp8", "bf16"),
    "consumer blackwell": ("nvfp4", "fp8", "bf16"),
}


def test_every_cell_is_the_documented_format_or_an_error_that_names_the_others():
    for device, requested in itertools.product(DEVICES, PRECISIONS):
        capability, native = DEVICES[device], NATIVE[device]
        assert native_formats(capability) == native
        if requested in ("nvfp4", "fp8") and requested not in native:
            with pytest.raises(UserError) as error:
                resolve(requested, capability)
            lack, _, alternatives = str(error.value).partition(": use ")
            named = alternatives.partition(", or nvfp4-emulated")[0].split(" or ")
            assert set(named) == {*native, "auto"}, (device, requested)
            assert capability.name in lack or "torch" in lack, (device, requested)
            continue
        found = resolve(requested, capability)
        expected = {"auto": native[0], "nvfp4-emulated": "nvfp4"}.get(requested, requested)
        assert (found.requested, found.format) == (requested, expected), (device, requested)
        assert found.native == (requested != "nvfp4-emulated")


def test_a_rocm_device_is_not_taken_for_an_nvidia_generation(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert native_formats(capability_of(torch.device("cuda"))) == ("bf16",)
