"""What this machine does with flowrl, part by part, as one file that others can read.

Weights are random, or those of the built-in pipelines, so that nothing is downloaded. Without a GPU
the same parts run on two blocks of each network, which says that they work and nothing of speed.
"""

import functools
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flowrl import __version__
from flowrl.backbones.loading import NATIVE, set_attention
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.quantization.backends import resolve
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_text
from scripts.bench.iteration import bench_compile, bench_iteration, work_of
from scripts.bench.random_model import RandomBackbone, model_spec
from scripts.bench.timing import compare_turns, time_turns
from scripts.bench.two_stage import PUBLISHED, TINY_MIN_DIM, bench_sizes, parse_counts

Result = dict[str, Any]
SIZES = ("sd3.5-medium", "sd3.5-large", "flux.1-dev", "sana-1.6b")
QUICKSTARTS = ("quickstart", "quickstart-flux", "quickstart-sana")
ITERATIONS = 10  # of each quickstart
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
# On a GPU: so few images that all sizes are done in minutes, in batches of one shape.
GPU_WORK = {"prompts": 2, "group_size": 4, "steps": 5, "batch": 4, "micro_batch": 4}
# On a CPU: two blocks of each kind, and as little work as shows that everything runs.
CPU_WORK = {"prompts": 1, "group_size": 2, "steps": 2, "batch": 2, "micro_batch": 2}
TEXT_TOKENS = 96  # there, CLIP's 77 among them
LOW_BITS = ("fp8", "nvfp4")
BACKENDS = ("_native_cudnn", "_native_flash", "_native_efficient", "flash", "sage", "xformers")
TESTS = Path(__file__).parents[2] / "tests"


def certify(
    folder: Path,
    *,
    recipes: Sequence[str] = (),
    only: Sequence[str] = (),
    minutes: float = 8.0,
    show: Callable[[str], None] = print,
) -> Path:
    """Run the parts that the machine's file lacks, and write it after each; return the file.

    Args:
        recipes: their checkpoints' sizes alone are measured; all where none is given.
        only: names of the parts to run; all where none is given.
        minutes: after which no further part is begun; a second call goes on.

    Raises:
        UserError: for a part that does not exist, or a recipe whose checkpoint has no size here.
    """
    parts = _parts(recipes)
    if unknown := [name for name in only if name not in parts]:
        raise UserError(f"there is no part {unknown[0]!r}, expected some of {', '.join(parts)}")
    about = machine()
    path = folder / f"{_slug(about['card'])}.json"
    record = _read(path)
    done = record.get("parts", {}) if record.get("machine") == about else {}
    start = time.monotonic()
    failed_last = sorted(only or parts, key=lambda name: "error" in done.get(name, {}))
    for name in failed_last:
        if _seconds(last := done.get(name, {})) is not None and "error" not in last:
            show(f"{name}: done before")
            continue
        if time.monotonic() - start > 60 * minutes:
            show(f"{name}: not begun, {minutes:g} minutes are over; the same command goes on")
            continue
        began, cpu = time.perf_counter(), _cpu_seconds()
        # A process each: one cannot change its precision, and returns a GPU's memory at its end.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                done[name] = process.submit(_tried, name, recipes).result()
            except BrokenProcessPool:
                done[name] = {"error": "the process was killed: too little memory, or a crash"}
        if "skipped" not in done[name]:
            done[name]["part_seconds"] = round(time.perf_counter() - began, 2)
            done[name]["cpu_seconds"] = round(_cpu_seconds() - cpu, 2)
        write_text(
            path, json.dumps({"machine": about, "parts": done}, indent=1, default=str) + "\n"
        )
        show(f"{name}: {_told(done[name])}")
    return path


def _cpu_seconds() -> float:
    """Return the processor's seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def machine() -> Result:
    """Return the public name of the card, or of the CPU's architecture, and versions."""
    on_gpu = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}",
        "cards": torch.cuda.device_count() if on_gpu else 0,
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if on_gpu else None,
        "blocks": "all" if on_gpu else "2 of each kind: says nothing of speed",
        "flowrl": __version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    } | {name: version(name) for name in PACKAGES}


def _parts(recipes: Sequence[str]) -> dict[str, Callable[[], Result]]:
    """Return the parts by name, in the order they run."""
    sizes = _sizes(recipes)
    return {
        "processes": _processes,
        "rewards": _rewards,
        **{f"iteration {name}": functools.partial(_iteration, name) for name in sizes},
        **{f"kernels {name}": functools.partial(_kernels, name) for name in LOW_BITS},
        "compile": functools.partial(_compile, True),
        "graphs": functools.partial(_compile, "graphs"),
        "attention": _attention,
        # A size that a card of 24 GB holds; of the recipes', where they name others.
        f"two stages {sizes[0]}": functools.partial(_two_stages, sizes[0]),
        **{name: functools.partial(_quickstart, name) for name in QUICKSTARTS},
        "gpu tests": _gpu_tests,
    }


def _sizes(recipes: Sequence[str]) -> list[str]:
    """Return the sizes of the recipes' checkpoints, in the order of SIZES; all for no recipe.

    Raises UserError for a recipe of another checkpoint.
    """
    by_path = {p: n for n in SIZES for p in (model_spec(n).checkpoint, *model_spec(n).also)}
    found = set()
    for recipe in recipes:
        path = load_config(recipe).pipeline.path
        if path not in by_path:
            raise UserError(
                f"certify measures no size of {recipe}'s checkpoint {path}, expected recipes of "
                f"{', '.join(SIZES)}: name one of those, or none to run every part"
            )
        found.add(by_path[path])
    return [name for name in SIZES if name in found or not recipes]


def _tried(name: str, recipes: Sequence[str]) -> Result:
    try:
        return _parts(recipes)[name]()
    except Exception as error:  # a part that fails is a result, too, and the others still run
        return {
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        }


def _told(found: Result) -> str:
    for state in ("skipped", "error"):
        if state in found:
            return f"{state}: {found[state]}"
    return f"{found['part_seconds']:.0f} s"


def _seconds(row: Mapping[str, Any]) -> float | None:
    """Return what a part took; older files have it in place of its own measurement `seconds`."""
    return row.get("part_seconds", row.get("seconds"))


# --- parts --------------------------------------------------------------------------------------


def _iteration(name: str) -> Result:
    """Measure an iteration at real size: its share of bare forwards, its memory by the plan."""
    if torch.cuda.is_available():
        # Bare passes have no reference.
        work = replace(work_of(name, GPU_WORK), kl_coef=0.0)
        return bench_iteration(
            name=name, work=work, compile=True, gradient_checkpointing=True, repeats=2
        )
    work = replace(work_of(name, CPU_WORK), guidance=1.0, kl_coef=0.0)
    return bench_iteration(
        name=name, work=work, pixels=64, layers=2, dtype="fp32", text_tokens=TEXT_TOKENS,
        repeats=1, device="cpu",
    )  # fmt: skip


def _kernels(name: str) -> Result:
    """Compare rankings of low-bit candidates with exact ones; emulated where there is no kernel."""
    from flowrl.api import audit
    from flowrl.assembly.auditing import audit_configs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = name
    try:
        resolved = resolve(name, device)  # type: ignore[arg-type]
    except UserError as error:
        if name != "nvfp4":
            return {"skipped": str(error)}
        asked = "nvfp4-emulated"
        resolved = resolve("nvfp4-emulated", device)
    # As many steps and as little noise as exact images have, so that bits alone differ.
    steps = load_config("quickstart").rollout.num_inference_steps
    changes = ["rollout.tree={kind: ode}", f"pipeline.min_dim={TINY_MIN_DIM}"]
    configs = audit_configs(
        "quickstart", changes, prompts=2, candidates=16, steps=[steps], precisions=[asked]
    )
    rows = audit(configs)
    return {
        "precision": resolved,
        "native": resolved != "nvfp4-emulated",
        "rows": rows,
    }


def _compile(compile: bool | str) -> Result:
    """Compare compiled forwards and backwards of SD3.5-Medium, or CUDA graphs, with plain ones."""
    if torch.cuda.is_available():
        return bench_compile(name=SIZES[0], pixels=512, layers=None, dtype="bf16", compile=compile)
    return bench_compile(
        name=SIZES[0], pixels=64, layers=2, dtype="fp32", compile=compile, rows=2,
        text_tokens=TEXT_TOKENS, repeats=1, device="cpu",
    )  # fmt: skip


def _attention() -> Result:
    """Compare diffusers' attention back ends, on FLUX.1's first blocks, with the native one.

    Those that need a package, or another device, are refused with a sentence.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32  # bf16 takes a CPU minutes
    pixels, rows = (1024, 4) if on_gpu else (64, 1)
    backbone = RandomBackbone("flux.1-dev", device=device, dtype=dtype, pixels=pixels, layers=2)
    cond = backbone.encode(["a prompt"] * rows, [""] * rows)
    x = torch.randn(rows, *backbone.latent_shape(), device=device)
    sigma = torch.full((rows,), 0.5, device=device)

    @torch.no_grad()
    def velocity(name: str) -> torch.Tensor:
        set_attention(backbone.transformer, name)
        return backbone.velocity(x, sigma, cond).float()

    native, refused = velocity(NATIVE), {}
    found = {NATIVE: 0.0}
    for name in BACKENDS:
        try:
            found[name] = ((velocity(name) - native).norm() / native.norm()).item()
        except (UserError, RuntimeError) as error:  # a kernel may refuse its shapes
            refused[name] = str(error).splitlines()[0]
    jobs = {name: functools.partial(velocity, name) for name in found}
    turns = time_turns(jobs, 5 if on_gpu else 1, device)
    ratios = {name: compare_turns(turns[name], turns[NATIVE])["ratio"] for name in found}
    return {"differences": found, "ratios": ratios, "refused": refused}


def _two_stages(name: str) -> Result:
    """Compare two-stage rollouts with sampling all candidates exactly, at real size."""
    on_gpu = torch.cuda.is_available()
    (row,) = bench_sizes(
        name=name, precision="auto", plans=[PUBLISHED if on_gpu else parse_counts("2/4@2/2")],
        prompts=1, batch=8 if on_gpu else 2, decode_batch=4 if on_gpu else 2,
        pixels=512 if on_gpu else 64, layers=None if on_gpu else 2, min_dim=None, compile=on_gpu,
        repeats=3 if on_gpu else 1, device="auto",
    )  # fmt: skip
    return row


def _quickstart(name: str) -> Result:
    """Train a quickstart for a few iterations, without its evaluations."""
    from flowrl.api import align

    with tempfile.TemporaryDirectory() as folder:
        changes = [
            f"run.iterations={ITERATIONS}", f"run.output_dir={folder}/run", "run.trackers=[]",
            "evaluation.prompts=null",
        ]  # fmt: skip
        began = time.perf_counter()
        align(load_config(name, changes))
        seconds = time.perf_counter() - began
        rewards = _mean_rewards(Path(folder) / "run")
    return {"iterations": ITERATIONS, "seconds_each": seconds / ITERATIONS, "rewards": rewards}


def _mean_rewards(run: Path) -> list[float]:
    """Return each iteration's mean reward. Raises RuntimeError where one is missing or not finite.

    Metrics have null for what is not finite.
    """
    logged = [row.get("reward/mean") for row in read_metrics(run)]
    found = [mean for mean in logged if mean is not None]
    if len(found) != ITERATIONS or len(logged) != ITERATIONS:
        raise RuntimeError(
            f"expected a finite mean reward from each of {ITERATIONS} iterations: {logged}"
        )
    return found


class NetworkReward:
    """A small network whose weights are always the same, on the GPU that a process has, if any."""

    name, bounds = "network", (-10.0, 10.0)

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = torch.nn.Linear(3, 1).requires_grad_(False)
        self.network.weight.fill_(1.0)
        self.network.bias.fill_(torch.cuda.device_count() / 100)  # how many a process sees
        self.network.to(self.device)

    def __call__(self, images: torch.Tensor, prompts: list[str], metadata: list) -> torch.Tensor:
        return self.network(images.mean((2, 3)).to(self.network.weight.device)).squeeze(1).cpu()


def _rewards() -> Result:
    """Ask a network in training, in a thread, and parked on the CPU in between: the same scores."""
    from flowrl.assembly.learner import build_rewards
    from flowrl.config import parse_config

    cards, target = torch.cuda.device_count(), f"{__name__}:NetworkReward"
    executors: dict[str, dict[str, Any]] = {
        "training": {"kind": "inline"},
        "thread": {"kind": "inline", "background": True},
        "parked on the CPU": {"kind": "inline", "offload": True},
    }
    entries = [
        {"name": target, "label": label, "executor": executor}
        for label, executor in executors.items()
    ]
    specs = build_rewards(
        parse_config({"prompts": {"train": "given"}, "rewards": entries}), gpu=0 if cards else None
    )
    count = 2 * max(cards, 1)
    images = torch.rand(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    wanted = images.double().sum(1).mean((1, 2))
    found = {}
    for spec in specs:
        executor = spec.get_executor()
        try:
            answer = executor.submit(images, ["p"] * count, [{}] * count).result(120)
        finally:
            executor.close()
        found[spec.name] = (answer.scores.double() - wanted - cards / 100).abs().max().item()
    if wrong := [place for place, off in found.items() if not off < 1e-2]:  # levels of uint8
        raise RuntimeError(f"rewards in {', '.join(wrong)} have other scores: {found}")
    return {"places": list(found), "cards": cards, "difference": max(found.values())}


MEGABYTES = 64  # of an all-reduce
PROCESS = f"""
import json, os, time, torch
import torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cuda = torch.cuda.is_available()
device = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda: torch.cuda.set_device(rank)
dist.init_process_group("nccl" if cuda else "gloo")
def summed():
    x = torch.full(({MEGABYTES} * 2**18,), rank + 1.0, device=device)
    began = time.perf_counter()
    dist.all_reduce(x)
    assert x[0].item() == x[-1].item() == world * (world + 1) / 2, x[0]
    return time.perf_counter() - began
summed()
seconds = min(summed() for _ in range(3))
versions = [torch.__version__, torch.version.cuda, str(torch.cuda.nccl.version()) if cuda else ""]
print(json.dumps({{"versions": versions, "seconds": seconds,
                   "card": torch.cuda.get_device_name(rank) if cuda else "CPU"}}))
dist.destroy_process_group()
"""


def _processes() -> Result:
    """Sum over a process for each GPU, or two on the CPU, by a free port; compare their versions.

    Raises RuntimeError where a process fails, or has another torch, CUDA or NCCL.
    """
    world = max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else 2
    port = _free_port()
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS], env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()  # one that waits for another that failed
    for process, (_, error) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"all-reduce failed: {error.strip().splitlines()[-1]}")
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    if len({tuple(one["versions"]) for one in found}) > 1:
        raise RuntimeError(f"processes differ in torch, CUDA, NCCL: {found}")
    return {
        "processes": world,
        "backend": "nccl" if torch.cuda.is_available() else "gloo",
        "all_reduce_gb_per_second": MEGABYTES / 1024 / max(one["seconds"] for one in found),
        "nccl": found[0]["versions"][2] or None,
        "process_cards": [one["card"] for one in found],
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _gpu_tests() -> Result:
    """Run the tests that want a GPU, from a clone; other files may want packages it lacks."""
    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    if not TESTS.is_dir() or importlib.util.find_spec("pytest") is None:
        return {"skipped": "no clone with tests, or no pytest"}
    files = [str(p) for p in TESTS.rglob("test_*.py") if "mark.gpu" in p.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if found.returncode:
        raise RuntimeError(found.stdout.strip().splitlines()[-1])
    return {"summary": found.stdout.strip().splitlines()[-1]}


# --- files and their page -----------------------------------------------------------------------


def _read(path: Path) -> Result:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is no file of certify: {error}; remove it") from error
    return found if isinstance(found, dict) else {}


def _slug(card: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in card.lower()).strip("-")


def write_page(folder: Path) -> Path:
    """Render all machines' files of a folder as one page beside them; return it."""
    records = {path.name: _read(path) for path in sorted(folder.glob("*.json"))}
    lines = [
        "# What ran where",
        "",
        "Made by `python -m scripts.bench certify --page` from the files beside it.",
        "",
    ]
    for name, record in records.items():
        about, parts = record.get("machine", {}), record.get("parts", {})
        lines += [
            f"## {_cell(about.get('card', name))}", "",
            f"[{name}]({name}): flowrl {_cell(about.get('flowrl'))}, torch "
            f"{_cell(about.get('torch'))}, blocks: {_cell(about.get('blocks'))}.", "",
            "| part | seconds | of the CPU | found |", "|---|---|---|---|",
        ]  # fmt: skip
        lines += [
            f"| {_cell(part)} | {_cell('' if (took := _seconds(row)) is None else took)} | "
            f"{_cell(row.get('cpu_seconds', ''))} | {_cell(_figures(row))} |"
            for part, row in parts.items()
        ]
        lines.append("")
    lines += ["## Not run on a GPU", ""]
    lines += [f"- {part}" for part in not_run(list(records.values()))] or ["Nothing is missing."]
    path = folder / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def not_run(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parts that no file of a GPU has, or that needed other kernels or more GPUs."""
    ran = {
        part
        for record in records
        if record.get("machine", {}).get("cards")
        for part, row in record.get("parts", {}).items()
        if "error" not in row and "skipped" not in row and _shows(part, row)
    }
    return [part for part in _parts(()) if part not in ran]


def _shows(part: str, row: Mapping[str, Any]) -> bool:
    """Whether a part did on its GPUs what it is there for, and did not just stand in for it."""
    if part.startswith("kernels "):
        return bool(row.get("native"))  # else the bits were emulated
    return part != "processes" or row.get("processes", 0) > 1  # one has nobody to sum with


SHOWN = (
    "error", "skipped", "forward_share", "training_by_bare", "images_per_second", "of_planned",
    "peak_gb", "operations_per_second", "measured", "predicted", "ratio", "difference",
    "ratios", "seconds_each", "native", "precision", "processes", "all_reduce_gb_per_second",
    "places", "summary", "sampling_ms", "learning_ms", "beside",
)  # fmt: skip


def not_run_sentence(folder: Path) -> str:
    """Return the README's line about what the folder's files of GPUs lack."""
    missing = not_run([_read(path) for path in sorted(folder.glob("*.json"))])
    if not missing:
        return "Every part of `certify` has been run on a GPU"
    return f"Not run on a GPU yet, of the parts of `certify`: {', '.join(missing)}"


def failed_parts(path: Path) -> list[str]:
    """Return the parts of a machine's file that ended with an error."""
    return [name for name, row in _read(path).get("parts", {}).items() if "error" in row]


def _figures(row: Mapping[str, Any]) -> str:
    found = [
        f"{name.replace('_', ' ')} {_figure(row[name])}"
        for name in SHOWN
        if row.get(name) is not None
    ]
    return ", ".join(
        found
        + [
            _audited(one)
            for one in row.get("rows", ())
            if one["precision"] not in ("exact", "random")
        ]
    )


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(one)}" for name, one in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _audited(row: Mapping[str, Any]) -> str:
    """Return how low-bit candidates rank beside exact ones."""
    shown = (name for name in ("rho", "contrast") if isinstance(row.get(name), float))
    return f"{row.get('precision')}: " + ", ".join(f"{name} {row[name]:.3g}" for name in shown)


def _cell(value: Any) -> str:
    """Return a value as text that ends no cell of a table and is no HTML."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(text.split())
