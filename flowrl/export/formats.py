"""`flowrl export`: a run's LoRA for diffusers, for ComfyUI, merged into its pipeline, or pushed."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save

from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import FILE, check_header, lora_file, merge_lora, read_lora
from flowrl.config import Config, load_config
from flowrl.errors import UserError
from flowrl.export.comfyui import check_family, comfyui_state
from flowrl.export.hub import open_repository, push
from flowrl.training.checkpoint import CONFIG
from flowrl.utils.files import sync_files, sync_folder, write_bytes

SUFFIX = ".safetensors"
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints


def recipe_of(source: str | Path) -> Config | None:
    """The configuration beside a LoRA, or of the run whose checkpoint it is; None where there is
    none."""
    folder = lora_file(source).resolve().parent
    run = [folder.parent.parent] if folder.parent.name == CHECKPOINTS else []
    for place in (folder, *run):
        if (place / CONFIG).is_file():
            return load_config(place / CONFIG)
    return None


def export_diffusers(source: str, to: Path) -> Path:
    """Copy the LoRA file to a folder or a file -> the file. It says its own strength."""
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
    place = lora_file(source).resolve()
    name = place.parent.name if place.name == FILE else place.stem
    path = to if to.suffix == SUFFIX else to / f"{name}{SUFFIX}"
    _check_free(path)
    header = {"format": "pt", "flowrl": f"a LoRA for {family} with ComfyUI's keys"}
    write_bytes(path, save(comfyui_state(state, strength, family), metadata=header))
    return path


def _family(source: str, state: dict[str, Any]) -> str:
    """Of the run, or by layers that only one family has. Raises UserError when neither tells."""
    recipe = recipe_of(source)
    if recipe is not None:
        return recipe.pipeline.backbone
    if any(name.startswith("single_transformer_blocks.") for name in state):
        return "flux"
    if any(".attn1." in name for name in state):
        return "sana"
    second = any(".attn2." in name for name in state)  # of SANA too, which has no plain one
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
    """Write the whole pipeline with the LoRA added to its weights -> its folder.

    base, revision, dtype: None is the run's. Written beside and renamed, so that the folder is
    whole or not there.
    """
    _check_free(to)
    check_header(source)
    recipe = recipe_of(source)
    if base is None and recipe is None:
        raise UserError(
            f"{source} has no {CONFIG} beside it that names its pipeline: add --base PIPELINE"
        )
    if base is None:
        assert recipe is not None
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
    for path in folder.rglob("*.json"):  # where it was loaded from is of no use elsewhere
        values = json.loads(path.read_text("utf-8"))
        if isinstance(values, dict) and Path(str(values.get("_name_or_path", ""))).is_absolute():
            del values["_name_or_path"]
            path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")


def export_hub(source: str, *, repository: str | None, private: bool) -> str:
    """Upload what is public of a run's folder -> its address."""
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
