"""The backbone of every diffusers text-to-image pipeline whose scheduler steps a flow.

The pipeline's own call computes the velocity, see `gate`: guidance, packing, position ids and
embeddings of time are the pipeline's. A latent is what its scheduler sees.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.base import Rows, in_fp32
from flowrl.backbones.call import call_arguments, is_guided
from flowrl.backbones.families import check_trainable, family_of, lora_targets
from flowrl.backbones.gate import RowTimes, Stop, Visit, call_through
from flowrl.backbones.latent_map import inverse_of
from flowrl.backbones.offload import moved_to
from flowrl.backbones.texts import (
    entries_of,
    has_shapes,
    kinds_of,
    ragged,
    record_of,
    rows_of,
    same_shapes,
)
from flowrl.errors import UserError
from flowrl.trajectory import Conditioning

LOG = logging.getLogger(__name__)
SHORT, LONG = (
    "a",
    "a red circle left of two blue squares and below them the word FLOW in yellow letters",
)
FINE = 1000  # steps of the table of times
RGBA = 4  # channels of an image with transparency
# Largest difference of two velocities that are the same but for rounding, relative to the largest
# number, by the network's dtype; times are fp32 also for fp64.
ROUNDING = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.bfloat16: 0.02,
    torch.float16: 0.01,
}


class PipelineBackbone:
    """A diffusers pipeline, whose networks are on their devices already.

    Latents are (B, *latent): only the backbone knows what their axes mean.

    Args:
        guidance: The pipeline's own guidance; no guidance, and half the work, up to 1.
        max_sequence_length: Text tokens; None for the pipeline's default.
        height, width: Pixels; None for the size that the networks were made for.
        in_step: Turns a count of calls into the most of all processes, where these must call a
            sharded network equally often (see `Batches`).

    Raises:
        UserError: The pipeline does not sample a flow in a way that can be trained.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        guidance: float = 1.0,
        max_sequence_length: int | None = None,
        height: int | None = None,
        width: int | None = None,
        in_step: Callable[[int], int] = int,
    ):
        check_class(pipeline)
        check_scheduler(pipeline.scheduler)
        self.pipeline = pipeline
        pipeline.vae.requires_grad_(False)  # gradients go through it, and none is for its weights
        self.transformer = pipeline.transformer
        self.device: torch.device = self.transformer.device
        self._vae_is_away = pipeline.vae.device != self.device
        self.family = family_of(type(pipeline).__name__)
        self.guidance = guidance
        self.in_step = in_step
        self.arguments = call_arguments(
            pipeline,
            guidance=guidance,
            max_sequence_length=max_sequence_length,
            height=height,
            width=width,
        )
        self.parameters = inspect.signature(type(pipeline).__call__).parameters
        self.guided = self.arguments.get(self.family.guidance) == guidance and is_guided(
            type(pipeline).__name__, guidance
        )
        self.inverted = bool(pipeline.scheduler.config.get("invert_sigmas"))
        self.rows = Rows()
        self.example: Conditioning | None = None  # a row for calls that need a text, but not which
        self._kinds: tuple[dict[str, str], list[str], bool] | None = None
        self._layout: tuple[tuple[int, ...], torch.dtype] | None = None
        self._times: dict[int, tuple[Tensor, Tensor]] = {}  # sigmas and times by steps
        self._table: tuple[Tensor, Tensor] | None = None  # of all of these, ascending
        self._prepared: dict[int, Any] = {}  # ids beside the latents, by rows
        self._many_sigmas: bool | None = None  # whether a batch may have several; None: not tried

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Return name endings of the layers that are adapted by default."""
        return lora_targets(self.family, self.transformer)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the pipeline's own latents, in which the network computes."""
        return self._latents()[1]

    def image_size(self) -> tuple[int, int]:
        """Return height and width of the images, in pixels."""
        return self.arguments["height"], self.arguments["width"]

    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of one latent, without the batch axis."""
        return self._latents()[0]

    def on(self, device: torch.device) -> "PipelineBackbone":
        """Return the same backbone for calls on another device."""
        other = copy.copy(self)
        other.device = device
        return other

    # --- Calls of the pipeline ---------------------------------------------------------------

    def _through(self, visit: Visit, count: int, **call: Any) -> Any:
        """Call the pipeline for `count` rows with this backbone's network."""
        # Lists of their own each time: some pipelines write into their prompts.
        call = {"prompt": [SHORT] * count, "output_type": "latent", **self.arguments, **call}
        if "negative_prompt" in self.arguments and isinstance(call["negative_prompt"], str):
            call["negative_prompt"] = [call["negative_prompt"]] * count
        call.setdefault("num_inference_steps", 1)
        if "generator" in self.parameters:
            call["generator"] = torch.Generator().manual_seed(0)  # not the process's own
        if not hasattr(self.pipeline, "prepare_latents"):
            call["latents"] = visit.latents
        parts = vars(self.pipeline)
        before, parts["transformer"] = parts["transformer"], self.transformer
        try:
            return call_through(self.pipeline, visit, self.device, call)
        finally:
            parts["transformer"] = before

    def _example_record(self, count: int) -> Any:
        """Return the encoder's record of some text for `count` rows."""
        if self.example is None:
            self.encode([SHORT], [""])
        assert self.example is not None
        first = torch.zeros(count, dtype=torch.long, device=self.device)
        return record_of(self.example.to(self.device).take(first))

    # --- Texts -------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        """Return the conditioning of prompts, one negative prompt each.

        A text whose length the network sees is encoded alone, as when the pipeline is called with
        it: padding to the longest of a batch would let rows depend on their neighbours.

        Raises:
            UserError: A negative prompt that the pipeline would ignore.
        """
        for negative in set(negatives) - {""}:
            call_arguments(self.pipeline, guidance=self.guidance, negative=negative)
        if self._kinds is None:
            self._kinds = self._find_kinds()
        kinds, shaped, alone = self._kinds
        pairs = list(zip(prompts, negatives, strict=True))
        if alone:
            parts = [rows_of(self._encode([pair]), kinds, 1) for pair in pairs]
            cond = Conditioning(tensors=ragged(parts, shaped))
        else:
            cond = Conditioning(tensors=rows_of(self._encode(pairs), kinds, len(pairs)))
        if self.example is None:
            self.example = cond.take(torch.tensor([0]))
        return cond

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
        visit = Visit(until="texts")
        call: dict[str, Any] = {"prompt": [prompt for prompt, _ in pairs]}
        if "negative_prompt" in self.arguments:
            call["negative_prompt"] = [negative for _, negative in pairs]
        self._through(visit, len(pairs), **call)
        return tuple(visit.encoded)

    def _find_kinds(self) -> tuple[dict[str, str], list[str], bool]:
        """Return each entry's kind, the entries of varying shape, and whether texts are alone."""
        short, long = (SHORT, ""), (LONG, LONG)
        name = type(self.pipeline).__name__
        logging.disable(logging.WARNING)  # from tokenizers that cut the longer text
        try:
            one, other, twice, both = map(
                self._encode, ([short], [long], [short, short], [short, long])
            )
        finally:
            logging.disable(logging.NOTSET)
        kinds = kinds_of(one, twice)
        if entries_of(other) != kinds.keys():
            raise UserError(
                f"encode_prompt of {name} returns other parts for a longer text, which cannot be "
                "kept row by row"
            )
        first, second = rows_of(one, kinds, 1), rows_of(other, kinds, 1)
        shaped = [name for name in first if first[name].shape != second[name].shape]
        if shaped:
            return kinds, shaped, True
        # Neighbours may matter in other ways: all negatives dropped where the first is "".
        same = entries_of(both) == kinds.keys()  # a mask may come with other lengths only
        together = rows_of(both, kinds, 2) if same else {}
        equal = together.keys() == first.keys() and all(
            torch.allclose(together[name], torch.cat([row, second[name]]), rtol=0.01, atol=0.01)
            for name, row in first.items()
        )
        return kinds, shaped, not equal

    # --- Schedule ----------------------------------------------------------------------------

    def sigmas(self, steps: int) -> Tensor:
        """Return the pipeline's own noise levels: (steps + 1,) fp32 from 1, or just below, to 0.

        Raises:
            UserError: They are no straight line from noise to image, or the pipeline samples in
                another number of steps.
        """
        levels = self._schedule(steps)[0].clone()
        if len(levels) != steps + 1:
            raise UserError(
                f"{type(self.pipeline).__name__} samples in {len(levels) - 1} steps, and not in "
                f"{steps}: set num_inference_steps to that"
            )
        return levels

    def _schedule(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return noise levels (steps + 1,) and the network's times (steps,), fp32."""
        if steps not in self._times:
            # The first time to a step, which casts latents to the velocity's dtype.
            until = "schedule" if self._layout else "step"
            visit = Visit(texts=self._example_record(1), until=until)
            with torch.no_grad():
                v = self._through(visit, 1, num_inference_steps=steps)
            if self._layout is None:
                assert visit.shape is not None
                self._layout = tuple(visit.shape[1:]), v.dtype
            sigmas = check_sigmas(visit.sigmas, self.inverted, type(self.pipeline).__name__)
            assert visit.timesteps is not None
            times = visit.timesteps.to(self.device, torch.float32)
            self._times[steps], self._table = (sigmas.to(self.device), times), None
        return self._times[steps]

    def _latents(self) -> tuple[tuple[int, ...], torch.dtype]:
        if self._layout is None:
            self._schedule(2)
        assert self._layout is not None
        return self._layout

    def times(self, sigma: Tensor) -> Tensor:
        """Return the network's times for noise levels: the pipeline's own, a line in between."""
        if self._table is None:
            self._schedule(FINE)
            levels = torch.cat([sigmas[:-1] for sigmas, _ in self._times.values()])
            times = torch.cat([times for _, times in self._times.values()])
            order = levels.argsort()
            self._table = levels[order], times[order]
            scale = float(self.pipeline.scheduler.config.get("num_train_timesteps", 1000))
            if torch.equal(self._table[0] * scale, self._table[1]):
                self._table = torch.tensor([scale], device=self.device), self._table[1][:0]
        levels, times = self._table
        if not len(times):
            return sigma.float() * levels[0]
        sigma = sigma.float().contiguous()
        high = torch.searchsorted(levels, sigma).clamp(1, len(levels) - 1)
        low = high - 1
        share = (sigma - levels[low]) / (levels[high] - levels[low]).clamp(min=1e-12)
        between = times[low].lerp(times[high], share.clamp(0, 1))
        return torch.where(sigma == levels[high], times[high], between)

    # --- Velocity ----------------------------------------------------------------------------

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Return the velocity of the transformer, guidance included; like x."""
        if self.example is None:
            self.example = cond.take(torch.tensor([0]))
        groups = same_shapes(cond)
        by_level = sigma.ndim > 0 and not self._takes_many_sigmas(x, sigma, cond)
        if by_level:
            levels = sigma.tolist()
            groups = [
                [row for row in group if levels[row] == level]
                for group in groups
                for level in dict.fromkeys(levels[row] for row in group)
            ]
        calls = self.in_step(len(groups)) if by_level or has_shapes(cond) else 1
        if calls == 1 and not by_level:
            return self._velocity(x, sigma, cond)
        # Where other processes have more groups: a row again. It stays in the graph, so that their
        # backward passes are alike too, and its gradient is 0.
        parts = []
        for group in [*groups, *([groups[0][:1]] * (calls - len(groups)))]:
            rows = torch.tensor(group, device=x.device)
            level = sigma if not sigma.ndim else sigma[group[0]] if by_level else sigma[rows]
            parts.append(self._velocity(x[rows], level, cond.take(rows)))
        order = torch.tensor([row for group in groups for row in group], device=x.device)
        return torch.cat(parts)[order.argsort()]

    def _velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Return the velocity of rows with texts of equal shapes."""
        times = self.times(sigma).unsqueeze(0)
        levels = 1 - sigma if self.inverted else sigma
        visit = Visit(
            texts=record_of(cond),
            latents=x.to(self.dtype),
            prepared=self._prepared,
            times=(
                times.as_subclass(RowTimes) if sigma.ndim else times,
                torch.stack([levels, torch.full_like(levels, float(self.inverted))]),
            ),
            until="step",
        )
        self.rows.computed += len(x) * (1 + self.guided)
        v = self._through(visit, len(x))
        return -v if self.inverted else v

    @torch.no_grad()
    def _takes_many_sigmas(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> bool:
        """Whether rows of one call may have noise levels of their own: tried once, on two rows."""
        if self._many_sigmas is None:
            computed = self.rows.computed  # by iterations, of which a trial is no part
            two = torch.tensor([0, 0], device=x.device)
            pair, text = x[two], cond.take(two)
            levels = torch.tensor([0.9, 0.4], device=x.device)
            expected = torch.cat(
                [self._velocity(pair[i : i + 1], levels[i], text.take(two[:1])) for i in (0, 1)]
            )
            try:
                together = self._velocity(pair, levels, text)
            except (RuntimeError, ValueError, TypeError):
                self._many_sigmas = False
            else:
                error = (together - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
                self._many_sigmas = bool(error <= ROUNDING[self.transformer.dtype])
            self.rows.computed = computed
            if not self._many_sigmas:
                LOG.info(
                    "%s takes one noise level a call: rows are grouped by it",
                    type(self.pipeline).__name__,
                )
        return self._many_sigmas

    # --- Images ------------------------------------------------------------------------------

    def autoencoder_on_device(self) -> AbstractContextManager[None]:
        """Move an offloaded autoencoder to the device inside the block."""
        return moved_to([self.pipeline.vae], self.device) if self._vae_is_away else nullcontext()

    def decode(self, x0: Tensor) -> Tensor:
        """Decode latents (B, *latent) to images (B, 3, H, W) fp32 in [0, 1], differentiably."""
        return images_of(self._decode(x0, "pt")).float()

    def _decode(self, x0: Tensor, output: str) -> Any:
        none = torch.zeros(0, device=self.device)
        visit = Visit(
            texts=self._example_record(len(x0)),
            latents=x0,
            prepared=self._prepared,
            times=(none, torch.zeros(2, device=self.device)),
        )
        return self._through(visit, len(x0), output_type=output)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Return the latents (B, *latent) fp32 of images (B, 3, H, W) in [0, 1].

        By the measured way from latents to the autoencoder's input; the mode of its posterior,
        computed in fp32.

        Raises:
            UserError: That way cannot be gone back.
        """
        with in_fp32(self.pipeline.vae) as vae:
            shape, back = inverse_of(self.decoder_input, self.latent_shape(), self.device)
            pixels = images.to(self.device, torch.float32) * 2 - 1
            if vae.config.get("in_channels") == RGBA:  # opaque
                pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
            if len(shape) == 4:  # of videos: one frame
                pixels = pixels.unsqueeze(2)
            code = vae.encode(pixels)
            z = code.latent_dist.mode() if hasattr(code, "latent_dist") else code.latent
            return back(z)

    def decoder_input(self, x: Tensor) -> Tensor:
        """Return what the autoencoder would decode for latents."""

        def decode(z: Tensor, *_: Any, **__: Any) -> None:
            raise Stop(z)

        vae = self.pipeline.vae
        vars(vae)["decode"] = decode
        try:
            return self._decode(x, "pt")
        finally:
            del vars(vae)["decode"]

    # --- Check -------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self, steps: int) -> str:
        """Run the pipeline once on one prompt, and compare each of its velocities with the gate's.

        The prompt is one that is encoded already, if there is any.

        Returns:
            A line for the log.

        Raises:
            UserError: A velocity depends on more than latent, noise level and text, or is not
                finite.
        """
        visit = Visit(texts=self._example_record(1))
        self._through(visit, 1, num_inference_steps=steps)
        sigmas, _ = self._schedule(steps)
        assert self.example is not None
        cond = self.example.to(self.device)
        name, worst = type(self.pipeline).__name__, 0.0
        for number, (x, expected) in enumerate(visit.steps[:steps]):
            v = self._velocity(x, sigmas[number], cond)
            v = -v if self.inverted else v
            if not expected.isfinite().all():
                raise UserError(
                    f"the velocity of {name} is not finite at step {number + 1} of {steps} of its "
                    "own run: look at pipeline.dtype and at the weights"
                )
            largest = expected.abs().max().clamp(min=1e-12)
            error = ((v - expected).abs().max() / largest).item()
            worst = max(worst, error)
            if not error <= ROUNDING[self.transformer.dtype]:
                raise UserError(
                    f"the velocity of {name} at step {number + 1} of {steps} differs by "
                    f"{error:.2g} from that of its own run: it depends on the step or on earlier "
                    "steps, which the policy's probability cannot"
                )
        apart = f" within {worst:.1g} of the largest number" if worst else ""
        return f"checked: all {steps} steps are those of {name}'s own call{apart}"


def check_class(pipeline: Any) -> None:
    """Raise UserError for a pipeline whose call is not the one that a backbone needs."""
    name = type(pipeline).__name__
    check_trainable(name)
    for part in ("scheduler", "vae", "transformer", "encode_prompt"):
        if getattr(pipeline, part, None) is None:
            raise UserError(f"{name} has no {part}, which training needs")
    parameters = inspect.signature(type(pipeline).__call__).parameters
    needs_image = "image" in parameters and parameters["image"].default is inspect.Parameter.empty
    edits = needs_image and list(parameters)[1] == "image"
    if "prompt" not in parameters or edits:
        raise UserError(f"{name} is no text-to-image pipeline")
    if getattr(pipeline, "guider", None) is not None:
        raise UserError(
            f"{name} has a guider, whose guidance depends on earlier steps: load it with "
            "guider=None"
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise UserError for a scheduler that steps no flow, or draws noise of its own."""
    name, config = type(scheduler).__name__, scheduler.config
    sde = str(config.get("algorithm_type", "")).startswith("sde") or "LCM" in name
    flow = "Flow" in name or config.get("prediction_type") == "flow_prediction"
    if sde or config.get("stochastic_sampling") or not flow:
        raise UserError(
            f"the scheduler {name} samples no flow, or draws noise at every step: load the "
            "pipeline with FlowMatchEulerDiscreteScheduler, and set stochastic_sampling to false "
            "in its scheduler_config.json"
        )


def check_sigmas(sigmas: Any, inverted: bool, name: str) -> Tensor:
    """Return a schedule's noise levels (T + 1,) fp32 from noise to 0.

    Raises:
        UserError: They do not fall from at most 1 to 0.
    """
    if not isinstance(sigmas, Tensor):
        raise UserError(f"the scheduler of {name} has no sigmas: it does not sample a flow")
    levels = sigmas.float()
    levels = 1 - levels if inverted else levels
    if levels[0] > 1 or levels[-1] != 0 or (levels.diff() >= 0).any():
        raise UserError(
            f"the noise levels of {name} run from {levels[0]:.4g} to {levels[-1]:.4g}, "
            "expected levels that fall at every step, from at most 1 to 0"
        )
    return levels


def images_of(result: Any) -> Tensor:
    """Return images (B, 3, H, W) in [0, 1] of a pipeline's output.

    Of a film it is the first frame; what is transparent shows white.
    """
    images = result[0]  # whatever name its class gives the first part
    images = torch.stack(list(images)) if isinstance(images, list) else images
    images = images[:, 0] if images.ndim == 5 else images
    if images.shape[1] == RGBA:
        color, opacity = images[:, :3], images[:, 3:]
        images = color * opacity + (1 - opacity)
    return images
