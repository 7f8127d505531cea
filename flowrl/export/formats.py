"""`flowrl export`: copy a run's LoRA, convert it for ComfyUI, merge it, or push it to the Hub."""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import (
    FILE,
    Factors,
    check_header,
    layers_of,
    lora_file,
    merge_lora,
    read_lora,
    stack_outputs,
    swap_halves,
)
from flowrl.config import Config, load_config
from flowrl.errors import UserError
from flowrl.export.hub import open_repository, push
from flowrl.training.checkpoint import CONFIG
from flowrl.utils.digests import seal
from flowrl.utils.files import sync_files, sync_folder, write_bytes

SUFFIX = ".safetensors"
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints


def recipe_of(source: str | Path) -> Config | None:
    """Return the configuration beside a LoRA, or of the run whose checkpoint it is, if any."""
    folder = lora_file(source).resolve().parent
    run = [folder.parent.parent] if folder.parent.name == CHECKPOINTS else []
    found = next((f / CONFIG for f in (folder, *run) if (f / CONFIG).is_file()), None)
    return found and load_config(found)


def export_diffusers(source: str, to: Path) -> Path:
    """Copy the LoRA, whose file holds its strength, to a folder or a file; return the file."""
    path = to if to.suffix == SUFFIX else to / FILE
    _check_free(path)
    check_header(source)
    write_bytes(path, lora_file(source).read_bytes())
    return path


def export_comfyui(source: str, to: Path, *, backbone: str | None) -> Path:
    """Write the LoRA with ComfyUI's keys to a file, or into a folder under the run's name."""
    check_header(source)
    state, strength = read_lora(source)
    family = backbone or _family(source, state)
    check_family(family)
    file = lora_file(source).resolve()
    name = file.parent.name if file.name == FILE else file.stem
    path = to if to.suffix == SUFFIX else to / f"{name}{SUFFIX}"
    _check_free(path)
    header = {"format": "pt", "flowrl": f"a LoRA for {family} with ComfyUI's keys"}
    write_bytes(path, seal(save(comfyui_state(state, strength, family), metadata=header)))
    return path


def _family(source: str, state: dict[str, Any]) -> str:
    """Return the run's family, or that of layers that only one family has, else raise UserError."""
    recipe = recipe_of(source)
    if recipe is not None:
        return recipe.pipeline.backbone
    if any(name.startswith("single_transformer_blocks.") for name in state):
        return "flux"
    if any(".attn1." in name for name in state):
        return "sana"
    second = any(".attn2." in name for name in state)  # SANA has these, too, but no plain one
    if second and any(".attn." in name for name in state):
        return "sd3"
    families = "SD3's or SANA's" if second else "SD3's or FLUX's"
    raise UserError(
        f"{source} has no {CONFIG} beside it, and its layers may be {families}: add --backbone sd3 "
        f"or --backbone {'sana' if second else 'flux'}"
    )


def export_merged(
    source: str, to: Path, *, base: str | None, revision: str | None, dtype: str | None
) -> Path:
    """Write the pipeline with the LoRA merged into its weights, atomically; return its folder.

    base, revision, dtype: None is the run's.
    """
    _check_free(to)
    check_header(source)
    recipe = recipe_of(source)
    if base is None:
        if recipe is None:
            raise UserError(f"{source} has no {CONFIG} beside it: add --base PIPELINE")
        base, revision = recipe.pipeline.path, revision or recipe.pipeline.revision
    dtype = dtype or (recipe.pipeline.dtype if recipe else "bf16")
    pipeline = load_pipeline(base, dtype=dtype, device="cpu", revision=revision)
    merge_lora(pipeline, source)
    to.resolve().parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=to.resolve().parent, prefix=f".{to.name}.", suffix=".tmp"))
    try:
        _save(pipeline, scratch)
        sync_files(scratch)
        scratch.chmod(0o755)
        scratch.rename(to.resolve())
        sync_folder(to.resolve().parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return to


def _save(pipeline: Any, folder: Path) -> None:
    for part in pipeline.components.values():
        if hasattr(part, "parameters"):
            for parameter in part.parameters():  # safetensors takes no other layout in memory
                parameter.data = parameter.data.contiguous()
    pipeline.save_pretrained(folder, safe_serialization=True)
    for path in folder.rglob("*.json"):  # the path it was loaded from is of no use elsewhere
        values = json.loads(path.read_text("utf-8"))
        if isinstance(values, dict) and Path(str(values.get("_name_or_path", ""))).is_absolute():
            del values["_name_or_path"]
            path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")


def export_hub(source: str, *, repository: str | None, private: bool) -> str:
    """Upload the public files of a run's folder; return the address."""
    folder = Path(source)
    if not (folder / FILE).is_file():
        raise UserError(f"--format hub takes a run's folder with {FILE}, got {source}")
    check_header(folder)
    recipe = load_config(folder / CONFIG) if (folder / CONFIG).is_file() else None
    name = repository or (recipe and recipe.run.hub_model_id) or folder.resolve().name
    return push(folder, open_repository(name, private=private))


def _check_free(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    if path.exists():
        raise UserError(f"{path} is there already: give --to another place, or remove it")


# --- a LoRA with ComfyUI's keys: layers as the original checkpoints name and fuse them -----------

PREFIX = "diffusion_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer of diffusers is in the original checkpoint."""

    layer: str  # the original's name
    part: int = 0  # which of its parts
    shares: tuple[int, ...] = (1,)  # relative widths of the parts' outputs; (1,) is one part
    swapped: bool = False  # the halves of its outputs change places


QKV = (1, 1, 1)
QKV_MLP = (1, 1, 1, 4)  # FLUX.1's feed-forward is four times as wide


def _qkv(
    names: str, layer: str, shares: tuple[int, ...] = QKV
) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    return {names.format(letter): (layer, part, shares) for part, letter in enumerate("qkv")}


# In a block: diffusers' name -> the original's name, part and shares.
SD3_BLOCK = {
    **_qkv("attn.to_{}", "x_block.attn.qkv"),
    "attn.to_out.0": ("x_block.attn.proj", 0, (1,)),
    **_qkv("attn.add_{}_proj", "context_block.attn.qkv"),
    "attn.to_add_out": ("context_block.attn.proj", 0, (1,)),
    **_qkv("attn2.to_{}", "x_block.attn2.qkv"),
    "attn2.to_out.0": ("x_block.attn2.proj", 0, (1,)),
    "norm1.linear": ("x_block.adaLN_modulation.1", 0, (1,)),
    "norm1_context.linear": ("context_block.adaLN_modulation.1", 0, (1,)),
    "ff.net.0.proj": ("x_block.mlp.fc1", 0, (1,)),
    "ff.net.2": ("x_block.mlp.fc2", 0, (1,)),
    "ff_context.net.0.proj": ("context_block.mlp.fc1", 0, (1,)),
    "ff_context.net.2": ("context_block.mlp.fc2", 0, (1,)),
}
FLUX_BLOCK = {
    **_qkv("attn.to_{}", "img_attn.qkv"),
    "attn.to_out.0": ("img_attn.proj", 0, (1,)),
    **_qkv("attn.add_{}_proj", "txt_attn.qkv"),
    "attn.to_add_out": ("txt_attn.proj", 0, (1,)),
    "norm1.linear": ("img_mod.lin", 0, (1,)),
    "norm1_context.linear": ("txt_mod.lin", 0, (1,)),
    "ff.net.0.proj": ("img_mlp.0", 0, (1,)),
    "ff.net.2": ("img_mlp.2", 0, (1,)),
    "ff_context.net.0.proj": ("txt_mlp.0", 0, (1,)),
    "ff_context.net.2": ("txt_mlp.2", 0, (1,)),
}
FLUX_SINGLE = {
    **_qkv("attn.to_{}", "linear1", QKV_MLP),
    "proj_mlp": ("linear1", 3, QKV_MLP),
    "proj_out": ("linear2", 0, (1,)),
    "norm.linear": ("modulation.lin", 0, (1,)),
}
BLOCKS = {  # family -> diffusers' list of blocks -> the original's, and what a block holds
    "sd3": {"transformer_blocks": ("joint_blocks", SD3_BLOCK)},
    "flux": {
        "transformer_blocks": ("double_blocks", FLUX_BLOCK),
        "single_transformer_blocks": ("single_blocks", FLUX_SINGLE),
    },
}
TIME, TEXT = "time_text_embed.timestep_embedder", "time_text_embed.text_embedder"
GUIDANCE = "time_text_embed.guidance_embedder"
OUTSIDE = {  # the blocks
    "sd3": {
        "context_embedder": "context_embedder",
        f"{TIME}.linear_1": "t_embedder.mlp.0",
        f"{TIME}.linear_2": "t_embedder.mlp.2",
        f"{TEXT}.linear_1": "y_embedder.mlp.0",
        f"{TEXT}.linear_2": "y_embedder.mlp.2",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
    },
    "flux": {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        f"{TIME}.linear_1": "time_in.in_layer",
        f"{TIME}.linear_2": "time_in.out_layer",
        f"{TEXT}.linear_1": "vector_in.in_layer",
        f"{TEXT}.linear_2": "vector_in.out_layer",
        f"{GUIDANCE}.linear_1": "guidance_in.in_layer",
        f"{GUIDANCE}.linear_2": "guidance_in.out_layer",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
    },
}
SWAPPED = "norm_out.linear"


def check_family(family: str) -> None:
    """Raise UserError unless ComfyUI loads LoRAs of the family."""
    if family == "sana":
        raise UserError(
            "ComfyUI has no LoRA path for SANA: load the LoRA with diffusers "
            "(pipe.load_lora_weights), or export with --format merged"
        )
    if family not in BLOCKS:
        raise UserError(
            f"the backbone is {family!r}, but ComfyUI's names are known for {', '.join(BLOCKS)}: "
            "export with --format diffusers or merged"
        )


def find_place(name: str, family: str) -> Place:
    """Return where the original keeps diffusers' layer `name`; raise UserError if unknown."""
    if name in OUTSIDE[family]:
        return Place(layer=OUTSIDE[family][name], swapped=name == SWAPPED)
    match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
    blocks, layers = BLOCKS[family].get(match[1], ("", {})) if match else ("", {})
    if match is None or match[3] not in layers:
        raise UserError(
            f"the LoRA adapts {name}, which has no place in ComfyUI's {family}: export with "
            "--format diffusers or merged"
        )
    layer, part, shares = layers[match[3]]
    return Place(layer=f"{blocks}.{match[2]}.{layer}", part=part, shares=shares)


def comfyui_state(state: Mapping[str, Tensor], strength: float, family: str) -> dict[str, Tensor]:
    """Return the tensors of ComfyUI's file for a diffusers LoRA with PEFT's names.

    The change of each original layer is exactly that of its parts stacked, zero for a part without
    LoRA. strength: alpha / rank of all layers. Raises UserError for an unknown family or layer.
    """
    check_family(family)
    fused: dict[str, tuple[Place, dict[int, Factors]]] = {}
    for name, factors in layers_of(state).items():
        at = find_place(name, family)
        # The last SD3 block normalises its text by shift and scale alone, like the last layer.
        last = name.endswith("norm1_context.linear") and len(factors[1]) == 2 * factors[0].shape[1]
        whole = swap_halves(factors) if at.swapped or last else factors
        fused.setdefault(at.layer, (at, {}))[1][at.part] = whole
    found: dict[str, Tensor] = {}
    for layer, (at, parts) in fused.items():
        down, up = _fuse(parts, at.shares)
        found[f"{PREFIX}{layer}.lora_A.weight"] = down.contiguous()
        found[f"{PREFIX}{layer}.lora_B.weight"] = up.contiguous()
        found[f"{PREFIX}{layer}.alpha"] = torch.tensor(strength * len(down))
    return found


def _fuse(parts: Mapping[int, Factors], shares: Sequence[int]) -> Factors:
    if len(shares) == 1:
        return parts[0]
    part, (_, up) = next(iter(parts.items()))
    width = len(up) // shares[part]
    return stack_outputs([parts.get(i) for i in range(len(shares))], [width * s for s in shares])
