"""Generate images with a pipeline's own call, for `flowrl sample`, `benchmark` and `vote`."""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowrl.assembly.backbone import call_settings
from flowrl.backbones.call import call_arguments, default_guidance
from flowrl.backbones.guidance import RLG
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import load_lora
from flowrl.backbones.lora_formats import lora_bytes, open_lora
from flowrl.backbones.pipeline import PipelineBackbone, images_of
from flowrl.backbones.transfer import Transfer
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.scoring.files import METADATA, SAMPLES
from flowrl.training.checkpoint import CONFIG
from flowrl.utils.digests import digest
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import foreign_entries, write_bytes, write_text
from flowrl.utils.images import is_whole_png, png, to_pil
from flowrl.utils.progress import Steps, announced
from flowrl.utils.untrusted import read_text

SETTINGS = "drawn.json"  # beside the folders of prompts: how they were drawn


class Drawing:
    """A loaded pipeline with a LoRA, and the arguments of its call.

    Settings of the call that are None are those of the LoRA's run, else the pipeline's.

    Args:
        rlg: strength of the LoRA, see `flowrl.backbones.guidance`.
        transfer: a smaller pipeline, which gets the LoRA in place of this one, and the settings
            of the LoRA's run; see `flowrl.backbones.transfer`.

    Raises:
        UserError: for a LoRA that cannot be read, before the pipeline is loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        lora: str | None = None,
        lora_alpha: float | None = None,
        negative: str = "",
        guidance: float | None = None,
        steps: int | None = None,
        max_sequence_length: int | None = None,
        device: str = "auto",
        rlg: float | None = None,
        transfer: str | None = None,
        revision: str | None = None,
    ):
        self.rlg = rlg
        self.options = {"model": model, "negative": negative, "rlg": rlg, "revision": revision}
        self.small = None
        if transfer is not None:
            self.small = Drawing(
                transfer, lora=lora, lora_alpha=lora_alpha, negative=negative, guidance=guidance,
                max_sequence_length=max_sequence_length, device=device,
            )  # fmt: skip
            self.options["transfer"], lora = self.small.identity(), None
        self.lora = open_lora(lora, alpha=lora_alpha) if lora else None
        run_file = Path(lora) / CONFIG if lora else None
        config = load_config(run_file) if run_file and run_file.is_file() else None
        where = Runtime(device=device).device
        with announced(f"loading {model}"):
            dtype = "bf16" if where.type == "cuda" else "fp32"
            self.pipeline = load_pipeline(model, dtype=dtype, device=where, revision=revision)
            of_run = {} if config is None else call_settings(config, self.pipeline)
            if guidance is None:
                of_model = default_guidance(self.pipeline)
                guidance = config.evaluation.guidance_scale if config else of_model
            self.call = of_run | call_arguments(
                self.pipeline,
                guidance=guidance,
                negative=negative or ("" if config is None else config.rollout.negative_prompt),
                max_sequence_length=max_sequence_length or of_run.get("max_sequence_length"),
                height=of_run.get("height"),
                width=of_run.get("width"),
            )
            if steps is not None:
                self.call["num_inference_steps"] = steps
            if self.lora is not None:
                load_lora(self.pipeline, self.lora)
        self.guidance = guidance
        if self.small is not None:
            large, small = (self._backbone(drawing) for drawing in (self, self.small))
            self.transfer = Transfer(large, small, 1.0 if rlg is None else rlg)

    def image(self, prompt: str, seed: int, negative: str | None = None) -> Image.Image:
        """Generate one image; `negative` replaces the negative prompt, where guidance is on."""
        call = {"prompt": [prompt], "output_type": "pt", **self.call}
        if negative:  # raises UserError for a class that takes none
            call_arguments(self.pipeline, guidance=1.0, negative=negative)
        if negative is not None and "negative_prompt" in call:
            call["negative_prompt"] = negative
        generator = torch.Generator().manual_seed(seed)
        if self.small is not None:
            usual = self.small.call.get("negative_prompt", "")
            guided = self.transfer.of(prompt, usual if negative is None else negative)
        else:
            guided = nullcontext() if self.rlg is None else RLG(self.pipeline, self.rlg)
        with guided:
            result = self.pipeline(generator=generator, **call)
        return to_pil(images_of(result))[0]

    def _backbone(self, drawing: "Drawing") -> PipelineBackbone:
        """Return a drawing's pipeline as it is called, with images of this one's size."""
        return PipelineBackbone(
            drawing.pipeline,
            guidance=drawing.guidance,
            max_sequence_length=drawing.call.get("max_sequence_length"),
            height=self.call.get("height"),
            width=self.call.get("width"),
        )

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the images of a prompt and a seed, as JSON has it."""
        call = {k: float(v) if isinstance(v, int) else v for k, v in self.call.items()}
        lora = None if self.lora is None else digest(lora_bytes(self.lora))
        return self.options | {"call": call, "lora": lora}


def draw_prompts(
    drawing: Drawing,
    prompts: Sequence[PromptRecord],
    folder: Path,
    *,
    per_prompt: int,
    seed: int,
    distinct_noise: bool = False,
) -> Path:
    """Generate images of each prompt in GenEval's official layout; resume an earlier call.

    `00000/metadata.jsonl` is the prompt's row, `00000/samples/0000.png` has the seed `seed`, the
    next image the next one. The caller holds the folder's lock, see `locked_folder`. Raises
    UserError for a folder with other settings.

    Args:
        distinct_noise: number the seeds through all prompts. Otherwise they restart at each prompt,
            as in GenEval, and the first images of all prompts have the same noise.
    """
    uids = blake2b("\n".join(p.uid for p in prompts).encode(), digest_size=8).hexdigest()
    how = drawing.identity() | {"seed": seed, "prompts": uids}
    how |= {"distinct_noise": True, "per_prompt": per_prompt} if distinct_noise else {}
    text = json.dumps(how, indent=2, sort_keys=True, default=str) + "\n"
    saved = folder / SETTINGS
    if saved.is_file() and read_text(saved, inside=folder) != text:
        raise UserError(
            f"the images in {folder} have another pipeline, LoRA, prompts or settings, see "
            f"{saved}: give another folder, or remove it"
        )
    if not saved.is_file() and foreign_entries(folder, "images"):
        raise UserError(f"{folder} holds other files: give -o a new folder")
    write_text(saved, text)
    missing = list(_missing(prompts, folder, per_prompt))
    count = len(prompts) * per_prompt
    with Steps("drawing", count, start=count - len(missing)) as steps:
        for record, path, index, number in missing:
            first = seed + index * per_prompt if distinct_noise else seed
            image = drawing.image(record.text, first + number, record.negative)
            write_bytes(path, png(image))
            steps.advance()
    return folder


def _missing(
    prompts: Sequence[PromptRecord], folder: Path, per_prompt: int
) -> Iterator[tuple[PromptRecord, Path, int, int]]:
    """Write the rows of the prompts; yield the missing images with prompt and number."""
    for index, record in enumerate(prompts):
        place = folder / f"{index:05d}"
        negative = {} if record.negative is None else {"negative": record.negative}
        row = json.dumps(record.metadata | negative | {"prompt": record.text}, ensure_ascii=False)
        write_text(place / METADATA, row + "\n")
        for number in range(per_prompt):
            path = place / SAMPLES / f"{number:04d}.png"
            if not is_whole_png(path):
                yield record, path, index, number
