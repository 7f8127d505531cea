"""`flowrl explain` and `flowrl doctor`: what an option means, and what works on this machine."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import flowrl
from flowrl.cli._console import print_checks, say
from flowrl.errors import CheckResult, UserError

if TYPE_CHECKING:
    import torch
    from packaging.requirements import Requirement


def explain(
    key: Annotated[str, typer.Argument(help="An option or section; none lists the sections.")] = "",
) -> None:
    """Show an option's meaning, values, default and where that comes from.

    Examples:

      flowrl explain rollout.noise_level

      flowrl explain rollout
    """
    from flowrl.config.explain import explain as text

    say(text(key))


def doctor() -> None:
    """Check versions, device and optional packages; print how to get missing ones.

    Reaches no network. Exits with 1 if something that a run needs is missing.
    """
    results = examine()
    print_checks(results, max(len(result.topic) for result in results))
    if not healthy(results):
        raise UserError("A run needs something that is missing; lines marked !! say what to do.")


DISTRIBUTION = "flowrl-diffusion"
NEEDED = {
    "torch": "the networks",
    "diffusers": "pipelines, and loading the LoRA",
    "transformers": "text encoders",
    "accelerate": "devices and processes",
    "peft": "LoRA adapters",
    "safetensors": "files without pickle",
    "pydantic": "checked configuration",
    "open-clip-torch": "CLIP rewards",
    "rapidocr": "the ocr reward",
    "onnxruntime": "the ocr reward",
    "opencv-python-headless": "the ocr reward and the tiny world's detector",
    "tensorboard": "training curves",
    "httpx": "rewards on servers, and judges",
    "fastapi": "flowrl ui and vote",
    "starlette": "flowrl reward-serve",
    "uvicorn": "flowrl ui, vote and reward-serve",
    "scikit-image": "the photograph that detectors are tried on",
}
OPTIONAL = {  # package: its extra, and what it is for
    "datasets": ("datasets", "prompts from Hugging Face data sets"),
    "xformers": ("xformers", "memory-efficient attention on CUDA"),
    "bitsandbytes": ("bitsandbytes", "memory.base_bits 8 or 4 on GPUs"),
    "torchao": ("torchao", "memory.base_bits 8 with memory.base_library torchao"),
    "wandb": ("wandb", "run.trackers=[wandb]"),
    "trackio": ("trackio", "run.trackers=[trackio]"),
}


def examine() -> list[CheckResult]:
    """Check everything a run depends on, without a network."""
    return [*_basics(), *_packages(), *_optional(), *_opencv(), *_device(), *_data()]


def healthy(results: list[CheckResult]) -> bool:
    """Return whether nothing that a run needs is missing or wrong."""
    return all(result.state != "problem" for result in results)


def _basics() -> Iterator[CheckResult]:
    import platform

    yield CheckResult(topic="flowrl", state="ok", detail=flowrl.__version__)
    old = sys.version_info < (3, 11)
    yield CheckResult(
        topic="python",
        state="problem" if old else "ok",
        detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        remedy="Use Python 3.11 or newer." if old else "",
    )


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ranges() -> "dict[str, Requirement]":
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:  # a checkout on PYTHONPATH has no metadata
        return {}
    return {r.name: r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})}


def _packages() -> Iterator[CheckResult]:
    ranges = _ranges()
    for package, use in NEEDED.items():
        version, wanted = _installed(package), ranges.get(package)
        wrong = f"not installed: {use}" if version is None else ""
        if version and wanted and not wanted.specifier.contains(version, prereleases=True):
            wrong = f"{version}, expected {wanted.specifier}"
        yield CheckResult(
            topic=package,
            state="problem" if wrong else "ok",
            detail=wrong or str(version),
            remedy=f'pip install "{wanted or package}"' if wrong else "",
        )


def _optional() -> Iterator[CheckResult]:
    for package, (extra, use) in OPTIONAL.items():
        version = _installed(package)
        yield CheckResult(
            topic=package,
            state="ok" if version else "missing",
            detail=version or f"optional: {use}",
            remedy="" if version else f'From a clone of the project: pip install ".[{extra}]"',
        )


def _opencv() -> Iterator[CheckResult]:
    """Check for two builds of OpenCV, which overwrite each other."""
    builds = [p for p in ("opencv-python", "opencv-contrib-python") if _installed(p)]
    if builds and _installed("opencv-python-headless"):
        yield CheckResult(
            topic="opencv",
            state="problem",
            detail=f"{builds[0]} and opencv-python-headless share the folder cv2",
            remedy=f"pip uninstall {builds[0]}, then pip install --force-reinstall --no-deps "
            "opencv-python-headless",
        )


def _device() -> Iterator[CheckResult]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    threads, cores = torch.get_num_threads(), os.cpu_count()
    yield CheckResult(
        topic="cpu",
        state="ok",
        detail=f"{cores} cores, {threads} threads in use",
        remedy="" if threads == 1 else "Set run.threads=1 if other jobs share this machine.",
    )
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        detail = (
            f"{torch.cuda.device_count()} x {card.name}, {card.total_memory / 2**30:.0f} GB, "
            f"bf16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
        )
        yield CheckResult(topic="cuda", state="ok", detail=detail)
    else:
        yield CheckResult(
            topic="cuda",
            state="missing",
            detail=f"torch {torch.__version__} sees no CUDA device",
            remedy="The tiny presets need none; the others do.",
        )
    yield _precisions(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if torch.backends.mps.is_available():
        yield CheckResult(topic="mps", state="ok", detail="available; without float64")


def _precisions(device: "torch.device") -> CheckResult:
    from flowrl.quantization.backends import capability_of, native_formats

    formats = ", ".join(native_formats(capability_of(device)))
    return CheckResult(
        topic="precisions",
        state="ok",
        detail=f"{formats}; nvfp4-emulated has nvfp4's numbers anywhere, not its speed",
    )


def _data() -> Iterator[CheckResult]:
    from flowrl.config.load import preset_names

    pipelines = sorted(Path(flowrl.__file__).parent.rglob("model_index.json"))
    names = ", ".join(path.parent.name for path in pipelines)
    yield CheckResult(
        topic="tiny pipelines",
        state="ok" if pipelines else "problem",
        detail=names or "none in the package",
        remedy="" if pipelines else "From a clone: pip install --force-reinstall --no-deps .",
    )
    yield CheckResult(topic="presets", state="ok", detail=", ".join(preset_names()))
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    yield CheckResult(
        topic="hub",
        state="ok",
        detail="offline (HF_HUB_OFFLINE is set)" if offline else "used when a model is named",
    )
