"""The shapes of a recipe's pipeline, without its weights: published, or read from its folder."""

import json
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.loading import TINY, pipeline_path
from flowrl.build.backbone import FAMILIES
from flowrl.errors import UserError
from flowrl.planning.model_specs import SIZES, Size, size_of_checkpoint
from flowrl.planning.pictures import CLIP_TOKENS, keep_wide
from flowrl.planning.text_encoders import TextEncoder

OWN = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")  # of files


def size_for(path: str) -> Size:
    """Of a checkpoint's name on the Hub, a built-in pipeline, or a folder.

    Raises UserError for a name that is not known, and a folder that is no pipeline of a family
    that flowrl has.
    """
    if (name := size_of_checkpoint(path)) is not None:
        return SIZES[name]
    folder = Path(pipeline_path(path))
    if not (folder / "model_index.json").is_file():
        known = ", ".join([*(size.checkpoint for size in SIZES.values()), *TINY])
        raise UserError(
            f"the memory of {path} cannot be planned without its shapes: known are {known}; for "
            "another checkpoint give the folder it was downloaded to as pipeline.path"
        )
    return _of_folder(folder)


def _of_folder(folder: Path) -> Size:
    """What the `config.json` files of a pipeline say; its weights are not read."""
    index = _json(folder / "model_index.json")
    family = FAMILIES.get(index["_class_name"])
    if family is None:
        raise UserError(
            f"{folder} is a {index['_class_name']}, whose memory cannot be planned: expected one "
            f"of {', '.join(FAMILIES)}"
        )
    transformer, vae = (_json(folder / part / "config.json") for part in ("transformer", "vae"))
    blocks = vae.get("block_out_channels") or vae["encoder_block_out_channels"]
    factor, channels = 2 ** (len(blocks) - 1), vae["latent_channels"]
    native = vae["sample_size"] // factor if family == "flux" else transformer["sample_size"]
    width = transformer["caption_channels" if family == "sana" else "joint_attention_dim"]
    return Size(
        family=family,
        pipeline=index["_class_name"],
        checkpoint=str(folder),
        transformer=index["transformer"][1],
        config=_public(transformer),
        autoencoder=index["vae"][1],
        autoencoder_config=_public(vae),
        autoencoder_params=_parameters(index["vae"][1], _public(vae)),
        scheduler=index["scheduler"][1],
        scheduler_config=_public(_json(folder / "scheduler" / "scheduler_config.json")),
        text_encoders=tuple(_encoders(folder, index)),
        channels=channels,
        factor=factor,
        text_tokens=text_tokens(family, 300 if family == "sana" else 256),
        text_width=width,
        pooled_width=transformer.get("pooled_projection_dim"),
        billions=_parameters(index["transformer"][1], _public(transformer)) / 1e9,
        pixels=native * factor,
    )


def text_tokens(family: str, longest: int) -> int:
    """What the transformer attends to where the longest text has so many tokens."""
    return longest + (CLIP_TOKENS if family == "sd3" else 0)


def own_pixels(size: Size) -> int:
    """A picture's side where nothing is asked for: the pipeline's own."""
    if "sample_size" in size.config:
        return size.config["sample_size"] * size.factor
    return size.autoencoder_config["sample_size"]


def _encoders(folder: Path, index: dict[str, Any]) -> list[TextEncoder]:
    import transformers

    found = []
    for name, (library, made) in ((n, v) for n, v in index.items() if n.startswith("text_encoder")):
        if library is None:
            continue
        config = _json(folder / name / "config.json")
        kind = type(transformers.CONFIG_MAPPING[config["model_type"]]())
        # CLIP's text part has a configuration of its own.
        config_class = "CLIPTextConfig" if made.startswith("CLIP") else kind.__name__
        own = {key: value for key, value in config.items() if key not in OWN}
        with torch.device("meta"):
            network = getattr(transformers, made)(getattr(transformers, config_class)(**own))
        if made.startswith("CLIP"):
            own["max_position_embeddings"] = CLIP_TOKENS  # no more than that are counted anywhere
        found.append(
            TextEncoder(
                name=name,
                model=made,
                config_class=config_class,
                config=own,
                parameters=sum(p.numel() for p in network.parameters()),
                wide=keep_wide(network),
            )
        )
    return found


def _parameters(made: str, config: dict[str, Any]) -> int:
    import diffusers

    with torch.device("meta"):
        network = getattr(diffusers, made)(**config)
    return sum(p.numel() for p in network.parameters())


def _public(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
