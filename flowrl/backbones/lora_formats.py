"""Read LoRAs of any make into one form: diffusers', PEFT's folders, kohya's and ComfyUI's keys."""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from flowrl.backbones.loading import hub_error_message
from flowrl.backbones.original_layers import (
    Factors,
    from_original,
    kohya_names,
    layers_of,
    original_family,
)
from flowrl.errors import DamagedFile, UserError
from flowrl.utils.digests import check_seal, notes_of, seal
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import parse_state, state_bytes

LOG = logging.getLogger(__name__)

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
REMEDY = "export the run that it came from, or download it again"
METADATA = "lora_adapter_metadata"  # diffusers' name for the header that holds r and alpha
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
KOHYA, COMFYUI = "lora_unet_", "diffusion_model."
NAMED = 3  # layers that an error names
SPELLINGS = {".lora_down.weight": ".lora_A.weight", ".lora_up.weight": ".lora_B.weight"}
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)(?:@([\w./-]+))?")
# What an adapter_config.json may ask beside low-rank sums of weights.
REFUSED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "arrow_config",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """A LoRA of a transformer: layers by diffusers' names, tensors by PEFT's."""

    name: str  # as it was asked for
    path: Path  # its file
    make: str  # whose keys: diffusers, PEFT, kohya, ComfyUI
    state: dict[str, Tensor]  # LAYER.lora_A.weight (r, in) and LAYER.lora_B.weight (out, r)
    strengths: dict[str, float]  # alpha / rank, by layer
    ready: bool  # whether diffusers loads the file as it is, with these strengths

    @property
    def strength(self) -> float:
        """The strength of all layers. Raises UserError where it differs."""
        found = set(self.strengths.values())
        if len(found) > 1:
            raise UserError(
                f"{self.name} has strengths from {min(found):g} to {max(found):g}, expected one "
                "for all layers here"
            )
        return next(iter(found))

    @property
    def rank(self) -> int:
        """The rank of all layers. Raises UserError where it differs."""
        found = {len(t) for name, t in self.state.items() if ".lora_A." in name}
        if len(found) > 1:
            raise UserError(
                f"{self.name} has ranks from {min(found)} to {max(found)}, expected one for all "
                "layers here"
            )
        return next(iter(found))

    def packed(self) -> bytes:
        """Return it for another process, see `unpacked`."""
        said = {"name": self.name, "path": str(self.path), "make": self.make}
        return state_bytes(said | {"state": self.state, "strengths": self.strengths})

    @staticmethod
    def unpacked(data: bytes) -> "LoRA":
        """Return the LoRA that another process has read, whose file this one may not see."""
        found = parse_state(data, Path("a LoRA"))
        return LoRA(**found | {"path": Path(found["path"]), "ready": False})

    def header(self) -> dict[str, Any]:
        """Return what PEFT's configuration says of it, ranks and alphas of layers included.

        PEFT takes keys of patterns for ends of names, in regular expressions: `proj_out` would be
        that of every block, too.
        """
        ranks = {name: len(down) for name, (down, _) in layers_of(self.state).items()}
        alphas = {name: round(self.strengths[name] * rank, 9) for name, rank in ranks.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        return {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
            "rank_pattern": {_exactly(name): own for name, own in ranks.items() if own != rank},
            "alpha_pattern": {_exactly(name): own for name, own in alphas.items() if own != alpha},
            "target_modules": sorted(ranks),
            "bias": "none",
        }


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alpha:
    """What the caller says of a file's alpha."""

    asked: float | None  # --lora-alpha
    default: float | None  # of a recipe; None is the rank

    def strengths(self, ranks: Mapping[str, int], path: Path) -> dict[str, float]:
        """Return the strengths for a file that does not say its alpha; warn unless it was asked."""
        alpha = self.default if self.asked is None else self.asked
        if self.asked is None:
            known = sorted(set(ranks.values()))
            said = f"alpha = rank = {', '.join(map(str, known))}" if alpha is None else f"{alpha:g}"
            at = 1.0 if alpha is None else alpha / known[0]
            LOG.warning(
                "%s does not say its alpha: it acts with the strength %g (%s); --lora-alpha says "
                "what it was trained with",
                path, at, said if alpha is None else f"alpha {said}, as lora.alpha",
            )  # fmt: skip
        return {name: 1.0 if alpha is None else alpha / rank for name, rank in ranks.items()}

    def check(self, own: float, path: Path) -> None:
        """Raise UserError when another alpha than the file's own was asked for."""
        if self.asked is not None and self.asked != own:
            raise UserError(
                f"{path} was trained with alpha {own:g}, and --lora-alpha is {self.asked:g}: "
                "leave it out"
            )


def lora_of_main(
    source: str | Path,
    runtime: Runtime | None,
    *,
    alpha: float | None = None,
    default_alpha: float | None = None,
) -> LoRA:
    """Read a LoRA on the main process, whose disk alone may hold it; return it on all.

    runtime: None for a process alone. See `open_lora`, whose UserError all of them raise.
    """
    if runtime is None or runtime.world_size == 1:
        return open_lora(source, alpha=alpha, default_alpha=default_alpha)
    found = runtime.from_main(
        lambda: open_lora(source, alpha=alpha, default_alpha=default_alpha).packed()
    )
    return LoRA.unpacked(found)


def open_lora(
    source: str | Path, *, alpha: float | None = None, default_alpha: float | None = None
) -> LoRA:
    """Read a LoRA: a file, a folder (also above `lora` or one `checkpoint-N/lora`), a Hub name.

    Args:
        source: Hub names are OWNER/NAME, OWNER/NAME/SUBFOLDER, each with @REVISION or without.
        alpha: of a file that does not say its own; None is default_alpha, and warns.
        default_alpha: None is the file's rank.

    Raises:
        UserError: there is none, it is damaged, or it holds what is no LoRA of a transformer.
    """
    path = lora_file(source)
    tensors, metadata = _read(path)
    make, assumed = _make(tensors, path), _Alpha(asked=alpha, default=default_alpha)
    if make == "PEFT":
        return _of_peft(str(source), path, tensors, assumed)
    if make in ("kohya", "ComfyUI"):
        return _of_original(str(source), path, make, tensors, assumed)
    header = _header(metadata, path)
    return _of_diffusers(str(source), path, tensors, header, assumed)


def lora_file(source: str | Path) -> Path:
    """Return the path of a LoRA's file; one on the Hub is downloaded. Raises UserError for none."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        if (found := _in_folder(path)) is not None:
            return found
    elif (match := HUB_NAME.fullmatch(str(source))) is not None and ".." not in path.parts:
        return _on_hub(str(source), match[1], match[2].strip("/"), match[3])
    raise UserError(
        f"no LoRA at {source}: give a .safetensors file, a folder with {FILE} or {PEFT_FILE}, or a "
        "name on the Hub as OWNER/NAME, OWNER/NAME/SUBFOLDER or OWNER/NAME@REVISION"
    )


def _in_folder(folder: Path) -> Path | None:
    for place in (folder, folder / "lora"):
        for name in (FILE, PEFT_FILE):
            if (place / name).is_file():
                return place / name
        if any(
            (place / name).is_file() for name in ("adapter_model.bin", "pytorch_lora_weights.bin")
        ):
            raise UserError(
                f"{place} holds a pickle, which runs code when it is read: save it anew with "
                "safe_serialization=True"
            )
    nested = [p for p in sorted(folder.glob("checkpoint-*")) if p.is_dir()]
    found = {p.name: inner for p in nested if (inner := _in_folder(p)) is not None}
    if len(found) > 1:
        raise UserError(f"{folder} holds several LoRAs: name one of {', '.join(found)} in it")
    alone = sorted(folder.glob("*.safetensors"))
    return next(iter(found.values()), alone[0] if len(alone) == 1 else None)


def _on_hub(source: str, name: str, subfolder: str, revision: str | None) -> Path:
    """Download a LoRA with the configuration beside it."""
    from huggingface_hub import hf_hub_download

    def get(path: PurePosixPath) -> Path:
        return Path(hf_hub_download(name, str(path), revision=revision))

    inside = PurePosixPath(subfolder)
    if inside.suffix == ".safetensors":
        tried = [inside]
    else:
        tried = [place / file for place in (inside, inside / "lora") for file in (FILE, PEFT_FILE)]
    for place in tried:
        try:
            if place.name == PEFT_FILE:
                get(place.with_name(PEFT_CONFIG))
            return get(place)
        except Exception as error:  # HTTP libraries have errors of their own
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
                continue
            if place is not tried[-1] and "LocalEntryNotFoundError" in kinds:
                continue
            if message := hub_error_message(error, name, revision):
                raise UserError(
                    f"cannot load the LoRA {source}, which is no file or folder here: {message}"
                ) from error
            raise
    shown = f"{name}/{subfolder}".rstrip("/")
    raise UserError(
        f"{shown} on the Hub has none of {', '.join(map(str, tried))}: name its subfolder as "
        f"{name}/SUBFOLDER"
    )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and header. Raises DamagedFile for one that is not what flowrl wrote."""
    data = path.read_bytes()
    check_seal(data, path)
    try:
        tensors, notes = load(data), notes_of(data)
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file, or not whole: {error}") from error
    if not are_finite(tensors):
        raise DamagedFile(f"{path} holds numbers that are not finite: take an earlier checkpoint's")
    return tensors, dict(notes)


def are_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether no tensor holds NaN or infinity."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def _header(metadata: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    """Return the adapter's configuration, {} where the file has none.

    Raises UserError, naming the entry, for one that diffusers could not read or would read as
    another strength.
    """
    try:
        header = json.loads((metadata or {}).get(METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} has a header {METADATA} that is not JSON: {REMEDY}") from error
    if not isinstance(header, dict):
        raise UserError(f"{path} has a header {METADATA} that is no JSON object: {REMEDY}")
    own = {key.removeprefix(PREFIX): v for key, v in header.items() if key.startswith(PREFIX)}
    _check_numbers(own, f"{path} has", f" in its header {METADATA}")
    return header


def _check_numbers(config: Mapping[str, Any], before: str, after: str) -> None:
    """Raise UserError, "BEFORE NAME = VALUE AFTER, ...", unless ranks and alphas are numbers."""
    said = [(name, name, config[name]) for name in ("r", "lora_alpha") if name in config]
    for name, kind in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise UserError(
                f"{before} {name} = {patterns!r:.40}{after}, expected an object: {REMEDY}"
            )
        for key, value in patterns.items():
            said.append((f"{name}[{key!r}]", kind, value))
            try:
                re.compile(key)
            except re.error as error:
                raise UserError(
                    f"{before} {name}[{key!r}]{after}, which is no regular expression ({error}): "
                    f"{REMEDY}"
                ) from error
    for name, kind, value in said:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = kind != "r" or (isinstance(value, int) and value >= 1)
        if not number or not whole or not 0 < abs(value) < math.inf:
            wanted = "a whole number from 1" if kind == "r" else "a finite number other than 0"
            raise UserError(f"{before} {name} = {value!r:.40}{after}, expected {wanted}: {REMEDY}")


def _make(tensors: Mapping[str, Tensor], path: Path) -> str:
    names = list(tensors)
    if path.name == PEFT_FILE or any(name.startswith(PEFT_PREFIX) for name in names):
        return "PEFT"
    if any(name.startswith(KOHYA) for name in names):
        return "kohya"
    if any(name.startswith(COMFYUI) for name in names):
        return "ComfyUI"
    return "diffusers"


# --- diffusers and PEFT: layers have their names ------------------------------------------------


def _of_diffusers(
    name: str, path: Path, tensors: Mapping[str, Tensor], header: Mapping, assumed: _Alpha
) -> LoRA:
    prefixed = any(key.startswith(PREFIX) for key in tensors)
    start = PREFIX if prefixed else ""
    state, alphas = _sorted(tensors, start, path)
    own = {key.removeprefix(PREFIX): value for key, value in header.items()}
    says = {"r", "lora_alpha"} <= set(own)
    if alphas and not says:
        strengths = _from_alphas(state, alphas, assumed, path)
    else:
        strengths = _strengths(state, own if says else None, assumed, path)
    return LoRA(
        name=name, path=path, make="diffusers", state=state, strengths=strengths,
        ready=prefixed and says and not alphas and bool(own.get("target_modules")),
    )  # fmt: skip


def _of_peft(name: str, path: Path, tensors: Mapping[str, Tensor], assumed: _Alpha) -> LoRA:
    beside = path.with_name(PEFT_CONFIG)
    config = _config(beside) if beside.is_file() else None
    # Files of a policy with several adapters have the adapter's name in the keys.
    plain = {
        re.sub(r"\.(lora_[AB])\.\w+\.weight$", r".\1.weight", k): t for k, t in tensors.items()
    }
    start = PEFT_PREFIX if any(key.startswith(PEFT_PREFIX) for key in plain) else ""
    if any(key.startswith(start + PREFIX) for key in plain):  # the pipeline's part was wrapped
        start += PREFIX
    state, _ = _sorted(plain, start, path)
    strengths = _strengths(state, config, assumed, path)
    return LoRA(name=name, path=path, make="PEFT", state=state, strengths=strengths, ready=False)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
        kind = config.get("peft_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object: {error}") from error
    if kind != "LORA" or not {"r", "lora_alpha"} <= set(config):
        raise UserError(
            f"{path} describes {kind or 'no adapter'}, expected peft_type LORA with r and "
            "lora_alpha"
        )
    wrong = [key for key in REFUSED if config.get(key)]
    wrong += ["bias"] if config.get("bias", "none") != "none" else []
    if wrong:
        raise UserError(
            f"{path} sets {', '.join(wrong)}, but flowrl takes plain LoRAs: merge it with PEFT's "
            "merge_and_unload"
        )
    _check_numbers(config, f"{path} has", "")
    return config


def _sorted(
    tensors: Mapping[str, Tensor], start: str, path: Path
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return factors by PEFT's name, and alphas by layer. Raises UserError for anything else."""
    state: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    others = []
    for key, tensor in tensors.items():
        for old, new in SPELLINGS.items():
            key = key.removesuffix(old) + new if key.endswith(old) else key
        if not key.startswith(start):
            others.append(key)
        elif key.endswith(".alpha") and tensor.numel() == 1:
            alphas[key.removeprefix(start).removesuffix(".alpha")] = float(tensor)
        elif key.endswith((".lora_A.weight", ".lora_B.weight")):
            state[key.removeprefix(start)] = tensor
        else:
            others.append(key)
    if not state:
        raise UserError(
            f"{path} holds no LoRA of a transformer in names of diffusers, PEFT, kohya or ComfyUI; "
            f"its first tensor is {min(tensors, default='missing')}"
        )
    if others:
        raise UserError(
            f"{path} holds {len(others)} tensors beside the transformer's LoRA, {_few(others)}: "
            "only plain LoRAs of the transformer are taken"
        )
    _check_factors(state, path)
    return state, alphas


def _check_factors(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError unless all tensors are pairs of matrices, or of convolutions, of a rank."""
    empty = sorted(name for name, tensor in state.items() if not tensor.numel())
    if empty:
        raise UserError(f"{path} has a tensor of rank 0, {empty[0]}: such a LoRA changes nothing")
    for name, (down, up) in layers_of(state).items():  # raises unless all are pairs
        if (down.ndim, up.ndim) not in ((2, 2), (4, 4)) or len(down) != up.shape[1]:
            raise UserError(
                f"{path} has factors of {tuple(down.shape)} and {tuple(up.shape)} for {name}, "
                f"expected (rank, inputs) and (outputs, rank): {REMEDY}"
            )


def _from_alphas(
    state: Mapping[str, Tensor], alphas: Mapping[str, float], assumed: _Alpha, path: Path
) -> dict[str, float]:
    layers = layers_of(state)
    for own in alphas.values():
        assumed.check(own, path)
    if missing := sorted(set(layers) - set(alphas)):
        raise UserError(f"{path} has alphas, but none for {_few(missing)}")
    return {name: alphas[name] / len(down) for name, (down, _) in layers.items()}


def _strengths(
    state: Mapping[str, Tensor], config: Mapping | None, assumed: _Alpha, path: Path
) -> dict[str, float]:
    """Return alpha / rank by layer, as a PEFT configuration says, or else as assumed."""
    ranks = {name: len(down) for name, (down, _) in layers_of(state).items()}
    if config is None:
        return assumed.strengths(ranks, path)
    assumed.check(config["lora_alpha"], path)
    from peft.utils.other import get_pattern_key

    strengths = {}
    for name, rank in ranks.items():
        own = {}
        for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            known = config.get(pattern) or {}
            own[key] = known.get(get_pattern_key(list(known), name), config[key])
        if own["r"] != rank:
            raise UserError(f"{path} says rank {own['r']} for {name}, whose tensors have {rank}")
        root = math.sqrt(rank) if config.get("use_rslora") else rank
        strengths[name] = own["lora_alpha"] / root
    return strengths


# --- kohya and ComfyUI: layers as the original checkpoints name and fuse them ---------------------


def _of_original(
    name: str, path: Path, make: str, tensors: Mapping[str, Tensor], assumed: _Alpha
) -> LoRA:
    family = original_family(tensors, path)
    if make == "kohya" and family == "flux":
        return _of_kohya_flux(name, path, tensors, assumed)
    start = KOHYA if make == "kohya" else COMFYUI
    state, alphas = _sorted(tensors, start, path)
    fused = layers_of(state)
    if alphas:
        strengths = _from_alphas(state, alphas, assumed, path)
    else:
        strengths = _strengths(state, None, assumed, path)
    if make == "kohya":
        named = kohya_names(fused, family)
        if missing := sorted(set(fused) - set(named)):
            raise UserError(f"{path} adapts {_few(missing)}, which {family} has not")
        fused = {named[key]: factors for key, factors in fused.items()}
        strengths = {named[key]: value for key, value in strengths.items()}
    found: dict[str, Factors] = {}
    own: dict[str, float] = {}
    for layer, factors in fused.items():
        for part, its in from_original(layer, factors, family, str(path)).items():
            found[part] = its
            # The alpha of a fused layer belongs to its whole rank.
            own[part] = strengths[layer]
    if not found:
        raise UserError(f"{path} has zeros alone in its upper factors: it changes nothing")
    state = {
        f"{k}.lora_{s}.weight": t
        for k, pair in found.items()
        for s, t in zip("AB", pair, strict=True)
    }
    return LoRA(name=name, path=path, make=make, state=state, strengths=own, ready=False)


def _of_kohya_flux(name: str, path: Path, tensors: Mapping[str, Tensor], assumed: _Alpha) -> LoRA:
    """Convert with diffusers, which folds alpha into the factors."""
    from diffusers.loaders import FluxLoraLoaderMixin

    factors, alphas = _sorted(tensors, KOHYA, path)
    if alphas:
        strengths = _from_alphas(factors, alphas, assumed, path)
    else:
        strengths = _strengths(factors, None, assumed, path)
    asked: dict[str, Tensor] = {}
    for layer, (down, up) in layers_of(factors).items():
        last = layer.startswith("final_layer")  # whose alpha diffusers leaves out
        asked[f"{KOHYA}{layer}.lora_down.weight"] = down
        asked[f"{KOHYA}{layer}.lora_up.weight"] = up * strengths[layer] if last else up
        if not last:
            asked[f"{KOHYA}{layer}.alpha"] = torch.tensor(
                alphas.get(layer, strengths[layer] * len(down))
            )
    try:
        converted: Any = FluxLoraLoaderMixin.lora_state_dict(asked)
    except (ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{path}: diffusers cannot convert its keys: {error}") from error
    # Layers outside of the blocks come without the prefix.
    whole = {f"{PREFIX}{key.removeprefix(PREFIX)}": value for key, value in converted.items()}
    state, _ = _sorted(whole, PREFIX, path)
    strengths = dict.fromkeys(layers_of(state), 1.0)
    return LoRA(name=name, path=path, make="kohya", state=state, strengths=strengths, ready=False)


# --- does it fit? -----------------------------------------------------------------------------


def check_fits(lora: LoRA, network: nn.Module) -> None:
    """Raise UserError, naming layers, unless the network has every layer of the LoRA, as large."""
    modules, kind = dict(network.named_modules()), type(network).__name__
    layers = layers_of(lora.state)
    absent = [name for name in layers if getattr(modules.get(name), "weight", None) is None]
    if absent:
        raise UserError(
            f"{lora.path} adapts {len(layers)} layers, of which {kind} lacks {len(absent)}, "
            f"{_few(absent)}: it was trained for another pipeline"
        )
    for name, (down, up) in layers.items():
        module: Any = modules[name]
        weight = module.weight
        rows, columns = weight.shape[:2] if weight.ndim > 1 else (0, 0)
        own = getattr(module, "out_features", rows), getattr(module, "in_features", columns)
        if own != (len(up), down.shape[1]):
            raise UserError(
                f"{lora.path} changes {name} by {len(up)} x {down.shape[1]}, but it is "
                f"{own[0]} x {own[1]} in {kind}: it was trained for another pipeline"
            )


def normalised(lora: LoRA) -> bytes:
    """Return the LoRA as diffusers' file; its header holds ranks, alphas and a digest."""
    from safetensors.torch import save

    header = {f"{PREFIX}{key}": value for key, value in lora.header().items()}
    tensors = {f"{PREFIX}{key}": tensor.contiguous() for key, tensor in lora.state.items()}
    return seal(save(tensors, {"format": "pt", METADATA: json.dumps(header, sort_keys=True)}))


def _few(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
