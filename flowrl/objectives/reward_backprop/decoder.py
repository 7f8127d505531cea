"""The gradient of the trained reward at clean latents, through the decoder."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.errors import UserError
from flowrl.objectives.base import RewardField
from flowrl.scoring.combine import combine
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.spec import RewardResult, RewardSpec, trained
from flowrl.trajectory import Rollout


def check_differentiable(specs: Sequence[RewardSpec], kind: str) -> None:
    """Raise UserError for a trained reward that has no gradient."""
    for spec in trained(specs):
        if getattr(spec.reward, "differentiable", False) is not True:
            raise UserError(
                f"objective.kind {kind} follows the reward's gradient, and reward {spec.name!r} "
                "does not say `differentiable = True`: take one that does, hold this one out with "
                "held_out: true, or choose an objective that needs scores alone, such as grpo"
            )


class RewardGradient:
    """Builds the reward field of a rollout's prompts: rewards and gradients at clean latents.

    The weighted sum is that of training, without held-out rewards. At most `batch_size` images
    have a graph at any time, none when the field returns. Only the latents get a gradient: the
    decoder's and the rewards' weights get none.
    """

    def __init__(self, backbone: PipelineBackbone, specs: Sequence[RewardSpec], batch_size: int):
        self.backbone, self.specs, self.batch_size = backbone, trained(specs), batch_size

    def __call__(self, rollout: Rollout) -> RewardField:
        """Return the field of this rollout's prompts.

        Without an applicable score reward and gradient are NaN; other gradients are left alone.
        """

        def field(x0: Tensor, prompt: Tensor, words: str = "") -> tuple[Tensor, Tensor]:
            rewards, gradients = [], []
            parts = zip(x0.split(self.batch_size), prompt.cpu().split(self.batch_size), strict=True)
            for latents, numbers in parts:
                texts = [rollout.prompts[i] for i in numbers.tolist()]
                data = [rollout.metadata[i] for i in numbers.tolist()]
                reward, gradient = self._part(latents, texts, data, words)
                rewards.append(reward.to(x0.device))
                gradients.append(gradient)
            return torch.cat(rewards), torch.cat(gradients)

        return field

    @torch.enable_grad()
    def _part(
        self, x0: Tensor, prompts: list[str], metadata: list[dict], words: str
    ) -> tuple[Tensor, Tensor]:
        x = x0.detach().float().requires_grad_()
        with torch.autocast(x.device.type, enabled=False):
            images = self.backbone.decode(x)
            reward, pixels = differentiate(
                self.specs, images.detach().cpu(), prompts, metadata, words
            )
            invalid = reward.isnan().to(x.device)
            (gradient,) = torch.autograd.grad(images, x, pixels.to(images))
        return reward, gradient.masked_fill(invalid.view(-1, *[1] * (x.ndim - 1)), math.nan)


@torch.enable_grad()
def differentiate(
    specs: Sequence[RewardSpec],
    images: Tensor,
    prompts: list[str],
    metadata: list[dict],
    words: str = "",
) -> tuple[Tensor, Tensor]:
    """Return the weighted rewards of images (L, 3, H, W) in [0, 1], and their gradient.

    (L,) fp32, NaN where `combine` has NaN; and like images, 0 there. One reward has a graph at a
    time. Images are not rounded to 8 bits, which has no gradient. words: put before every prompt,
    after asking which rewards apply to it. Raises RewardFailure for a reward that fails, or that
    gradients do not reach.
    """
    fits = torch.tensor([s.applicable(prompts, metadata) for s in specs]).T.bool()
    dtype = torch.promote_types(images.dtype, torch.float32)
    scores = torch.full(fits.shape, math.nan, dtype=dtype)
    slopes = images.new_zeros(len(specs), *images.shape)
    texts = [f"{words}. {prompt}" if words else prompt for prompt in prompts]
    for column, spec in enumerate(specs):
        index = fits[:, column].nonzero().flatten()
        if len(index):
            at = index.tolist()
            scores[index, column], slopes[column, index] = _slope(
                spec, images[index], [texts[i] for i in at], [metadata[i] for i in at]
            )
    names = tuple(spec.name for spec in specs)
    leaf = scores.requires_grad_()
    result = RewardResult(
        scores=leaf, valid=scores.detach().isfinite(), applicable=fits, names=names
    )
    reward, valid = combine(specs, result)
    (share,) = torch.autograd.grad(reward[valid].sum(), leaf)  # of each score in the reward
    share = share.T.to(slopes)[:, :, None, None, None]
    return reward.detach(), torch.where(share == 0, 0, share * slopes).sum(0)


def _slope(
    spec: RewardSpec, images: Tensor, prompts: list[str], metadata: list[dict]
) -> tuple[Tensor, Tensor]:
    """Return one reward's scores (B,) and their gradient, like images."""
    pixels = images.detach().requires_grad_()
    try:
        answer = spec.reward(pixels, prompts, metadata)
    except Exception as error:
        raise RewardFailure(
            f"reward {spec.name!r} failed while its gradient was taken: "
            f"{type(error).__name__}: {error}"
        ) from error
    scores, reasons = answer if isinstance(answer, tuple) else (answer, None)
    slope = None
    if isinstance(scores, Tensor) and scores.requires_grad:
        (slope,) = torch.autograd.grad(scores.sum(), pixels, allow_unused=True)
    if slope is None:
        raise RewardFailure(
            f"reward {spec.name!r} says `differentiable = True`, but no gradient reaches the "
            "images: it must compute a tensor from them by torch, without detach or no_grad"
        )
    if scores.shape != (len(images),):
        raise RewardFailure(
            f"reward {spec.name!r} answered with shape {tuple(scores.shape)} for {len(images)} "
            f"images; expected ({len(images)},)"
        )
    values = scores.detach().float().cpu()
    values[list(reasons or ())] = math.nan
    return values, slope
