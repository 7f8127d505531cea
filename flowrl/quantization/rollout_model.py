"""A second network for rollouts that shares the policy's frozen weights and follows its adapters.

The two ways to have a LoRA in it: merged, W + s B A summed in fp32 and packed straight from
there, or as a path beside the packed base, Q(W) x + s B (A x).
"""

import copy
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.backbones.policy import POLICY, Policy, merged_weight
from flowrl.backbones.quantized_base import check_mergeable
from flowrl.errors import UserError
from flowrl.quantization.backends import (
    Backend,
    Plain,
    Resolved,
    State,
    backend_of,
    check_kernels,
    named,
    shown,
)
from flowrl.quantization.layer_rules import (
    LayerChoice,
    LayerRules,
    choose_layers,
    is_pointwise,
    layer_table,
    quantised_share,
    rules_of,
)
from flowrl.quantization.linear import RolloutLinear, SamePrecisionLinear
from flowrl.utils.files import write_text

# --- torch.compile for networks whose weights change in place, and whether that compiled anew --

GRAPHS = 64  # of one class of networks, at least; torch's own limit is 8
# By the names of torch's older versions too.
LIMIT = ("recompile_limit", "cache_size_limit")
FAIL = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
ERRORS = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")


def compile_network(network: nn.Module, backend: str = "inductor") -> nn.Module:
    """The same module, compiled at its first call for each shape it is given (dynamic=False).

    Names, attributes and addresses stay, so that weights can be written in place afterwards.
    backend: of torch.compile; "aot_eager" traces and guards alike but generates no code.
    Sets torch's limit of graphs in this process to GRAPHS at least, and has it stop there.
    """
    _limit_graphs()
    network.compile(dynamic=False, backend=backend)
    return network


def recompilations() -> int:
    """Graphs compiled in this process so far.

    Two equal readings, the first after the network has seen each of its shapes: nothing was
    compiled in between. What torch would not compile any more for its limit of graphs, and computes
    without, is not among them; that raises an error, see `within_limit`.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@contextmanager
def within_limit() -> Iterator[None]:
    """Where compiled networks are called: more graphs than torch's limit are a UserError."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in ERRORS:
            raise
        raise UserError(
            "the network was compiled for as many shapes of batches as torch allows: choose a "
            "rollout.batch_size that all numbers of images are multiples of, or set "
            "rollout.compile to false"
        ) from error


def _limit_graphs() -> None:
    """All networks of a class share the limit, twins of one policy too. Beyond it torch computes
    without compiling and only logs that, unless it is told to fail."""
    from torch._dynamo import config

    limit = next(name for name in LIMIT if hasattr(config, name))
    setattr(config, limit, max(GRAPHS, getattr(config, limit)))
    fail = next((name for name in FAIL if hasattr(config, name)), None)
    if fail is not None and not config.suppress_errors:  # torch refuses both at once
        setattr(config, fail, True)


# --- A second network for rollouts that shares the policy's frozen weights and follows its ad --


class RolloutModel:
    """The policy's network with other products in it, `network`; it never computes gradients.

    choices: layers with a format are packed by `backend`, once where no adapter changes them.
    Adapted layers without a format hold a merged copy in their own dtype, or with lora="side" have
    the path beside the frozen weight; no choices make an exact twin. Everything else is the
    policy's own tensors. compile: by torch.compile, once for each shape of the latents.
    Begins with the policy's adapter; `sync` before every rollout. Whether the policy's network is
    switched to another adapter, to none or to merged weights in the meantime changes nothing here.
    Made where the network is to stay: it does not follow it to another device or dtype.
    Raises UserError when a layer to be packed, or to have a path beside it, is neither linear nor
    a 1x1 convolution, and when one is to be merged that is trained in low precision itself.
    """

    def __init__(
        self,
        policy: Policy,
        choices: Sequence[LayerChoice],
        backend: Backend,
        *,
        lora: Literal["merge", "side"] = "merge",
        compile: bool = False,
    ):
        self.policy, self.choices, self.lora = policy, tuple(choices), lora
        self.network = sharing_copy(policy.network)
        self._adapted: list[_Adapted] = []
        formats = {c.name: backend for c in choices if c.format is not None}
        adapted = dict(_adapted_layers(policy.network))
        for name in dict.fromkeys((*adapted, *formats)):
            layer = self._layer(name, adapted.get(name), formats.get(name))
            parent, _, last = name.rpartition(".")
            setattr(self.network.get_submodule(parent), last, layer)
        if compile:
            compile_network(self.network)
        self.version = 0

    @torch.no_grad()
    def sync(self, adapter: str) -> None:
        """Take the weights of one of the policy's adapters, in place: every address stays.

        Raises ValueError for an adapter that the policy does not have.
        """
        for one in self._adapted:
            if adapter not in one.lora.lora_A:
                raise ValueError(f"the policy has no adapter {adapter!r}: {[*one.lora.lora_A]}")
            if not isinstance(one.layer, RolloutLinear):
                one.layer.weight.copy_(merged_weight(one.lora, one.weight, adapter))
            elif self.lora == "merge":
                one.layer.load(merged_weight(one.lora, one.weight, adapter))
            else:
                one.layer.load_side(*_factors(one.lora, adapter))
        self.version += 1

    def nbytes(self) -> int:
        """What the twin holds beside the policy's own tensors."""
        shared = {t.untyped_storage().data_ptr() for t in _tensors(self.policy.network)}
        own = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(self.network)}
        return sum(storage.nbytes() for start, storage in own.items() if start not in shared)

    @torch.no_grad()
    def _layer(self, name: str, lora: Any | None, backend: Backend | None) -> nn.Module:
        base: Any = self.policy.network.get_submodule(name)
        base = base.get_base_layer() if lora else base
        # Not the parameter: `Policy.merged` swaps what that holds.
        weight = base.weight.detach()
        check_mergeable(base.weight)  # nor packed, or put beside an adapter of its own
        merged = merged_weight(lora, weight, POLICY) if lora and self.lora == "merge" else None
        if backend is None and merged is not None:
            own: Any = self.network.get_submodule(name)
            layer = _exact(name, own.get_base_layer(), merged)
        else:
            layer = RolloutLinear(
                weight if merged is None else merged,
                base.bias,
                backend or _own_backend(base),
                side=_side(lora) if lora and merged is None else None,
                pointwise=_checked(name, base),
                shared=backend is None,
                packed=_packed_already(base, backend) if merged is None else None,
            )
        if lora is not None:
            self._adapted.append(_Adapted(layer=layer, lora=lora, weight=weight))
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted:
    """A layer of the twin, PEFT's layer that it follows, and the frozen weight of that."""

    layer: Any
    lora: Any
    weight: Tensor


def sharing_copy(network: nn.Module) -> nn.Module:
    """The same modules again over the same parameters and buffers, adapters and all."""
    return copy.deepcopy(network, {id(tensor): tensor for tensor in _tensors(network)})


def _exact(name: str, layer: Any, weight: Tensor) -> nn.Module:
    """The layer itself, a copy already, with a weight of its own."""
    if isinstance(layer, SamePrecisionLinear):
        raise UserError(
            f"layer {name} is trained in low precision, with its adapter beside packed weights: "
            "nothing can be merged into those, have the adapter beside them in rollouts too"
        )
    layer.weight = nn.Parameter(weight.to(layer.weight.dtype), requires_grad=False)
    return layer


def _checked(name: str, layer: nn.Module) -> bool:
    """Whether it is a 1x1 convolution. Raises UserError when it is no linear layer either."""
    if is_pointwise(layer):
        return True
    if type(layer) in (nn.Linear, SamePrecisionLinear):
        return False
    raise UserError(
        f"layer {name} is a {type(layer).__name__}, which can neither be quantised nor have its "
        "adapter beside it: leave it out of lora.targets, or merge and keep it exact"
    )


def _own_backend(layer: Any) -> Backend:
    """How a layer computes in the policy's network."""
    if isinstance(layer, SamePrecisionLinear):
        return layer.packed.backend
    return Plain(layer.weight.dtype)


def _packed_already(layer: Any, backend: Backend | None) -> State | None:
    """What a layer trained in low precision holds, if it computes in the same way."""
    if isinstance(layer, SamePrecisionLinear) and backend in (None, layer.packed.backend):
        return layer.packed.state()
    return None


def _adapted_layers(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers by name, as far as the policy's adapter is on them."""
    from peft.tuners.lora import LoraLayer

    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and POLICY in module.lora_A:
            yield name, module


def _side(lora: Any) -> tuple[Tensor, Tensor, float]:
    return (*_factors(lora, POLICY), lora.scaling[POLICY])


def _factors(lora: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """A (r, in) and B (out, r), of a 1x1 convolution too."""
    a, b = lora.lora_A[adapter].weight, lora.lora_B[adapter].weight
    return a.detach().flatten(1), b.detach().flatten(1)


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()
    yield from network.buffers()


# --- A precision on a network ------------------------------------------------------------------


def prepare(
    network: nn.Module,
    resolved: Resolved,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rules: LayerRules | None = None,
    min_dim: int | None,
    keep: Sequence[str] | None = None,
    four_over_six: bool = False,
    convolutions: bool = True,
    where: str = "",
) -> tuple[tuple[LayerChoice, ...], Backend]:
    """The network's layers with those that a precision quantises, none for bf16, and how.

    dtype: the network's own. rules: the backbone's own, None for those of the network's class.
    min_dim, keep, where: see `choose_layers`. convolutions: False keeps SANA's 1x1 ones exact,
    which can be drawn with in few bits, and not learned through. Raises UserError where no layer
    can be quantised or nothing says which, and for a kernel that computes otherwise than its
    emulation does.
    """
    backend = backend_of(resolved, dtype=dtype, four_over_six=four_over_six)
    if resolved.format == "bf16":
        return (), backend
    rules = rules_of(network, rules, min_dim=min_dim, keep=keep, where=where)
    rules = rules if convolutions else replace(rules, pointwise=False)
    choices = choose_layers(
        network, rules, resolved.format, min_dim=min_dim, keep=keep, where=where
    )
    shapes = {choice.shape for choice in choices if choice.format}
    check_kernels(backend, shapes, device, dtype)
    return choices, backend


# --- What a run computes in, for people and for the run's folder -------------------------------

FILE = "precision.json"
LOG = logging.getLogger(__name__)


def write_precision(
    folder: Path,
    resolved: Resolved,
    choices: Sequence[LayerChoice],
    *,
    dtype: torch.dtype,
    what: str = "candidates",
    since: int = 0,
    lora: str = "merge",
    four_over_six: bool = False,
    file: str = FILE,
) -> None:
    """Tell what `what` are drawn in, and write it with all layers to a file of the folder.

    choices: none where nothing is quantised. dtype: the network's own. since: the iteration, from
    0, before which it began.
    """
    LOG.info("%s", told(resolved, choices, dtype=dtype, what=what))
    content = {
        "what": what,
        "since_iteration": since,
        "precision": shown(resolved, dtype_name(dtype)),
        "dtype": dtype_name(dtype),
        **asdict(resolved),
        "format": None if resolved.format == "bf16" else resolved.format,
        "lora": lora,
        "four_over_six": four_over_six,
        "quantised_share": quantised_share(choices) if choices else 0.0,
        "layers": layer_table(choices),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / file, json.dumps(content, indent=2) + "\n")


def read_precision(folder: Path, file: str = FILE) -> str | None:
    """The precision as people write it; None where the folder's file does not say."""
    path = folder / file
    return json.loads(path.read_text(encoding="utf-8")).get("precision") if path.exists() else None


def told(
    resolved: Resolved,
    choices: Sequence[LayerChoice],
    *,
    dtype: torch.dtype,
    what: str = "candidates",
) -> str:
    """One sentence on the precision and its back end."""
    if resolved.format == "bf16":
        text = f"{what} are {shown(resolved, dtype_name(dtype))}"
        return text if resolved.requested == "bf16" else f"{text}: {resolved.reason}"
    text = f"{what} are computed in {named(resolved)} by {resolved.backend}: {resolved.reason}"
    if not choices:
        return text
    layers = sum(c.format is not None for c in choices)
    return (
        f"{text}; {layers} of {len(choices)} layers are quantised, "
        f"{quantised_share(choices):.0%} of their weights"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """As in float32."""
    return str(dtype).removeprefix("torch.")
