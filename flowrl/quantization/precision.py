"""What a device can multiply, and what a requested precision becomes on it: said, never guessed.

Nothing here changes the numbers that were asked for: a precision that the device lacks is an
error, and emulation runs only under its own name. `auto` alone chooses. Only `capability_of`
loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flowrl.errors import UserError

if TYPE_CHECKING:
    import torch

PRECISIONS = ("auto", "nvfp4", "fp8", "bf16", "nvfp4-emulated")
Format = Literal["nvfp4", "fp8", "bf16"]
FORMATS: tuple[Format, ...] = ("nvfp4", "fp8", "bf16")  # from few bits to many

# First NVIDIA generation whose tensor cores multiply the format: Blackwell, and Ada with Hopper.
FIRST: dict[Format, tuple[int, int]] = {"nvfp4": (10, 0), "fp8": (8, 9)}
KERNELS: dict[Format, str] = {
    "nvfp4": "scaled_mm-nvfp4",
    "fp8": "scaled_mm-fp8-rowwise",
    "bf16": "plain",
}
EMULATION = "emulated-nvfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What decides a precision: the device and the torch on it."""

    device: str  # cuda, cpu, mps, ...
    name: str  # the product's name, or the kind of device where torch knows none
    compute: tuple[int, int] | None  # NVIDIA's compute capability; None for everything else
    scaled_mm: bool  # whether torch.nn.functional.scaled_mm exists


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a run computes in. format bf16: not quantised, in the network's own dtype."""

    requested: str
    format: Format
    backend: str  # the product that computes it, see `backend_of`
    native: bool  # computed by the device's own units for this format
    reason: str  # one sentence for the log


def capability_of(device: torch.device) -> Capability:
    """Ask torch about a device; it has to exist."""
    import torch

    public = hasattr(torch.nn.functional, "scaled_mm")
    if device.type != "cuda":
        return Capability(device=device.type, name=device.type, compute=None, scaled_mm=public)
    # ROCm builds call their devices cuda too, and number other generations in the same way.
    compute = None if torch.version.hip else torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return Capability(device="cuda", name=name, compute=compute, scaled_mm=public)


def resolve(requested: str, capability: Capability, *, where: str = "") -> Resolved:
    """The format, the product and the reason for one of PRECISIONS on a device.

    auto: the lowest precision that is native. where: the option's section, for errors. Raises
    UserError for an unknown precision and for one that the device lacks, with those that it has.
    """
    if requested not in PRECISIONS:
        name = option_name(where, "precision")
        raise UserError(f"unknown {name} {requested!r}: one of {', '.join(PRECISIONS)}")
    if requested == "nvfp4-emulated":
        return _emulated(capability)
    if requested == "auto":
        best, *_ = native_formats(capability)
        why = [f"{f}: {lack}" for f in FIRST if (lack := _lack(f, capability))]
        why = [f"the lowest precision that {_named(capability)} multiplies natively", *why]
        return _native(requested, best, "; ".join(why))
    if requested == "bf16":
        return _native(requested, "bf16", "not quantised: in the network's own dtype")
    format: Format = "nvfp4" if requested == "nvfp4" else "fp8"
    if lack := _lack(format, capability):
        name = option_name(where, "precision")
        raise UserError(f"{name} {requested} {lack}: use {_alternatives(capability, format)}")
    return _native(requested, format, f"native on {_named(capability)}")


def option_name(where: str, name: str) -> str:
    """An option of the section `where` as people write it; its bare name where there is none.

    A command's options have "--" for a section.
    """
    if where == "--":
        return f"--{name.replace('_', '-')}"
    return f"{where}.{name}" if where else name


def native_formats(capability: Capability) -> tuple[Format, ...]:
    """The formats that a device multiplies itself, the lowest first; bf16 is always one."""
    return (*(format for format in FIRST if not _lack(format, capability)), "bf16")


def named(resolved: Resolved) -> str:
    """The precision by the name that options use: nvfp4, nvfp4-emulated, fp8 or bf16."""
    return resolved.format if resolved.native else f"{resolved.format}-emulated"


def shown(resolved: Resolved, dtype: str = "") -> str:
    """The same for people: bf16 quantises nothing, in whatever `dtype` the network computes."""
    if resolved.format != "bf16":
        return named(resolved)
    return f"not quantised ({dtype})" if dtype else "not quantised"


def next_lower(resolved: Resolved, capability: Capability) -> Resolved | None:
    """One step down the ladder of speed, native only: nvfp4, fp8 where the device has it, bf16.

    None after bf16, which is not quantised at all.
    """
    above = FORMATS[FORMATS.index(resolved.format) + 1 :]
    native = native_formats(capability)
    for format in above:
        if format in native:
            return _native(resolved.requested, format, f"one step down from {named(resolved)}")
    return None


def _emulated(capability: Capability) -> Resolved:
    native = "nvfp4" in native_formats(capability)
    reason = "the numbers of nvfp4 from ordinary products: not faster than bf16"
    if native:
        reason += f"; {_named(capability)} has nvfp4 itself: ask for nvfp4"
    return Resolved(
        requested="nvfp4-emulated", format="nvfp4", backend=EMULATION, native=False, reason=reason
    )


def _native(requested: str, format: Format, reason: str) -> Resolved:
    return Resolved(
        requested=requested, format=format, backend=KERNELS[format], native=True, reason=reason
    )


def _lack(format: Format, capability: Capability) -> str:
    """What keeps a device from a quantised format, as the end of a sentence; "" when nothing."""
    major, minor = FIRST[format]
    if capability.compute is None or capability.compute < (major, minor):
        return (
            f"needs an NVIDIA GPU of compute capability {major}.{minor} or higher, "
            f"this is {_named(capability)}"
        )
    if not capability.scaled_mm:
        return "needs torch.nn.functional.scaled_mm, which only newer versions of torch have"
    return ""


def _alternatives(capability: Capability, format: Format) -> str:
    others = [f for f in native_formats(capability) if f != format]
    names = " or ".join([*others, "auto"])
    return f"{names}, or nvfp4-emulated, which has nvfp4's numbers but is not faster than bf16"


def _named(capability: Capability) -> str:
    if capability.compute is None:
        return capability.name
    major, minor = capability.compute
    return f"{capability.name} of compute capability {major}.{minor}"
