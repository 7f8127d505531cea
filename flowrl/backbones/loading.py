"""Where a pipeline comes from: built in, a folder, or the Hub."""

import errno
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones import flux, sana
from flowrl.backbones.offload import place
from flowrl.errors import UserError

# --- What a pipeline's own call has to be told to draw as its backbone does --------------------


def own_call(pipeline: Any, negative: str = "") -> dict[str, int]:
    """Arguments of `pipeline(...)`, where its defaults are not those of flowrl's backbone.

    FLUX.1 is asked for the size of its autoencoder and SANA for that of its network, drawn as it
    is, since the calls default to 1024 pixels; sizes of a recipe go on top. Raises UserError for a
    negative prompt that the pipeline would ignore.
    """
    kind = type(pipeline).__name__
    if kind == "FluxPipeline":
        flux.check_negatives([negative])
        return _square(flux.own_side(pipeline))
    if kind == "SanaPipeline":
        return _square(sana.own_side(pipeline)) | {"use_resolution_binning": False}
    return {}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


# --- What goes wrong between here and the Hub, each as a sentence that says what to do ---------

NETWORK = {
    "ConnectError", "ConnectionError", "NetworkError", "TimeoutException", "TimeoutError",
    "LocalEntryNotFoundError", "CachedRepoTreeNotFoundError", "RevisionResolutionError",
}  # fmt: skip


def is_offline() -> bool:
    """Whether the environment forbids to ask the Hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def sentence(error: BaseException, name: str, revision: str | None = None) -> str:
    """Why `name` cannot be had from the Hub and what to do; "" when it is nothing of these.

    Libraries wrap what the Hub said, and fall back to files that are not there: all errors along
    the chain of causes are looked at, and the most telling kind counts, in the order below.
    Classes are known by their names, since they have moved between modules, and HTTP libraries,
    from version to version.
    """
    chain = list(_chain(error))
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{name} is gated: open https://huggingface.co/{name}, accept its licence, and set "
            "HF_TOKEN to a token of that account, or log in with hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return (
            f"{name} has no revision {revision!r}: give a branch, tag or commit of "
            f"https://huggingface.co/{name}/commits/main as pipeline.revision"
        )
    if "RepositoryNotFoundError" in kinds:
        return (
            f"the Hub shows no repository {name}: check the name, or if it is private set HF_TOKEN "
            "to a token that may read it"
        )
    if any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in chain):
        return (
            f"no space is left on the disk that {name} is kept on: free some, or set HF_HOME to a "
            "folder on a larger one"
        )
    # Without the network it is the same files that are missing: first whether it was forbidden.
    if "OfflineModeIsEnabled" in kinds or (is_offline() and kinds & NETWORK):
        return (
            f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it: unset it, or "
            f"download it first with hf download {name}{_of(revision)}"
        )
    if kinds & NETWORK:
        return (
            f"{name} is not on this machine, and the Hub cannot be reached: check the network, or "
            f"download it where there is one with hf download {name}{_of(revision)} and copy it"
        )
    return ""


def _of(revision: str | None) -> str:
    return f" --revision {revision}" if revision else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


# --- Where a pipeline comes from: built in, a folder, or the Hub -------------------------------

TINY = ("tiny-sd3", "tiny-flux", "tiny-sana")  # built in
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pipeline_path(path: str) -> str:
    """The folder of a built-in pipeline, or the path or Hub name as it is."""
    if path not in TINY:
        return path
    folder = resources.files("flowrl") / "assets" / path
    if not folder.is_dir():
        raise UserError(f"{path} is not installed with flowrl: make it with scripts/pretrain_tiny")
    return str(folder)


def load_pipeline(
    path: str,
    *,
    dtype: str,
    device: torch.device | str,
    revision: str | None = None,
    rounding: Any = None,
    away: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Any:
    """A diffusers pipeline on a device, with its own progress bars off.

    revision: of a pipeline from the Hub, which is asked with the environment's token. rounding:
    diffusers' quantization_config. away: how the names of components begin that stay on the CPU;
    without: names of those that are not loaded. Raises UserError when there is none at `path`,
    with what the Hub said in words, and for a revision of what is not from the Hub.
    """
    on_hub = path not in TINY and not Path(path).exists()
    if revision is not None and not on_hub:
        raise UserError(
            f"revision {revision!r} is given for {path!r}, which is a folder on this machine, but "
            "only pipelines from the Hub have revisions: leave it out, or set pipeline.revision "
            "to null"
        )
    from diffusers import DiffusionPipeline
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            pipeline_path(path),
            dtype=DTYPES[dtype],
            revision=revision,
            quantization_config=rounding,
            **dict.fromkeys(without),
        )
    except Exception as error:  # HTTP libraries have errors of their own, of no common class
        if on_hub and (told := sentence(error, path, revision)):
            raise UserError(f"cannot load the pipeline: {told}") from error
        if not isinstance(error, (OSError, ValueError)):
            raise
        raise UserError(
            f"cannot load the pipeline {path!r}: {str(error).splitlines()[0]}; give a folder, a "
            f"Hub name that this machine can reach, or {', '.join(TINY)}"
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.to(memory_format=torch.channels_last)  # its convolutions are faster for it
    return place(pipeline, torch.device(device), away)


# --- Who computes a network's attention: diffusers' back ends, by diffusers' own switches ------

NATIVE = "native"  # torch's scaled_dot_product_attention
XFORMERS = "xformers"
ANYWHERE = (NATIVE, "_native_math", "flex")  # the others need an accelerator


def set_attention(network: Any, name: str, device: torch.device) -> None:
    """Have a diffusers transformer compute its attention by one back end, in rollouts as in
    training; copies of the network keep it.

    diffusers also takes the choice as the process's own, for every network that was told none.
    Raises UserError for a name that diffusers does not know, a back end that the device cannot run
    or whose library is missing, and a network that cannot be told: of 0.42's transformers FLUX
    looks at diffusers' switch for back ends, SD3 has an older one for xformers alone, and SANA
    always calls torch's own function.
    """
    name = name.lower()
    known = _names()
    if name not in known:
        raise UserError(
            f"pipeline.attention is {name!r}, expected null or a back end of diffusers: "
            f"{', '.join(n for n in known if not n.startswith('_'))}"
        )
    if name not in ANYWHERE and device.type == "cpu":
        raise UserError(
            f"pipeline.attention is {name!r}, which needs a GPU, and this run is on the CPU: set "
            f"it to {NATIVE} or null"
        )
    switchable, joint = _switchable(network), _joint(network)
    if not switchable and name == NATIVE:
        return
    if not switchable and not (joint and name == XFORMERS):
        raise UserError(
            f"pipeline.attention is {name!r}, but diffusers' {type(network).__name__} "
            "computes attention by torch's scaled_dot_product_attention, which takes a flash "
            f"kernel by itself where there is one: set it to {NATIVE} or null"
            + f", or to {XFORMERS}"
            * joint
        )
    try:
        if switchable:
            network.set_attention_backend(name)
        else:
            network.enable_xformers_memory_efficient_attention()
    # In diffusers' words, which name the package; a ValueError of xformers where no GPU is.
    except (RuntimeError, ImportError, ValueError) as error:
        raise UserError(
            f"pipeline.attention is {name!r}, which cannot be used here: "
            f"{str(error).splitlines()[0].rstrip('.')}; or set it to {NATIVE} or null"
        ) from error


def _names() -> list[str]:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return [member.value for member in AttentionBackendName]


def _switchable(network: Any) -> bool:
    return any(hasattr(processor, "_attention_backend") for processor in _processors(network))


def _joint(network: Any) -> bool:
    """Whether all layers attend as SD3's do, whose processor alone has a twin of xformers that
    computes the same: SANA's linear attention would be replaced by another function."""
    from diffusers.models.attention_processor import JointAttnProcessor2_0

    found = _processors(network)
    return bool(found) and all(isinstance(p, JointAttnProcessor2_0) for p in found)


def _processors(network: Any) -> list[Any]:
    found = (getattr(module, "processor", None) for module in network.modules())
    return [processor for processor in found if processor is not None]


# --- Gradient checkpointing, by diffusers' own switch ------------------------------------------


def recompute_blocks(network: Any) -> None:
    """Have a diffusers transformer keep only the inputs of its blocks for the backward pass, which
    computes each block again; without gradients nothing changes. The gradients are the same.

    Raises UserError for a network that cannot.
    """
    if not getattr(network, "_supports_gradient_checkpointing", False):
        raise UserError(
            f"memory.gradient_checkpointing is true, but {type(network).__name__} has no such "
            "switch: set it to false"
        )
    network.enable_gradient_checkpointing()
