"""What must hold wherever this version runs: its identities, on the tiny pipeline, in seconds."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.assembly.backbone import build_backbone
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.backbones.loading import load_pipeline
from flowrl.backbones.lora_files import load_lora, read_lora, save_lora
from flowrl.backbones.policy import POLICY
from flowrl.backbones.text_cache import TextCache
from flowrl.config import Config, parse_config
from flowrl.config.sections import PipelineOptions
from flowrl.errors import CheckResult
from flowrl.functional.sde import KERNELS, cps_step, overshoot_step, renoise_step, sde_step
from flowrl.offline.format import (
    DatasetMetadata,
    StoredImage,
    append_shard,
    create_dataset,
    open_dataset,
)
from flowrl.prompts.records import load_prompts
from flowrl.quantization.formats import e2m1, fp8, nvfp4
from flowrl.sampling.rollout import RolloutRequest, sample_request
from flowrl.sampling.sampler import Schedule
from flowrl.trees.plan import ode_plan
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state, save_state
from flowrl.verify.figures import distance, guarded, judged
from flowrl.verify.objective import check_objective_on

BUG = "This version does not compute what it should on this machine: please report it."
STEPS, COUNT, TOKENS = 3, 4, 12


def verify_self() -> Iterator[CheckResult]:
    """Check sampler, steps, ratio, gradient, number formats and files on this machine's CPU."""
    yield from guarded("sampler", _check_sampler)
    yield from guarded("steps", _check_steps)
    yield from guarded("formats", _check_formats)
    yield from guarded("files", _check_files)
    yield from guarded("objective", _check_learning)


def _recipe() -> Config:
    return parse_config(
        {
            "pipeline": {"device": "cpu", "max_sequence_length": TOKENS},
            "lora": {"rank": 2, "alpha": 4},
            "prompts": {"train": "tiny:geneval:train"},
            "rollout": {"prompts_per_iteration": 2, "group_size": 4, "num_inference_steps": 3},
            "rewards": [{"name": "brightness"}],
            "run": {"trackers": []},
        }
    )


def _pipeline() -> Any:
    pipeline = load_pipeline("tiny-sd3", dtype="fp32", device="cpu")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _check_sampler() -> Iterator[CheckResult]:
    """Without noise the latents are those of diffusers' own pipeline, bit for bit."""
    pipeline, prompts = _pipeline(), load_prompts("tiny:all:test", limit=COUNT)
    options = PipelineOptions(device="cpu", max_sequence_length=TOKENS)
    for guidance in (1.0, 3.5):
        backbone = build_backbone(options, pipeline, guidance=guidance)
        request = RolloutRequest(
            prompts=prompts, prompt=torch.arange(COUNT), group=torch.arange(COUNT),
            root=torch.zeros(COUNT).long(), seed=3, iteration=0,
        )  # fmt: skip
        sigmas = backbone.sigmas(STEPS)
        schedule = Schedule(sigmas=sigmas, kernel=KERNELS["flow_sde"], noise_level=0.0)
        cond = TextCache(backbone)(prompts)
        with torch.no_grad():
            tree = sample_request(
                backbone, backbone.velocity, cond, request, ode_plan(STEPS), schedule, COUNT
            )
        noise = request.noise((), 0, "init", backbone.latent_shape())
        theirs = pipeline(
            [p.text for p in prompts], negative_prompt=[""] * COUNT, guidance_scale=guidance,
            num_inference_steps=STEPS, max_sequence_length=TOKENS, output_type="latent",
            latents=noise,
        ).images  # fmt: skip
        apart = distance(tree.leaves(), theirs)
        yield judged("sampler", apart == 0,
                     f"guidance {guidance:g}: flowrl's latents and diffusers' {apart:.1e} apart",
                     BUG)  # fmt: skip


def _check_steps() -> Iterator[CheckResult]:
    """The variance of a step on data N(0, 1), whose velocity is (2 sigma - 1) / var x."""
    dtype = torch.float64
    for name, step, exact in (
        ("flow_sde", sde_step, False), ("overshoot", overshoot_step, False),
        ("cps", cps_step, True), ("renoise", renoise_step, True),
    ):  # fmt: skip
        errors = []
        for dt in (0.01, 0.001):
            sigma, after, g = (torch.tensor(v, dtype=dtype) for v in (0.6, 0.6 - dt, 0.7))
            gain, std = _affine(step, sigma, after, g)
            wanted = _kept_variance(name, sigma, after, g) if exact else _variance(after)
            found = gain**2 * _variance(sigma) + std**2
            errors.append(abs((found / wanted - 1).item()))
        # Exact, or of second order: a tenth of the step has a hundredth of the error.
        holds = max(errors) < 1e-12 if exact else errors[1] < errors[0] / 50
        detail = f"{name}: variance off by {errors[0]:.1e}, and {errors[1]:.1e} in a tenth"
        yield judged("steps", holds, detail, BUG)


def _variance(sigma: Tensor) -> Tensor:
    """Return the variance of (1 - sigma) x0 + sigma noise."""
    return (1 - sigma) ** 2 + sigma**2


def _kept_variance(name: str, sigma: Tensor, after: Tensor, g: Tensor) -> Tensor:
    """Return the variance that coefficients of E[x0 | x] and E[noise | x] say."""
    var = _variance(sigma)
    level = torch.ones_like(g) if name == "renoise" else g
    part = (level * torch.pi / 2).cos()
    mean = (1 - after) * (1 - sigma) / var + after * part * sigma / var
    return mean**2 * var + (after * (level * torch.pi / 2).sin()) ** 2


def _affine(step: Any, sigma: Tensor, after: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and std of a step that makes a x + std noise of x."""
    x = torch.ones(1, 1, dtype=sigma.dtype)
    v = (2 * sigma - 1) / _variance(sigma) * x
    mean, std = step(x, v, sigma, after, g)
    return mean[0, 0], std.flatten()[0]


def _check_formats() -> Iterator[CheckResult]:
    """Rounding is to the nearest number of the format, and what is rounded stays."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(64, 64, generator=generator)
    values = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    nearest = (x.clamp(-6, 6)[..., None] - values).abs().amin(-1)
    worst = ((e2m1.round_e2m1(x) - x.clamp(-6, 6)).abs() - nearest).abs().max().item()
    yield judged("formats", worst < 1e-6, f"E2M1: {worst:.1e} from the nearest of 16 values", BUG)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    nearest = (x[..., None] - every).abs().amin(-1)
    worst = ((fp8.round_e4m3(x) - x).abs() - nearest).abs().max().item()
    yield judged("formats", worst < 1e-6, f"E4M3: {worst:.1e} from the nearest of its values", BUG)
    once = nvfp4.dequantise(nvfp4.quantise(x))
    error = distance(once, x)
    yield judged("formats", 0 < error < 0.15, f"NVFP4: {error:.3f} of normal numbers is lost", BUG)


def _check_files() -> Iterator[CheckResult]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state: Any = {"a": torch.randn(3), "b": [1, None, {3: torch.ones(2)}]}
        save_state(folder / "state.safetensors", state)
        read = load_state(folder / "state.safetensors")
        same = torch.equal(read["a"], state["a"]) and torch.equal(read["b"][2][3], torch.ones(2))
        yield judged("files", same and read["b"][:2] == [1, None], "a state reads back equal", BUG)
        yield from _check_store(folder / "store")
        yield from _check_lora(folder)


def _check_store(folder: Path) -> Iterator[CheckResult]:
    metadata = DatasetMetadata(
        pipeline="tiny-sd3", backbone="sd3", latent_shape=[2, 3], dtype="bfloat16",
        sigmas=[1.0, 0.5, 0.0], rewards=[{"name": "r", "version": None, "weight": 1.0}], recipe={},
    )  # fmt: skip
    create_dataset(folder, metadata)
    (record,) = load_prompts("tiny:all:test", limit=1)
    x0 = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = [StoredImage(record=record, group=0, image=i, valid=True, scores=[i / 3], seed=0,
                        iteration=0, root=i) for i in range(2)]  # fmt: skip
    append_shard(folder, 0, x0, rows)
    store = open_dataset(folder)
    same = torch.equal(store.latents(torch.tensor([1, 0])), x0.flip(0))
    scores = torch.equal(store.scores[:, 0], torch.tensor([0.0, 1 / 3]))
    yield judged("files", same and scores, "a store of groups reads back equal", BUG)


def _check_lora(folder: Path) -> Iterator[CheckResult]:
    config, runtime = _recipe(), Runtime(device="cpu")
    learner = build_learner(config, runtime, ProvidedObjects(pipeline=_pipeline()))
    for parameter in learner.policy.parameters():
        parameter.data += 0.1
    path = save_lora(learner.policy.backbone.pipeline, folder, adapter=POLICY)
    state, strength = read_lora(path)
    layers = load_lora(_pipeline(), path)
    wanted = sum(".lora_A." in name for name in state)
    detail = f"diffusers attaches {layers} of {wanted} layers of a saved LoRA"
    yield judged("files", layers == wanted and strength == 2.0, detail, BUG)


def _check_learning() -> Iterator[CheckResult]:
    learner = build_learner(_recipe(), Runtime(device="cpu"), ProvidedObjects(pipeline=_pipeline()))
    yield from check_objective_on(learner, "flow_sde")
