"""`flowrl export`: copy a run's LoRA, convert it to other keys, merge it, or push it to the Hub."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save

from flowrl.backbones.loading import load_pipeline, outline
from flowrl.backbones.lora_files import fit_lora, merge_lora
from flowrl.backbones.lora_formats import FILE, lora_bytes, lora_file, open_lora
from flowrl.backbones.original_layers import comfyui_state, kohya_state
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
    files = (place / CONFIG for place in (folder, *run))
    recipe = next((file for file in files if file.is_file()), None)
    return recipe and load_config(recipe)


def _check_base(base: str | None, revision: str | None, source: str) -> tuple[str, str | None]:
    """Return the pipeline that a LoRA belongs to: as the user says, or as its run says."""
    if base is not None:
        return base, revision
    recipe = recipe_of(source)
    if recipe is None:
        raise UserError(f"{source} has no {CONFIG} beside it: add --base PIPELINE")
    return recipe.pipeline.path, revision or recipe.pipeline.revision


def export_lora(
    source: str, to: Path, *, keys: Literal["diffusers", "comfyui", "kohya"] = "diffusers",
    base: str | None = None, revision: str | None = None, alpha: float | None = None,
) -> Path:  # fmt: skip
    """Write the LoRA to a file, or to a folder under its usual name; return the file.

    Args:
        keys: whose names of the layers. ComfyUI reads its own and kohya's, for the original
            checkpoint; diffusers reads kohya's for some classes.
        base: the pipeline; needed where neither the keys nor a run name the layers.
    """
    lora = open_lora(source, alpha=alpha)
    file = lora.path.resolve()
    stem = file.parent.name if file.name == FILE else file.stem
    name = FILE if keys == "diffusers" else f"{stem}{SUFFIX}"
    path = to if to.suffix == SUFFIX else to / name
    _check_free(path)
    if keys == "diffusers" and base is None and lora.make not in ("kohya", "ComfyUI"):
        write_bytes(path, lora_bytes(lora))
        return path
    kind, network = outline(*_check_base(base, revision, source))
    lora = fit_lora(lora, network, kind)
    data = lora_bytes(lora)
    if keys != "diffusers":
        tensors = comfyui_state(lora.state, lora.scales, type(network).__name__)
        tensors = kohya_state(tensors) if keys == "kohya" else tensors
        header = {"format": "pt", "flowrl": f"a LoRA for {kind.__name__} with {keys} keys"}
        data = seal(save(tensors, metadata=header))
    write_bytes(path, data)
    return path


def export_merged(
    source: str,
    to: Path,
    *,
    base: str | None,
    revision: str | None,
    dtype: str | None,
    alpha: float | None = None,
) -> Path:
    """Write the pipeline with the LoRA merged into its weights, atomically; return its folder.

    base, revision, dtype: None is the run's.
    """
    _check_free(to)
    lora = open_lora(source, alpha=alpha)
    recipe = recipe_of(source)
    base, revision = _check_base(base, revision, source)
    dtype = dtype or (recipe.pipeline.dtype if recipe else "bf16")
    pipeline = load_pipeline(base, dtype=dtype, device="cpu", revision=revision)
    merge_lora(pipeline, lora)
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
        raise UserError(f"--to hub takes a run's folder with {FILE}, got {source}")
    open_lora(folder)  # raises for a damaged file
    recipe = recipe_of(folder)
    name = repository or (recipe and recipe.run.hub_model_id) or folder.resolve().name
    return push(folder, open_repository(name, private=private))


def _check_free(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    if path.exists():
        raise UserError(f"{path} exists already: give -o another place, or remove it")
