"""The policy: a LoRA adapter on the pipeline's transformer, and the networks it is compared to.

All share one set of frozen weights: the policy is the adapter "default", the reference is the
network without adapters, or one that moves; that, the EMA and the old policy are adapters of their
own.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.backbones.base import VelocityField
from flowrl.backbones.compiling import begin_step
from flowrl.backbones.lora_formats import LoRA
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.errors import UserError
from flowrl.trajectory import Conditioning

POLICY, OLD, EMA, REFERENCE = "default", "old", "ema", "reference"
TEACHER = "teacher{}"  # with its number


class Policy:
    """LoRA adapters with strength alpha / rank on the layers whose names end in `targets`.

    Adapters are fp32 whatever the frozen weights are; a new one changes nothing, as B is 0.

    Args:
        ema_decay: share of the average kept at each update, or None for no average.
        keep_old: also hold a policy that lags behind, see `update_old`.
        keep_reference: also hold a reference that moves, see `move_reference`.

    Raises:
        UserError: `targets` match no layer, or the network has such adapters already.
    """

    def __init__(
        self,
        backbone: PipelineBackbone,
        *,
        rank: int,
        alpha: float,
        seed: int,
        targets: Sequence[str] | None = None,
        ema_decay: float | None = None,
        keep_old: bool = False,
        keep_reference: bool = False,
    ):
        from peft.tuners.lora import LoraLayer

        self.backbone = backbone
        self.network = backbone.transformer
        self.ema_decay = ema_decay
        self.updates = 0
        # Weights of an adapter, by the iteration whose images were sampled with them ahead of time.
        self.sampled_with: dict[int, list[Tensor]] = {}
        self.starts_at_base = True  # False where it began with a LoRA
        self.graphs = False  # see `replay_graphs`
        self.whole = True  # False from an iteration's first update to its end: not to be saved
        self.network.requires_grad_(False).eval()
        names = [POLICY] + [EMA] * (ema_decay is not None) + [OLD] * keep_old
        self.copies = names[1:]
        names += [REFERENCE] * keep_reference
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for name in names:
                self._add(name, rank, alpha, tuple(targets or backbone.lora_targets))
        # Looked for once, among thousands of modules.
        modules = self.network.modules()
        self._layers: list[Any] = [layer for layer in modules if isinstance(layer, LoraLayer)]
        self._by_name = {name: _parameters_of(self.network, name) for name in names}
        for name in self.copies:
            self.set_weights(name, self.parameters())
        self._train_policy_alone()

    def _add(self, name: str, rank: int, alpha: float, targets: tuple[str, ...]) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        if name in getattr(self.network, "peft_config", {}):
            raise UserError(
                f"the pipeline already carries an adapter {name!r}, of an earlier training or a "
                "loaded LoRA: load the pipeline anew"
            )
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT only divides it by r
            target_modules=list(targets),
            init_lora_weights="gaussian",
        )
        try:
            with warnings.catch_warnings():  # several adapters are meant
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                # Of torchao's weights: that they cannot be merged into.
                warnings.filterwarnings("ignore", message=".*without `get_apply_tensor_subclass`")
                if hasattr(self.network, "add_adapter"):
                    self.network.add_adapter(config, adapter_name=name)  # type: ignore[operator]
                else:  # a network without diffusers' PEFT mixin
                    inject_adapter_in_model(config, self.network, adapter_name=name)
        except ValueError as error:
            kind = type(self.network).__name__
            raise UserError(
                f"lora.targets {list(targets)} match no layer of {kind}: use suffixes of the "
                "names of its linear layers, such as attn.to_q"
            ) from error
        for parameter in _parameters_of(self.network, name):
            parameter.data = parameter.data.float()

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Return the velocity with the adapter in use: the policy's, unless inside `using`."""
        return self.backbone.velocity(x, sigma, cond)

    @torch.no_grad()
    def velocity_of(self, adapter: str, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Return an adapter's velocity without a gradient, the base model's where none is so named.

        A reference that does not move and a teacher without a LoRA are the base model.
        """
        with self.using(adapter) if adapter in self.network.peft_config else self.disabled():
            return self.backbone.velocity(x, sigma, cond)

    def replay_graphs(self) -> None:
        """Take the network's blocks for CUDA graphs from now on, see `compile_blocks`.

        Gradients get tensors of their own, to which backwards add: a graph writes over its results.
        """
        self.graphs = True
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def begin_step(self) -> None:
        """Begin a micro-batch, or a step of sampling, that needs nothing of those before."""
        if self.graphs:
            begin_step()

    def stepwise(self, velocity: VelocityField) -> VelocityField:
        """Return a velocity each call of which begins a step."""

        def begun(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            begin_step()
            return velocity(x, sigma, cond)

        return begun if self.graphs else velocity

    def add_teacher(self, number: int, lora: LoRA) -> None:
        """Hold another LoRA that never changes and is in no checkpoint.

        lora: fitted to the network, see `fit_lora`. Raises UserError for layers that the policy
        does not adapt: there the teacher would stay active.
        """
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

        adapted = {
            name.partition(".lora_")[0] for name, _ in _named_parameters_of(self.network, POLICY)
        }
        if missing := sorted(lora.scales.keys() - adapted):
            raise UserError(
                f"the teacher {lora.path} adapts {missing[0]}, which the student does not: "
                "give lora.targets that name its layers, too"
            )
        name = TEACHER.format(number)
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            warnings.filterwarnings("ignore", message=".*without `get_apply_tensor_subclass`")
            inject_adapter_in_model(
                LoraConfig(**lora.header()), self.network, adapter_name=name, state_dict=lora.state
            )
        for parameter in _parameters_of(self.network, name):  # before its numbers are rounded
            parameter.data = parameter.data.float()
        set_peft_model_state_dict(self.network, lora.state, adapter_name=name)
        self._train_policy_alone()

    def _train_policy_alone(self) -> None:
        """Use the policy and let it alone have a gradient; PEFT gives one to each new adapter."""
        self.network.requires_grad_(False)
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        self.use(POLICY)

    def use(self, name: str) -> None:
        """Let the network's calls go through an adapter, whichever is trained."""
        for layer in self._layers:
            layer._active_adapter = [name]  # PEFT's own switch also rewrites `requires_grad`

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Use another adapter inside the block."""
        self.use(name)
        try:
            yield
        finally:
            self.use(POLICY)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Use no adapter inside the block."""
        with switched_off(self._layers):
            yield

    @contextlib.contextmanager
    def merged(self, name: str = POLICY) -> Iterator[None]:
        """Merge an adapter into the frozen weights inside the block: fewer, larger matmuls.

        The weights, which must pass `check_mergeable`, are restored from a copy, bit for bit; PEFT
        subtracts, which drifts.
        """
        before: list[tuple[nn.Parameter, Tensor]] = []
        with torch.no_grad(), self.disabled():
            for layer in self._layers:
                weight = layer.get_base_layer().weight
                before.append((weight, weight.data))
                weight.data = merged_weight(layer, weight.data, name).to(weight.dtype)
            try:
                yield
            finally:
                for weight, data in before:
                    weight.data = data

    def parameters(self) -> list[nn.Parameter]:
        return self._by_name[POLICY]

    @torch.no_grad()
    def update_ema_and_count(self) -> None:
        """Count update n and move the EMA to the policy; its decay rises as (1 + n) / (10 + n)."""
        self.updates += 1
        if self.ema_decay is not None:
            decay = min(self.ema_decay, (1 + self.updates) / (10 + self.updates))
            for mean, now in zip(self._by_name[EMA], self._by_name[POLICY], strict=True):
                mean.lerp_(now, 1 - decay)

    @torch.no_grad()
    def update_old(self, decay: float = 0.0) -> None:
        """Move the old policy to decay * old + (1 - decay) * policy; needs `keep_old`."""
        for old, now in zip(self._by_name[OLD], self._by_name[POLICY], strict=True):
            old.lerp_(now, 1 - decay)

    def move_reference(self) -> None:
        """Let the reference be the policy of now; needs `keep_reference`."""
        self.set_weights(REFERENCE, self.parameters())

    @property
    def export_adapter(self) -> str:
        """The adapter that is evaluated and exported: the EMA where there is one."""
        return EMA if self.ema_decay is not None else POLICY

    def state_dict(self) -> dict:
        adapters = {name: [p.data for p in ps] for name, ps in self._by_name.items()}
        ahead = {str(iteration): ts for iteration, ts in self.sampled_with.items()}
        return {"adapters": adapters, "updates": self.updates} | ({"ahead": ahead} if ahead else {})

    def check_state(self, state: dict) -> None:
        """Raise UserError for the state of a policy with other adapters."""
        shapes = {n: [t.shape for t in ts] for n, ts in state["adapters"].items()}
        here = {n: [p.shape for p in ps] for n, ps in self._by_name.items()}
        if shapes != here:
            raise UserError(
                f"the checkpoint's adapters, {', '.join(shapes)}, are not those of this recipe, "
                f"{', '.join(here)}: give objective.kind, ema.decay, reference, pipeline.path, "
                "lora.rank and lora.targets as it was trained"
            )

    def load_state_dict(self, state: dict) -> None:
        """Raises UserError for the state of a policy with other adapters."""
        self.check_state(state)
        self.load_adapters(state)
        device = self._by_name[POLICY][0].device
        self.sampled_with = {
            int(iteration): [tensor.to(device) for tensor in tensors]
            for iteration, tensors in state.get("ahead", {}).items()
        }

    def load_adapters(self, state: dict) -> None:
        """Load adapters and their count of updates; what was sampled ahead stays as it is."""
        for name, tensors in state["adapters"].items():
            self.set_weights(name, tensors)
        self.updates = state["updates"]

    def keep_weights(self, iteration: int, adapter: str) -> None:
        """Keep what an adapter is now: the images of an iteration are sampled with it."""
        self.sampled_with[iteration] = self.weights(adapter)

    def forget_weights(self, *, before: int) -> None:
        """Forget what the images of earlier iterations were sampled with."""
        for iteration in [i for i in self.sampled_with if i < before]:
            del self.sampled_with[iteration]

    @contextlib.contextmanager
    def weights_of(self, iteration: int, adapter: str) -> Iterator[None]:
        """Give an adapter the weights kept for an iteration, if there are any, while inside."""
        now = self.weights(adapter)
        self.set_weights(adapter, self.sampled_with.get(iteration, now))
        try:
            yield
        finally:
            self.set_weights(adapter, now)

    def sampling_policy_as_old(self, iteration: int) -> contextlib.AbstractContextManager[None]:
        """Let the old policy be the weights that sampled an iteration, inside the block.

        They differ where the iteration was sampled ahead of time; else nothing changes.
        """
        if iteration not in self.sampled_with or OLD not in self._by_name:
            return contextlib.nullcontext()
        return self.weights_of(iteration, OLD)

    def weights(self, adapter: str) -> list[Tensor]:
        """Return copies of an adapter's weights, in the order of its layers."""
        return [p.detach().clone() for p in self._by_name[adapter]]

    @torch.no_grad()
    def set_weights(self, adapter: str, tensors: Sequence[Tensor]) -> None:
        """Give an adapter weights, in the order of its layers."""
        for parameter, tensor in zip(self._by_name[adapter], tensors, strict=True):
            parameter.copy_(tensor)

    @torch.no_grad()
    def start_from(self, state: dict[str, Tensor]) -> None:
        """Start from a LoRA, tensors by PEFT's names without the adapter's.

        Raises UserError when its layers or ranks are not the policy's.
        """
        parameters = dict(_named_parameters_of(self.network, POLICY))
        wrong = sorted(parameters.keys() ^ state.keys())
        wrong = wrong or [k for k, p in parameters.items() if p.shape != state[k].shape]
        if wrong:
            raise UserError(
                f"the LoRA does not fit: {len(wrong)} tensors differ in name or shape, the first "
                f"is {wrong[0]}; set lora.rank and lora.targets as it was trained"
            )
        self.starts_at_base = False
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
        for name in self.copies:
            self.set_weights(name, self.parameters())


def merged_weight(layer: Any, weight: Tensor, adapter: str) -> Tensor:
    """Return W + s B A of one of PEFT's layers, fp32 under autocast too; shaped like the weight."""
    with torch.autocast(weight.device.type, enabled=False):
        return weight.float() + layer.get_delta_weight(adapter)


def _named_parameters_of(network: nn.Module, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    mark = f".{adapter}."
    for name, parameter in network.named_parameters():
        if "lora_" in name and mark in name:
            yield name.replace(mark, "."), parameter


def _parameters_of(network: nn.Module, adapter: str) -> list[nn.Parameter]:
    return [parameter for _, parameter in _named_parameters_of(network, adapter)]


@contextlib.contextmanager
def switched_off(layers: list[Any]) -> Iterator[None]:
    """Switch adapters off inside the block. PEFT's own switch also rewrites `requires_grad`."""
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
