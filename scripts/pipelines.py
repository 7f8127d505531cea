"""Check every text-to-image pipeline class of the installed diffusers, small and random.

    python -m scripts.pipelines docs/pipelines.md [CLASS ...]

Writes a table: what holds for each class, or why it is refused or not checked. With names of
classes only their rows are made anew.
"""

import argparse
import inspect
import re
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones.call import call_arguments
from flowrl.backbones.families import REFUSED, check_trainable, family_of
from flowrl.backbones.gate import Visit, call_through
from flowrl.backbones.latent_map import inverse_of
from flowrl.backbones.lora_files import save_lora
from flowrl.backbones.pipeline import PipelineBackbone, images_of
from flowrl.backbones.policy import POLICY
from flowrl.backbones.small import small_folder, small_pipeline
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.export.model_card import PROMPT, Card, loader_of, loading_code
from flowrl.functional.sde import ode_step
from flowrl.trajectory import Conditioning
from flowrl.utils.distributed import Runtime

TEXTS = ("a red circle", "two blue stars over a green square", "a red ring")
STEPS, SIDE = 3, 64
LIMIT = 10  # minutes of a class on one core
RECIPE = {
    "pipeline": {"path": "small", "height": SIDE, "width": SIDE, "max_sequence_length": 128},
    "lora": {"rank": 4, "alpha": 6},
    "prompts": {"train": "tiny:geneval:train"},
    "objective": {"kind": "nft"},
    "rollout": {
        "prompts_per_iteration": 2,
        "group_size": 4,
        "num_inference_steps": 4,
        "tree": {"kind": "ode"},
    },
    "optim": {"lr": 0.05},
    "rewards": [{"name": "brightness"}],
    "run": {"iterations": 2},
}
# What REFUSED says of classes that are no text-to-image pipelines of their own.
OTHERS = (
    "edits images",
    "makes videos",
    "makes sound",
    "is a part of",
    "has a guidance of its own",
)


def pipeline_classes() -> list[type]:
    """Return diffusers' classes that name a text prompt and a flow's scheduler."""
    import diffusers

    found = []
    for name in sorted(n for n in dir(diffusers) if n.endswith("Pipeline")):
        kind = getattr(diffusers, name)
        if (
            any(re.search(w, name) for w, what in REFUSED.items() if what.startswith(OTHERS))
            or "prompt" not in inspect.signature(kind.__call__).parameters
        ):
            continue
        source = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
        if re.search("FlowMatch|use_flow_sigmas|SCMScheduler|SanaLoraLoaderMixin", source):
            found.append(kind)
    return found


class Case:
    """One small pipeline behind a backbone, with three texts and noise."""

    def __init__(self, kind: type, dtype: torch.dtype, guidance: float):
        self.pipeline = small_pipeline(kind).to(dtype)
        self.pipeline.set_progress_bar_config(disable=True)
        self.backbone = PipelineBackbone(self.pipeline, guidance=guidance, height=SIDE, width=SIDE)
        takes = "negative_prompt" in self.backbone.arguments
        self.negatives = ("", "a ring", "") if takes else ("", "", "")
        self.cond = self.backbone.encode(TEXTS, self.negatives)
        self.sigmas = self.backbone.sigmas(STEPS)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(len(TEXTS), *self.backbone.latent_shape(), generator=generator)
        self.x = x.to(self.backbone.dtype)

    def row(self, i: int) -> tuple[Tensor, Conditioning]:
        return self.x[i : i + 1], self.cond.take(torch.tensor([i]))

    @torch.no_grad()
    def image(self, i: int) -> Tensor:
        """Return the image of a row by Euler's steps."""
        x, cond = self.row(i)
        for k in range(STEPS):
            v = self.backbone.velocity(x, self.sigmas[k], cond)
            ends = self.sigmas[k], self.sigmas[k + 1]
            x = ode_step(x.float(), v, *ends, torch.zeros(()))[0].to(x.dtype)
        return self.backbone.decode(x)

    @torch.no_grad()
    def reference(self, i: int) -> Tensor:
        """Return the image of the pipeline's own run from the same noise."""
        call = {"prompt": TEXTS[i], "num_inference_steps": STEPS, "output_type": "pt"}
        call |= self.backbone.arguments
        if "negative_prompt" in call:
            call["negative_prompt"] = self.negatives[i]
        if not hasattr(self.pipeline, "prepare_latents"):
            call["latents"] = self.x[i : i + 1]
        result = call_through(
            self.pipeline, Visit(latents=self.x[i : i + 1]), self.backbone.device, call
        )
        return images_of(result).float()


def scales(kind: type) -> tuple[float, ...]:
    """Return guidance off and on; off alone for a class that has none."""
    has_guidance = family_of(kind.__name__).guidance in inspect.signature(kind.__call__).parameters
    return (1.0, 3.0) if has_guidance else (1.0,)


def equal_images(kind: type) -> None:
    """Velocities and images equal the pipeline's own bit for bit, with Euler's steps."""
    for dtype in (torch.float32, torch.bfloat16):
        for guidance in scales(kind):
            case = Case(kind, dtype, guidance)
            case.backbone.check(STEPS)
            if "Euler" not in type(case.pipeline.scheduler).__name__:
                continue  # the image is Euler's, the pipeline's its own solver's
            for i in range(len(TEXTS)):
                difference = (case.image(i) - case.reference(i)).abs().max().item()
                assert difference <= 1e-5, f"an image differs by {difference:.2g} ({dtype})"


@torch.no_grad()
def independent_rows(kind: type) -> None:
    """A row's velocity is the same alone and in a batch, with one noise level and with several."""
    for guidance in scales(kind):
        case = Case(kind, torch.float32, guidance)
        for sigma in (case.sigmas[1], case.sigmas[:STEPS], torch.tensor([0.31, 0.31, 0.77])):
            together = case.backbone.velocity(case.x, sigma, case.cond)
            for i in range(len(TEXTS)):
                x, cond = case.row(i)
                alone = case.backbone.velocity(x, sigma[i] if sigma.ndim else sigma, cond)
                difference = (together[i : i + 1] - alone).abs().max().item()
                assert difference <= 1e-4, f"a row differs by {difference:.2g} in a batch"


def gradients(kind: type) -> None:
    """Gradients of the velocity and of decoding equal finite differences."""
    case = Case(kind, torch.float32, 1.0)
    x, cond = case.row(0)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda z: case.backbone.velocity(z, case.sigmas[1], cond).square().mean(),
        lambda z: case.backbone.decode(z).mean(),
    ]
    for function in functions:
        z = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(z), z)
        generator = torch.Generator().manual_seed(0)
        direction, step = torch.randn(x.shape, generator=generator), 3e-3  # of fp32: not smaller
        with torch.no_grad():
            ends = [function(x + s * step * direction).double() for s in (1, -1)]
        expected = (ends[0] - ends[1]).item() / (2 * step)
        found = (gradient * direction).sum().item()
        assert abs(found - expected) <= 0.05 * abs(expected) + 2e-4, (
            f"{found:.3g}, not {expected:.3g}"
        )


@torch.no_grad()
def encodes_images(kind: type) -> None:
    """Images become latents of the pipeline's shape, by a way that can be gone back."""
    case = Case(kind, torch.float32, 1.0)
    _, back = inverse_of(
        case.backbone.decoder_input, case.backbone.latent_shape(), case.backbone.device
    )
    difference = (back(case.backbone.decoder_input(case.x)) - case.x).abs().max().item()
    assert difference <= 1e-4, f"latents come back {difference:.2g} apart"
    images = case.backbone.decode(case.x)
    assert images.shape == (len(TEXTS), 3, SIDE, SIDE), f"images are {tuple(images.shape)}"
    assert case.backbone.encode_images(images).shape == case.x.shape


def first_ratio(kind: type) -> None:
    """In the first pass of Flow-GRPO the policy is the one that sampled: all ratios are 1."""
    recipe = RECIPE | {"objective": {"kind": "grpo"}}
    recipe["rollout"] = RECIPE["rollout"] | {"tree": {"kind": "flow_grpo"}}
    pipeline = small_pipeline(kind)
    pipeline.set_progress_bar_config(disable=True)
    objects = ProvidedObjects(pipeline=pipeline)
    learner = build_learner(parse_config(recipe), Runtime(device="cpu"), objects)
    # The largest log-ratio of a step, which iterate checks.
    replace(learner, ratio_tolerance=1e-3).iterate(1)


def trained_pixels(kind: type) -> None:
    """NFT changes the pixels, and the model card's code draws them from base and LoRA on disk."""
    pipeline, family = small_pipeline(kind), family_of(kind.__name__)
    pipeline.set_progress_bar_config(disable=True)
    base = draw(pipeline)
    objects = ProvidedObjects(pipeline=pipeline)
    learner = build_learner(parse_config(RECIPE), Runtime(device="cpu"), objects)
    for iteration in (1, 2):
        learner.iterate(iteration)
    trained = draw(pipeline)
    assert (trained - base).abs().max() > 1e-3, "training changed nothing"
    with TemporaryDirectory() as folder:
        path, lora = small_folder(kind, Path(folder, "base")), Path(folder, "lora")
        save_lora(pipeline, lora, adapter=POLICY)
        card = Card(
            base_model="small",
            on_hub=False,
            load_from=repr(str(path)) + "".join(f", {part}=None" for part in family.without),
            loader=loader_of(pipeline),
            output=family.output,
            call=drawing_call(pipeline) | {"output_type": "np"},
            license={},
            method="NFT",
            weights="policy",
            step=2,
            command="",
            config="",
        )
        loading, drawing = loading_code(lora, card).replace(PROMPT, TEXTS[0]).rsplit("\n", 1)
        names: dict[str, Any] = {}
        exec(loading, names)
        torch.manual_seed(0)  # the code draws with torch's own generator
        exec(drawing, names)
    image = torch.from_numpy(names["image"]).movedim(-1, 0)
    difference = (images_of([image[None]]) - trained).abs().max().item()
    assert difference <= 1e-5, f"the loaded LoRA's pixels differ by {difference:.2g}"


def drawing_call(pipeline: Any) -> dict[str, Any]:
    """Return arguments of a small image without guidance, for the pipeline's own call."""
    call = call_arguments(pipeline, guidance=1.0, height=SIDE, width=SIDE)
    return call | {"num_inference_steps": STEPS}


def draw(pipeline: Any) -> Tensor:
    """Return the image of the pipeline's own call, from torch's first seed."""
    torch.manual_seed(0)
    return images_of(pipeline(prompt=TEXTS[0], output_type="pt", **drawing_call(pipeline)))


CHECKS: dict[str, Callable[[type], None]] = {
    "images": equal_images,
    "rows": independent_rows,
    "gradients": gradients,
    "image latents": encodes_images,
    "first ratio": first_ratio,
    "trained pixels": trained_pixels,
}


class Late(BaseException):
    """The contract of a class takes too long; no check catches it."""


def result_in_time(kind: type) -> str:
    """Return `result`, or that it did not end within LIMIT minutes."""

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(60 * LIMIT)
    try:
        return result(kind)
    except Late:
        return f"not checked: its contract did not end within {LIMIT} minutes"
    finally:
        signal.alarm(0)


def result(kind: type) -> str:
    """Return what holds for a class, as a cell of the table."""
    try:
        check_trainable(kind.__name__)
    except UserError as error:
        return f"refused: {str(error).split(':')[0]}"
    try:
        small_pipeline(kind)
    except Exception as error:  # of any pipeline's own code, here and below
        return f"not checked: {_reason(error)}"
    try:
        Case(kind, torch.float32, 1.0)
    except UserError as error:
        return f"refused: {_reason(error)}"
    except Exception as error:
        try:
            draw(small_pipeline(kind))
        except Exception as own:
            return f"not checked: its small pipeline does not run: {_reason(own)}"
        return f"refused: {_reason(error)}"
    failed = []
    for name, check in CHECKS.items():
        try:
            check(kind)
        except Exception as error:
            failed.append(f"{name} ({_reason(error)})")
    return f"all but {'; '.join(failed)}" if failed else "all"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def table(results: dict[str, str]) -> str:
    """Return the page's table from the cell of each class."""
    import diffusers

    groups = {"all": "pass", "all but": "pass in part", "refused": "refused", "not": "not checked"}
    parts: dict[str, list[str]] = {name: [] for name in groups}
    for kind, cell in sorted(results.items()):
        group = next(name for name in reversed(groups) if cell.startswith(name))
        parts[group].append(f"| {kind} | {cell} |\n")
    counts = ", ".join(f"{len(parts[name])} {text}" for name, text in groups.items())
    head = f"diffusers {diffusers.__version__}: {counts}.\n\n"
    rows = "".join(row for part in parts.values() for row in part)
    return f"{head}| pipeline class | holds |\n|---|---|\n{rows}"


def read_table(page: str) -> dict[str, str]:
    """Return the cell of each class in a page."""
    return dict(re.findall(r"^\| (\w+Pipeline) \| (.+) \|$", page, re.MULTILINE))


MARK = "<!-- python -m scripts.pipelines -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("classes", nargs="*")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    page = options.page.read_text() if options.page.exists() else ""
    kinds = {kind.__name__: kind for kind in pipeline_classes()}
    results = {name: cell for name, cell in read_table(page).items() if name in kinds}
    for name in options.classes or kinds:
        results[name] = cell = result_in_time(kinds[name])
        print(name, cell, flush=True)
        # At once, so that an interrupted check keeps what it has found.
        options.page.write_text(page.split(MARK)[0] + MARK + table(results))


if __name__ == "__main__":
    main()
