"""Does a backbone keep its contract (`flowrl/backbones/base.py`)? Each answer is a figure."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.backbones.base import Backbone
from flowrl.backbones.flux import Flux
from flowrl.errors import CheckResult
from flowrl.scoring.check import plain_images
from flowrl.trajectory import Conditioning
from flowrl.verify.figures import cosine, distance, failed, judged, passed, unsure

ROWS = 4
PROMPTS = ("a red circle", "two blue stars", "a green square and a yellow triangle", "the word OK")
# Rounding apart, by the format that the network computes in.
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
HIGH = 0.9  # a noise level at which a network knows little but the noise

Make = Callable[[float], Backbone]  # guidance -> a backbone around the same pipeline


def check_backbone(make: Make, guidance: float) -> Iterator[CheckResult]:
    """Check velocity, guidance, texts, schedule and autoencoder of a backbone.

    Args:
        make: builds it around a loaded pipeline; guidance: the recipe's.
    """
    backbone = make(guidance)
    close = CLOSE[backbone.dtype]
    cond = _encode(backbone)
    x, sigma = _noise(backbone), torch.full((ROWS,), HIGH, device=backbone.device)
    yield from _check_texts(backbone, cond, close)
    yield from _check_output(backbone, x, sigma, cond)
    with torch.no_grad():
        v = backbone.velocity(x, sigma, cond)
        yield from _check_rows(backbone, x, sigma, cond, v, close)
        yield from _check_meaning(backbone, x, sigma, cond, v)
    yield _check_network(backbone, x, sigma, cond)
    yield from _check_guidance(make, x, sigma)
    yield from _check_gradient("velocity", lambda z: backbone.velocity(z, sigma, cond), x)
    yield from _check_images(backbone, x)
    yield from _check_schedule(backbone)


def _encode(backbone: Backbone, count: int = ROWS) -> Conditioning:
    return backbone.encode(PROMPTS[:count], [""] * count)


def _noise(backbone: Backbone) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, *backbone.latent_shape(), generator=generator)
    return x.to(backbone.device, backbone.dtype)


def _check_texts(backbone: Backbone, cond: Conditioning, close: float) -> Iterator[CheckResult]:
    """Texts: a row a prompt, of one shape whatever they say, each by itself."""
    topic, one = "texts", backbone.encode(PROMPTS[:1], [""])  # the shortest
    shapes = {name: (tuple(t.shape[1:]), tuple(one.tensors[name].shape[1:]))
              for name, t in cond.tensors.items() if name in one.tensors}  # fmt: skip
    wrong = [name for name, (here, there) in shapes.items() if here != there]
    if wrong or set(cond.tensors) != set(one.tensors) or len(cond) != ROWS:
        yield failed(
            topic,
            f"{', '.join(wrong) or 'the tensors'} of `encode` change with the texts beside them",
            "Pad to max_sequence_length, and keep a mask or a length.",
        )
        return
    apart = max(distance(t[:1].float(), one.tensors[name].float())
                for name, t in cond.tensors.items())  # fmt: skip
    detail = f"a prompt alone and among {ROWS}: {apart:.1e} apart"
    yield judged(topic, apart <= close, detail, "Encode each prompt by itself.")


def _check_output(
    backbone: Backbone, x: Tensor, sigma: Tensor, cond: Conditioning
) -> Iterator[CheckResult]:
    topic = "velocity"
    with torch.no_grad():
        v, again = (backbone.velocity(x, sigma, cond) for _ in range(2))
        one = backbone.velocity(x, sigma[0], cond)
    kept = v.dtype in (backbone.dtype, torch.float32)
    if v.shape != x.shape or not kept or not bool(v.isfinite().all()):
        yield failed(
            topic,
            f"a velocity of shape {tuple(v.shape)} in {v.dtype}, finite: "
            f"{bool(v.isfinite().all())}, of latents {tuple(x.shape)} in {backbone.dtype}",
            "Return a finite velocity like x, in `dtype` or fp32.",
        )
        return
    yield judged(
        topic, torch.equal(v, again), f"asked twice: {distance(v, again):.1e} apart",
        "The network must be in .eval() and free of chance.",
    )  # fmt: skip
    apart = distance(one, v)
    yield judged(
        topic, apart <= CLOSE[backbone.dtype],
        f"one sigma for all rows and the same for each: {apart:.1e} apart",
        "Expand sigma to a value a row.",
    )  # fmt: skip
    if backbone.dtype == torch.float32:
        # Numbers between two of bfloat16's, which a network in fp32 tells apart.
        coarse = x.bfloat16().float()
        with torch.no_grad():
            seen = distance(backbone.velocity(coarse, sigma, cond), v)
        yield judged(
            topic, seen > 1e-6, f"latents rounded to 16 bits change it by {seen:.1e}",
            "The latents are rounded on the way: pass them on in `dtype`.",
        )  # fmt: skip


def _check_rows(
    backbone: Backbone, x: Tensor, sigma: Tensor, cond: Conditioning, v: Tensor, close: float
) -> Iterator[CheckResult]:
    """A row must not depend on the others, nor on how many there are."""
    changed, other = x.clone(), sigma.clone()
    changed[-1], other[-1] = 3 * x[0] + 1, 0.2
    swapped = cond.take(torch.tensor([0, 1, 2, 0], device=x.device))
    apart = distance(backbone.velocity(changed, other, swapped)[:-1], v[:-1])
    yield judged(
        "rows", apart <= close / 10, f"another last row moves the others by {apart:.1e}",
        "A row of the velocity depends on the others: nothing may be averaged over the batch.",
    )  # fmt: skip
    rows = torch.tensor([0], device=x.device)
    apart = distance(backbone.velocity(x[:1], sigma[:1], cond.take(rows)), v[:1])
    yield judged(
        "rows", apart <= close, f"a row alone and in a batch of {ROWS}: {apart:.1e} apart",
        "A row of the velocity depends on the size of the batch.",
    )  # fmt: skip


def _check_meaning(
    backbone: Backbone, x: Tensor, sigma: Tensor, cond: Conditioning, v: Tensor
) -> Iterator[CheckResult]:
    """Near pure noise a velocity, noise minus data, points along the noise."""
    yield _along("velocity", cosine(v, x), f"its cosine with the noise at sigma {HIGH:g}")
    other = cond.take(torch.tensor([0, 1, 2, 0], device=x.device))
    moved = distance(backbone.velocity(x, sigma, other)[-1], v[-1])
    yield judged("texts", moved > 1e-5, f"another prompt changes a row's velocity by {moved:.1e}",
                 "The network does not get the row's text.")  # fmt: skip
    lower = sigma.clone()
    lower[-1] /= 3
    moved = distance(backbone.velocity(x, lower, cond)[-1], v[-1])
    yield judged("sigma", moved > 1e-5, f"a third of its sigma changes a row's by {moved:.1e}",
                 "The network does not get the row's sigma, or rounds it away.")  # fmt: skip


def _along(topic: str, found: float, what: str) -> CheckResult:
    detail = f"{what} is {found:.2f}"
    if found < 0:
        return failed(topic, detail, "Expected noise minus data: turn its sign.")
    if found < 0.2:
        return unsure(topic, detail, "Near 1 in a trained network; one that is not shows nothing.")
    return passed(topic, detail)


class _Reached(Exception):
    pass


class _Probe(nn.Module):
    """Stands for a network: has its attributes, and tells when it is called."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.__dict__["network"] = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["network"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached


def _check_network(backbone: Backbone, x: Tensor, sigma: Tensor, cond: Conditioning) -> CheckResult:
    """Copies of a backbone hold other networks, which `velocity` must call."""
    other = copy.copy(backbone)
    other.transformer = _Probe(backbone.transformer)
    try:
        with torch.no_grad():
            other.velocity(x, sigma, cond)
    except _Reached:
        return passed("network", "`velocity` calls `self.transformer` as it is now")
    return failed("network", "`velocity` of a copy calls another network than its `transformer`",
                  "Read self.transformer in every call.")  # fmt: skip


def _check_guidance(make: Make, x: Tensor, sigma: Tensor) -> Iterator[CheckResult]:
    weak, strong = make(2.0), make(5.0)
    embedded = isinstance(weak, Flux)
    config: Any = getattr(weak.transformer, "config", None)
    if embedded and not getattr(config, "guidance_embeds", False):
        yield passed("guidance", "this network has none")
        return
    with torch.no_grad():
        first, second = (b.velocity(x, sigma, _encode(b)) for b in (weak, strong))
    moved = distance(second, first)
    # Layers of zeros, as of an untrained embedding, hide what they are given.
    yield judged(
        "guidance", moved > 1e-5, f"guidance 5 in place of 2 changes the velocity by {moved:.1e}",
        "`guidance` of the constructor is ignored: v + guidance (v - v_negative), or the network's "
        "own input.",
    )  # fmt: skip


def _check_gradient(
    topic: str, function: Callable[[Tensor], Tensor], at: Tensor
) -> Iterator[CheckResult]:
    """Compare autograd with finite differences, in the direction of the gradient."""
    if at.dtype != torch.float32:
        return  # differences drown in rounding
    point = at.clone().requires_grad_()
    out = function(point)
    if not out.requires_grad:
        yield failed(topic, "no gradient goes through", "No no_grad, detach or .data here.")
        return
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator).to(out)
    (gradient,) = torch.autograd.grad((out * weight).sum(), point)
    size = gradient.norm()
    found = [_difference(function, at, gradient / size.clamp(min=1e-30), weight, step)
             for step in (0.1, 0.03, 0.01)]  # fmt: skip
    error = min(abs(f - size.item()) / max(size.item(), abs(f), 1e-30) for f in found)
    yield judged(
        topic, error < 0.05, f"its gradient and finite differences: {error:.1e} apart",
        "A part of it is cut off from the gradient (detach, .data, no_grad).",
    )  # fmt: skip


@torch.no_grad()
def _difference(
    function: Callable[[Tensor], Tensor], at: Tensor, way: Tensor, weight: Tensor, step: float
) -> float:
    ends = [((function(at + s * way) * weight).double()).sum() for s in (step, -step)]
    return ((ends[0] - ends[1]) / (2 * step)).item()


def _check_images(backbone: Backbone, x: Tensor) -> Iterator[CheckResult]:
    """The autoencoder: images in [0, 1] of the size it says, and back."""
    topic = "images"
    with torch.no_grad():
        images = backbone.decode(x[:2])
    size, low, high = tuple(images.shape[1:]), images.min().item(), images.max().item()
    expected = (3, *backbone.image_size())
    right = size == expected and images.dtype == torch.float32 and 0 <= low <= high <= 1
    yield judged(
        topic, right, f"decoded to {size} in {images.dtype} from {low:.2f} to {high:.2f}",
        f"Expected {expected} in fp32 within [0, 1].",
    )  # fmt: skip
    given = plain_images(*backbone.image_size())[:2]
    latents = backbone.encode_images(given)
    if tuple(latents.shape[1:]) != tuple(backbone.latent_shape()):
        yield failed(topic, f"encoded to {tuple(latents.shape[1:])}", "Expected latent_shape().")
        return
    with torch.no_grad():
        back = backbone.decode(latents).cpu()
    likeness = cosine(back - back.mean(), given - given.mean())
    yield judged(
        topic, likeness > 0.5, f"two squares, encoded and decoded, are {likeness:.2f} alike",
        "`encode_images` and `decode` are not inverse: look at scale, shift and range.",
    )  # fmt: skip
    yield from _check_gradient("decode", backbone.decode, latents.to(backbone.dtype))


def _check_schedule(backbone: Backbone) -> Iterator[CheckResult]:
    sigmas = backbone.sigmas(6)
    falls = bool((sigmas.diff() < 0).all()) and 0.9 < sigmas[0].item() <= 1 and not sigmas[-1]
    right = sigmas.shape == (7,) and sigmas.dtype == torch.float32 and falls
    shown = ", ".join(f"{s:.2f}" for s in sigmas.tolist())
    yield judged("schedule", right, f"6 steps: {shown}", "Expected 7 falling fp32 numbers to 0.")
