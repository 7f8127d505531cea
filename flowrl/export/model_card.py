"""The model card of a run: what the LoRA is, what it scores, and the lines that load it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowrl.backbones.loading import DTYPES
from flowrl.backbones.lora_files import FILE, file_prefix
from flowrl.export.gallery import GalleryRow, gallery_grid
from flowrl.training.evaluate import EvaluationComparison
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.images import fit, png
from flowrl.utils.plots import Points, draw_curves
from flowrl.utils.templates import render

TAGS = ["text-to-image", "diffusers", "lora", "template:sd-lora", "reinforcement-learning"]
FOLDER = "card"  # the card's images, beside README.md
# Python lines that load a LoRA from a folder, by what loads it, see `loader_of`. Without the file's
# name diffusers asks the Hub for it, and offline refuses.
LOADERS = {
    "pipeline": f"pipe.load_lora_weights({{folder!r}}, weight_name={FILE!r})",
    "network": "pipe.transformer.load_lora_adapter("
    f"{{folder!r}}, prefix=None, weight_name={FILE!r})",
    "flowrl": "load_lora(pipe, {folder!r})",
}
PROMPT = "a photo of a cat"  # of the code, where a card has no images
WIDGETS = 4
GRID = 8
WIDGET_SIDE = 256  # pixels: smaller images are enlarged, else the Hub blurs them


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a model card says. Texts are plain: the template escapes them."""

    base_model: str  # a Hub id, or a name for people when `on_hub` is false
    on_hub: bool
    load_from: str  # Python: the argument of from_pretrained, for example a quoted Hub id
    imports: str = ""  # Python lines that `load_from` needs
    loader: str = "pipeline"  # what loads the LoRA, see LOADERS
    output: str = "images"  # where the images are in the call's result
    dtype: str = "fp32"  # torch's in short: fp32, bf16, fp16
    call: Mapping[str, int | float | str] = field(default_factory=dict)  # pipe(prompt, **call)
    license: Mapping[str, str]  # the entries in the header, as the base model has them
    method: str  # for example "Flow-GRPO"
    weights: str  # which weights the root holds: "EMA" or "policy"
    step: int  # after how many iterations
    stopped: str = ""  # a sentence that says why no more, when something ended the run early
    command: str  # what makes the run again
    config: str  # the resolved configuration, YAML
    evaluation: str = ""  # what the summary was measured on, no full stop
    hacking: str = ""  # a sentence: what the radar says
    planted: str = ""  # what is wrong with the base on purpose, of a built-in pipeline
    summary: Sequence[EvaluationComparison] = ()
    curves: Mapping[str, Points] = field(default_factory=dict)
    rows: Sequence[GalleryRow] = ()


def write_card(folder: Path | str, card: Card) -> Path:
    """Write `README.md` and its images under `card/`; return the path of README.md."""
    folder = Path(folder)
    images = {}
    if card.rows:
        shown = GRID * len({row.note for row in card.rows})
        images["before-after.png"] = gallery_grid(card.rows[:shown], across=4)
    if card.curves:
        images["curve.png"] = draw_curves(card.curves)
    for i, row in enumerate(widgets(card), 1):
        aligned = row.images[-1]
        images[f"aligned-{i}.png"] = png(fit(aligned, max(WIDGET_SIDE, *aligned.size)))
    for name, data in images.items():
        write_bytes(folder / FOLDER / name, data)
    header = yaml.safe_dump(front_matter(card), sort_keys=False, allow_unicode=True)
    values = {"card": card, "header": header, "code": loading_code(folder, card), "folder": FOLDER}
    path = folder / "README.md"
    write_text(path, render("card.md.j2", values))
    return path


def front_matter(card: Card) -> dict[str, Any]:
    """Return the Hub's metadata, without keys whose value is unknown."""
    header: dict[str, Any] = {"tags": TAGS, "library_name": "diffusers"}
    header["pipeline_tag"] = "text-to-image"
    if card.on_hub:
        header |= {"base_model": card.base_model, "base_model_relation": "adapter"}
    header |= card.license
    if card.rows:
        header["widget"] = [
            {"text": row.prompt, "output": {"url": f"{FOLDER}/aligned-{i}.png"}}
            for i, row in enumerate(widgets(card), 1)
        ]
    return header


def loader_of(pipeline: Any) -> str:
    """Return what loads a LoRA of a pipeline: its class, its network's class, or flowrl."""
    if file_prefix(type(pipeline)):
        return "pipeline"
    return "network" if hasattr(pipeline.transformer, "load_lora_adapter") else "flowrl"


def widgets(card: Card) -> list[GalleryRow]:
    """Return the first rows, of different images, that the Hub shows."""
    return [row for row in card.rows if row.note == card.rows[0].note][:WIDGETS]


def loading_code(folder: Path, card: Card) -> str:
    """Return Python that loads base and LoRA, and generates the first prompt."""
    prompt = card.rows[0].prompt if card.rows else PROMPT
    arguments = [f"prompt={prompt!r}", *(f"{name}={value!r}" for name, value in card.call.items())]
    imports = ["from diffusers import DiffusionPipeline", *card.imports.splitlines()]
    if card.loader == "flowrl":
        imports.append("from flowrl import load_lora")
    load = f"DiffusionPipeline.from_pretrained({card.load_from})"
    if card.dtype != "fp32":  # of a size for a GPU
        imports = ["import torch", *imports]
        load = f'{load[:-1]}, dtype={DTYPES[card.dtype]}).to("cuda")'
    if folder.resolve().is_relative_to(Path.cwd()):  # as one would type it here
        folder = folder.resolve().relative_to(Path.cwd())
    return "\n".join(
        [
            *imports,
            "",
            f"pipe = {load}",
            LOADERS[card.loader].format(folder=folder.as_posix()),
            f"image = pipe({', '.join(arguments)}).{card.output}[0]",
        ]
    )
