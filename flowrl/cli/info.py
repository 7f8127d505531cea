"""`flowrl explain` and `flowrl doctor`: what an option means, and what works on this machine."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

import flowrl
from flowrl.cli._console import print_checks, say
from flowrl.errors import CheckResult, UserError


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
    if any(result.state == "problem" for result in results):
        raise UserError("A run needs something that is missing; lines marked !! say what to do.")


DISTRIBUTION = "flowrl-diffusion"
OPTIONAL = {  # extras, called as their packages, and what they are for
    "datasets": "prompts from Hugging Face data sets",
    "ray": "rollout.workers",
    "xformers": "memory-efficient attention on CUDA",
    "bitsandbytes": "memory.base_bits 4",
    "torchao": "memory.base_bits 8",
    "wandb": "run.trackers=[wandb]",
    "trackio": "run.trackers=[trackio]",
}


def examine() -> list[CheckResult]:
    """Check everything a run depends on, without a network."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    basics = [_check("flowrl", flowrl.__version__), _check("python", python)]
    return [*basics, *_packages(), *_device(), *_data()]


def _check(
    topic: str, detail: str, state: Literal["ok", "missing", "problem"] = "ok", remedy: str = ""
) -> CheckResult:
    return CheckResult(topic=topic, state=state, detail=detail, remedy=remedy)


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[CheckResult]:
    """Compare what is installed with the requirements of flowrl and of its extras."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:  # a checkout on PYTHONPATH has no metadata
        yield _check("packages", "flowrl is not installed", "missing", "pip install -e .")
        return
    fine = []
    for requirement in wanted:
        name, marker = requirement.name, requirement.marker
        version, optional = _installed(name), name in OPTIONAL
        if marker and not marker.evaluate({"extra": name if optional else ""}):
            continue
        if version and requirement.specifier.contains(version, prereleases=True):
            fine.append(f"{name} {version}")
            continue
        use = f": {OPTIONAL[name]}" if optional else ""
        detail = f"{version or 'not installed'}, expected {requirement.specifier}{use}"
        remedy = f'pip install "{name}{requirement.specifier}"'
        yield _check(name, detail, "missing" if optional else "problem", remedy)
    yield _check("packages", ", ".join(fine))


def _device() -> Iterator[CheckResult]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from flowrl.quantization.backends import native_formats

    threads = torch.get_num_threads()
    remedy = "" if threads == 1 else "Set run.threads=1 if other jobs share this machine."
    yield _check("cpu", f"{os.cpu_count()} cores, {threads} threads in use", remedy=remedy)
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        memory, bf16 = card.total_memory / 2**30, torch.cuda.is_bf16_supported()
        cards = f"{torch.cuda.device_count()} x {card.name}, {memory:.0f} GB"
        yield _check("cuda", f"{cards}, bf16 {'yes' if bf16 else 'no'}")
    else:
        detail = f"torch {torch.__version__} sees no CUDA device"
        yield _check("cuda", detail, "missing", "The tiny presets need none; the others do.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    formats = ", ".join(native_formats(device))
    emulated = "nvfp4-emulated has nvfp4's numbers anywhere, not its speed"
    yield _check("precisions", f"{formats}; {emulated}")
    if torch.backends.mps.is_available():
        yield _check("mps", "available; without float64")


def _data() -> Iterator[CheckResult]:
    pipelines = sorted(Path(flowrl.__file__).parent.rglob("model_index.json"))
    if pipelines:
        yield _check("tiny pipelines", ", ".join(path.parent.name for path in pipelines))
    else:
        remedy = "From a clone: pip install --force-reinstall --no-deps ."
        yield _check("tiny pipelines", "none in the package", "problem", remedy)
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    yield _check(
        "hub", "offline (HF_HUB_OFFLINE is set)" if offline else "used when a model is named"
    )
