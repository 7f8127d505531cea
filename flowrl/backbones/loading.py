"""Load a diffusers pipeline (built in, a folder, or the Hub) and set its attention back end."""

import errno
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.families import FAMILIES, check_trainable, family_of
from flowrl.backbones.offload import place_pipeline
from flowrl.backbones.text_cache import index_file
from flowrl.errors import UserError, first_line
from flowrl.utils.untrusted import check_regular, read_json

MAX_JSON = 2**28  # bytes; tokenizers have tens of megabytes
TINY = tuple(family.built_in for family in FAMILIES.values() if family.built_in)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NETWORK = {
    "ConnectError", "ConnectionError", "NetworkError", "TimeoutException", "TimeoutError",
    "LocalEntryNotFoundError", "CachedRepoTreeNotFoundError", "RevisionResolutionError",
}  # fmt: skip


def pipeline_path(path: str) -> str:
    """Return the folder of a built-in pipeline; other paths and Hub names stay as they are."""
    return str(resources.files("flowrl") / "assets" / path) if path in TINY else path


def load_pipeline(
    path: str,
    *,
    dtype: str,
    device: torch.device | str | None,
    revision: str | None = None,
    rounding: Any = None,
    away: Sequence[str] = (),
    parts: Mapping[str, Any] | None = None,
) -> Any:
    """Load a diffusers pipeline onto a device, with its own progress bars off.

    Args:
        device: None leaves it where it was loaded.
        revision: of a pipeline from the Hub.
        rounding: diffusers' quantization_config.
        away: how the names of components begin that stay on the CPU.
        parts: components by name, in place of those of the pipeline; None leaves one out.

    Raises:
        UserError: there is no pipeline at `path`, or a revision of what is not from the Hub.
    """
    on_hub = path not in TINY and not Path(path).exists()
    if revision is not None and not on_hub:
        raise UserError(
            f"revision {revision!r} is given for {path!r}, which is a folder on this machine, but "
            "only pipelines from the Hub have revisions: leave it out, or set pipeline.revision "
            "to null"
        )
    if not on_hub:
        check_folder(Path(pipeline_path(path)))
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            pipeline_path(path),
            dtype=DTYPES[dtype],
            revision=revision,
            quantization_config=rounding,
            **(parts or {}),
        )
    except Exception as error:  # HTTP libraries have errors of their own, of no common class
        if on_hub and (message := hub_error_message(error, path, revision)):
            raise UserError(f"cannot load the pipeline: {message}") from error
        if not isinstance(error, (OSError, ValueError)):
            raise
        raise UserError(
            f"cannot load the pipeline {path!r}: {first_line(error)}; give a folder, a "
            f"Hub name that this machine can reach, or {', '.join(TINY)}"
        ) from error
    for name in family_of(type(pipeline).__name__).without:
        pipeline.register_modules(**{name: None})
    pipeline.set_progress_bar_config(disable=True)
    for tensor in (*pipeline.vae.parameters(), *pipeline.vae.buffers()):
        if tensor.ndim == 4:  # 2-d convolutions, which are faster in this layout; not a video's
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return pipeline if device is None else place_pipeline(pipeline, torch.device(device), away)


def check_pipeline(path: str, revision: str | None = None) -> None:
    """Check a pipeline's class before anything is loaded, where this machine has its index.

    Raises:
        UserError: diffusers has no such class, or flowrl cannot train it.
    """
    index = index_file(pipeline_path(path), revision)
    kind = read_json(index).get("_class_name") if index is not None else None
    if isinstance(kind, str):
        check_trainable(kind)
        diffusers_class(kind)


def diffusers_class(name: str) -> type:
    """Return a pipeline class of the installed diffusers. Raises UserError if it has none."""
    import diffusers

    kind = getattr(diffusers, name, None)
    if kind is None:
        raise UserError(f"diffusers {diffusers.__version__} has no {name}: install a newer one")
    return kind


def check_folder(folder: Path) -> None:
    """Check a pipeline's files before libraries open them by name.

    Raises UserError for what is no regular file, and for JSON that is damaged or nested too deeply.
    """
    check_regular(folder)
    for path in folder.rglob("*.json"):
        read_json(path, limit=MAX_JSON)


def outline(path: str, revision: str | None = None) -> tuple[type, torch.nn.Module]:
    """Return a pipeline's class and its network without weights, on the meta device.

    Raises UserError where there is no pipeline, or its network is no class of diffusers.
    """
    import diffusers

    try:
        if (folder := Path(pipeline_path(path))).is_dir():
            check_folder(folder)
        index: Any = diffusers.DiffusionPipeline.load_config(pipeline_path(path), revision=revision)
        kind, network = (
            getattr(diffusers, name) for name in (index["_class_name"], index["transformer"][1])
        )
        config = network.load_config(
            pipeline_path(path), subfolder="transformer", revision=revision
        )
        with torch.device("meta"):
            return kind, network.from_config(config)
    except Exception as error:  # of the Hub, of files, of classes
        message = hub_error_message(error, path, revision) or first_line(error)
        raise UserError(f"cannot read the pipeline {path!r}: {message}") from error


def is_offline() -> bool:
    """Whether the environment forbids requests to the Hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


# What to do by the kind of an error, the most specific first. Offline mode and a missing network
# look alike to libraries: NETWORK is either.
HUB_ERRORS = {
    "GatedRepoError": "{name} is gated: open https://huggingface.co/{name}, accept its licence, "
    "and set HF_TOKEN to a token of that account, or log in with hf auth login",
    "RevisionNotFoundError": "{name} has no revision {revision!r}: give a branch, tag or commit of "
    "https://huggingface.co/{name}/commits/main as pipeline.revision",
    "RepositoryNotFoundError": "the Hub shows no repository {name}: check the name, or if it is "
    "private set HF_TOKEN to a token that may read it",
    "no space": "no space is left on the disk that {name} is kept on: free some, or set HF_HOME to "
    "a folder on a larger one",
    "OfflineModeIsEnabled": "{name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch "
    "it: unset it, or download it first with hf download {name}{at}",
    "no network": "{name} is not on this machine, and the Hub cannot be reached: check the "
    "network, or download it where there is one with hf download {name}{at} and copy it",
}


def hub_error_message(error: BaseException, name: str, revision: str | None = None) -> str:
    """Return why `name` cannot be loaded from the Hub and what to do; "" for an unknown error.

    Libraries wrap the Hub's errors: the whole chain of causes counts. Classes are compared by name,
    since they have moved between modules from version to version.
    """
    kinds: set[str] = set()
    link: BaseException | None = error
    links: list[BaseException] = []
    while link is not None and link not in links:  # a chain may end in a circle
        links.append(link)
        kinds |= {kind.__name__ for kind in type(link).__mro__}
        if isinstance(link, OSError) and link.errno == errno.ENOSPC:
            kinds.add("no space")
        link = link.__cause__ or link.__context__
    if kinds & NETWORK:
        kinds.add("OfflineModeIsEnabled" if is_offline() else "no network")
    at = f" --revision {revision}" if revision else ""
    text = next((text for kind, text in HUB_ERRORS.items() if kind in kinds), "")
    return text.format(name=name, revision=revision, at=at)


TILE = 512  # pixels


def enable_vae_tiling(vae: Any) -> None:
    """Let an autoencoder work on images above TILE pixels a side in tiles. Raises UserError."""
    if not hasattr(vae, "enable_tiling"):
        raise UserError(
            f"memory.vae_tiling is true, but {type(vae).__name__} has no tiles: set it to false, "
            "and pipeline.decode_batch to 1"
        )
    vae.enable_tiling()
    if hasattr(vae, "tile_sample_min_size"):  # of AutoencoderKL, else the image's own size
        vae.tile_sample_min_size = TILE
        vae.tile_latent_min_size = TILE // 2 ** (len(vae.config.block_out_channels) - 1)


NATIVE = "native"  # torch's scaled_dot_product_attention


def set_attention(network: Any, name: str) -> None:
    """Set the attention back end of a diffusers transformer; copies of the network keep it.

    diffusers also takes the choice as the default of every other network in the process. Some
    networks have no switch and always call torch's own function.

    Raises:
        UserError: diffusers does not know the name, its library is missing, or the network has no
            switch for it.
    """
    parts = (getattr(module, "processor", None) for module in network.modules())
    if not any(hasattr(part, "_attention_backend") for part in parts):
        if name == NATIVE:
            return
        raise UserError(
            f"pipeline.attention is {name!r}, but diffusers' {type(network).__name__} "
            "computes attention by torch's scaled_dot_product_attention, which takes a flash "
            f"kernel by itself where there is one: set it to {NATIVE} or null"
        )
    try:
        network.set_attention_backend(name)
    except (RuntimeError, ImportError, ValueError) as error:  # in words that name the package
        raise UserError(
            f"pipeline.attention is {name!r}, which cannot be used here: "
            f"{first_line(error)}; or set it to {NATIVE} or null"
        ) from error


def enable_gradient_checkpointing(network: Any) -> None:
    """Recompute each block in the backward pass, to save memory. Raises UserError if it cannot."""
    if not getattr(network, "_supports_gradient_checkpointing", False):
        raise UserError(
            f"memory.gradient_checkpointing is true, but {type(network).__name__} has no such "
            "switch: set it to false"
        )
    network.enable_gradient_checkpointing()
