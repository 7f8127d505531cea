"""Read LoRAs of any program into one form: diffusers', PEFT's, kohya's and ComfyUI's."""

import functools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load
from torch import Tensor

from flowrl.backbones.loading import hub_error_message
from flowrl.backbones.original_layers import Factors, layers_of
from flowrl.errors import DamagedFile, UserError
from flowrl.utils.digests import check_seal, notes_of, seal
from flowrl.utils.distributed import Runtime
from flowrl.utils.fields import Count, Flag, Positive
from flowrl.utils.files import parse_state, state_bytes
from flowrl.utils.progress import announced
from flowrl.utils.untrusted import parse_json, read_bytes, read_json

LOG = logging.getLogger(__name__)

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."  # of layers in a file for a pipeline's `load_lora_weights`
METADATA = "lora_adapter_metadata"  # diffusers' name for the header that holds r and alpha
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
REMEDY = "export the run that it came from, or download it again"
MAX_BYTES = 64 * 2**30  # of a LoRA's file
NAMED = 3  # layers that an error names
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)(?:@([\w./-]+))?")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A LoRA of a transformer: layers as the file names them, without wrappers' prefixes.

    `flowrl.backbones.lora_files.fit_lora` gives them the names of a pipeline's network.
    """

    name: str  # as the user wrote it
    path: Path  # its file
    make: str  # whose keys: diffusers, PEFT, kohya, ComfyUI
    state: dict[str, Tensor]  # LAYER.lora_A.weight (r, in) and LAYER.lora_B.weight (out, r)
    scales: dict[str, float]  # alpha / rank, by layer
    prefix: str = PREFIX  # of the keys in a file for diffusers

    @functools.cached_property
    def layers(self) -> dict[str, Factors]:
        """The factors by layer."""
        return layers_of(self.state)

    @property
    def scale(self) -> float:
        """The scale of all layers. Raises UserError where it differs."""
        return self._common("scale", self.scales.values())

    @property
    def rank(self) -> int:
        """The rank of all layers. Raises UserError where it differs."""
        return int(self._common("rank", (len(down) for down, _ in self.layers.values())))

    def _common(self, what: str, values: Iterable[float]) -> float:
        distinct = set(values)
        if len(distinct) > 1:
            raise UserError(
                f"{self.name} has layers of {what} {min(distinct):g} to {max(distinct):g}, "
                f"expected one {what} for all layers here"
            )
        return distinct.pop()

    def header(self) -> dict[str, Any]:
        """Return PEFT's configuration of it, with the ranks and alphas of single layers.

        PEFT takes keys of patterns for ends of names, in regular expressions: `proj_out` would be
        that of every block, too.
        """
        ranks = {name: len(down) for name, (down, _) in self.layers.items()}
        alphas = {name: round(self.scales[name] * rank, 9) for name, rank in ranks.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))

        def exceptions(values: Mapping[str, float], common: float) -> dict[str, float]:
            return {f"^{re.escape(n)}": value for n, value in values.items() if value != common}

        return {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
            "rank_pattern": exceptions(ranks, rank),
            "alpha_pattern": exceptions(alphas, alpha),
            "target_modules": sorted(ranks),
            "bias": "none",
        }


def lora_of_main(source: str | Path, runtime: Runtime | None, **alphas: float | None) -> LoRA:
    """Read a LoRA on the main process, whose disk alone may hold it; return it on all.

    runtime: None for a process alone. See `open_lora`, whose UserError all of them raise.
    """
    if runtime is None or runtime.world_size == 1:
        return open_lora(source, **alphas)

    def read() -> bytes:
        lora = open_lora(source, **alphas)
        texts = {"name": lora.name, "path": str(lora.path), "make": lora.make}
        return state_bytes(texts | {"state": lora.state, "scales": lora.scales})

    fields = parse_state(runtime.from_main(read), Path("a LoRA"))
    return LoRA(**fields | {"path": Path(fields["path"])})


def open_lora(
    source: str | Path, *, alpha: float | None = None, default_alpha: float | None = None
) -> LoRA:
    """Read a LoRA: a file, a folder (also above `lora` or one `checkpoint-N/lora`), a Hub name.

    Args:
        source: Hub names are OWNER/NAME, OWNER/NAME/SUBFOLDER, each with @REVISION or without.
        alpha: of a file without alpha; None is default_alpha, and warns.
        default_alpha: None is the file's rank.

    Raises:
        UserError: the LoRA is missing, damaged, or no plain LoRA of a transformer.
    """
    path = lora_file(source)
    tensors, texts = _read(path)
    state, alphas = _factors(tensors, path)
    make = _make(tensors, path)
    config = _configuration(texts, path, make)
    return LoRA(
        name=str(source), path=path, make=make, state=state,
        scales=_scales(state, alphas, config, path, alpha, default_alpha),
        # A network's own file has neither prefixes nor alphas beside the factors.
        prefix="" if make == "diffusers" and config and state.keys() == tensors.keys() else PREFIX,
    )  # fmt: skip


# --- where the file is ----------------------------------------------------------------------------


def lora_file(source: str | Path) -> Path:
    """Return the path of a LoRA's file; download it from the Hub. Raises UserError for none."""
    path, file = Path(source), None
    if path.is_file():
        return path
    if path.is_dir():
        file = _in_folder(path)
    elif (match := HUB_NAME.fullmatch(str(source))) is not None and ".." not in path.parts:
        name, subfolder, revision = match[1], match[2].strip("/"), match[3]
        place = _download(str(source), name, subfolder, revision) / subfolder
        file = place if place.is_file() else _in_folder(place)
    if file is None:
        raise UserError(
            f"no LoRA at {source}: give a .safetensors file, a folder with {FILE} or {PEFT_FILE}, "
            "or a name on the Hub as OWNER/NAME, OWNER/NAME/SUBFOLDER or OWNER/NAME@REVISION"
        )
    return file


def _in_folder(folder: Path) -> Path | None:
    for place in ("", "lora/", "checkpoint-*/", "checkpoint-*/lora/"):
        files = [file for name in (FILE, PEFT_FILE) for file in sorted(folder.glob(place + name))]
        folders = sorted({str(file.parent.relative_to(folder)) for file in files})
        if len(folders) > 1:
            raise UserError(f"{folder} holds several LoRAs: name one of {', '.join(folders)} in it")
        if files:
            return files[0]
    files = sorted(folder.glob("*.safetensors"))
    return files[0] if len(files) == 1 else None


def _download(source: str, name: str, subfolder: str, revision: str | None) -> Path:
    """Download the LoRAs of a repository, or of a subfolder, with their configurations."""
    from huggingface_hub import snapshot_download

    inside = f"{subfolder}/" if subfolder else ""
    names = (FILE, PEFT_FILE, PEFT_CONFIG)
    files = [f"{inside}{place}{n}" for place in ("", "lora/", "checkpoint-*/lora/") for n in names]
    if subfolder.endswith(".safetensors"):
        files = [subfolder, Path(subfolder).with_name(PEFT_CONFIG).as_posix()]
    try:
        with announced(f"looking for {name} on the Hub"):
            return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:  # HTTP libraries have errors of their own
        if message := hub_error_message(error, name, revision):
            raise UserError(
                f"{source} is no local file or folder, and the Hub gave no LoRA: {message}"
            ) from error
        raise


# --- tensors --------------------------------------------------------------------------------------

COMPUTED = (torch.float32, torch.float16, torch.bfloat16)
CONVERTED = (torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)  # to fp32
# Names that wrappers and programs put before a layer's.
WRAPPERS = (
    PEFT_PREFIX, "model.diffusion_model.", "diffusion_model.", PREFIX, "unet.", "module.",
    "lora_unet_", "lora_transformer_", "lycoris_", "pipe.", "model.", "dit.", "net.",
)  # fmt: skip
# Anywhere in a name.
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "processor.")
TEXT_ENCODERS = re.compile(r"text_encoder|lora_te|text_model\.|te\d?[._]")
SUFFIX = re.compile(
    r"(?:\.lora_(?P<side>A|B|down|up)(?:\.\w+)?|[._]lora(?:_linear_layer)?\.(?P<old>down|up))"
    r"\.weight$"
)
SIDES = {"A": "A", "down": "A", "B": "B", "up": "B"}


def plain_name(name: str) -> str:
    """Return a layer's name without the prefixes of wrappers and programs."""
    for part in INSIDE:
        name = name.replace(part, "")
    while prefix := next((p for p in WRAPPERS if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return tensors and texts of the header. Raises DamagedFile for other bytes than sealed."""
    data = read_bytes(path, limit=MAX_BYTES)
    check_seal(data, path)
    try:
        return load(data), notes_of(data)
    except Exception as error:  # of safetensors, or KeyError for a type that torch lacks
        raise UserError(f"{path} is not a safetensors file, or not whole: {error}") from error


def _make(tensors: Mapping[str, Tensor], path: Path) -> str:
    makes = {PEFT_PREFIX: "PEFT", "lora_unet_": "kohya", "diffusion_model.": "ComfyUI"}
    if path.name == PEFT_FILE:
        return "PEFT"
    starts = (make for start, make in makes.items() if any(k.startswith(start) for k in tensors))
    return next(starts, "diffusers")


def _factors(
    tensors: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return factors by PEFT's name, and alphas by layer. Raises UserError for anything else."""
    state: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    text, odd = 0, []
    for key, tensor in tensors.items():
        if TEXT_ENCODERS.match(plain_name(key)):
            text += 1
        elif key.endswith(".alpha") and tensor.numel() == 1 and not tensor.is_complex():
            alphas[plain_name(key).removesuffix(".alpha")] = value = float(tensor)
            if not 0 < value <= LARGEST:
                raise UserError(f"{path} has {key} = {value:g}, expected a number above 0")
        elif (match := SUFFIX.search(key)) is not None:
            side = SIDES[match["side"] or match["old"]]
            name = f"{plain_name(key[: match.start()])}.lora_{side}.weight"
            if name in state:
                raise UserError(
                    f"{path} holds two LoRAs: {key} names the same weight as an earlier key"
                )
            state[name] = _float(tensor, key, path)
        else:
            odd.append(key)
    if not state:
        raise UserError(
            f"{path} holds no LoRA of a transformer in names of diffusers, PEFT, kohya or ComfyUI; "
            f"its first tensor is {min(tensors, default='missing')}"
        )
    if odd:
        raise UserError(
            f"{path} holds {len(odd)} tensors beside the transformer's LoRA, {few(odd)}: only "
            "plain LoRAs of the transformer are supported"
        )
    if text:
        LOG.warning("%s also adapts text encoders: only its transformer part is used", path)
    _check_factors(state, path)
    return state, alphas


def _check_factors(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError unless all tensors are pairs of matrices, or of convolutions, of a rank."""
    for name, (down, up) in layers_of(state).items():  # raises unless all are pairs
        plain = (down.ndim, up.ndim) in ((2, 2), (4, 4)) and len(down) == up.shape[1]
        if not plain or not down.numel() or not up.numel():
            raise UserError(
                f"{path} has factors of {tuple(down.shape)} and {tuple(up.shape)} for {name}, "
                f"expected (rank, inputs) and (outputs, rank), none of them 0: {REMEDY}"
            )


def _float(tensor: Tensor, key: str, path: Path) -> Tensor:
    """Return a tensor in a type that networks compute in. Raises UserError for other types."""
    if tensor.dtype in CONVERTED:
        tensor = tensor.float()
    elif tensor.dtype not in COMPUTED:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            f"{path} holds {key} in {kind}, expected floating-point numbers: quantised LoRAs are "
            "not supported"
        )
    if not bool(tensor.isfinite().all()):
        raise DamagedFile(f"{path} has NaN or infinite numbers in {key}: use an earlier checkpoint")
    return tensor


def few(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# --- PEFT's configuration -------------------------------------------------------------------------

# Fields that do not change what the tensors of a trained LoRA mean.
IRRELEVANT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "layers_to_transform",
    "layers_pattern", "megatron_core", "runtime_config", "qalora_group_size", "velora_config",
}  # fmt: skip
LARGEST = 1e6  # rank or alpha
Rank = Annotated[Count, Field(le=LARGEST)]
Alpha = Annotated[Positive, Field(strict=True, le=LARGEST)]
# A name, or the end of one, as PEFT and diffusers write them: escaped, with ^ and $ or without.
LayerPattern = Annotated[str, Field(pattern=r"^\^?(?:\w|\\?[.-])+\$?$")]


class PlainLoRA(BaseModel):
    """PEFT's configuration of a plain LoRA.

    Fields beyond these change the base, other tensors or the formula, unless false or empty.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    peft_type: Literal["LORA"] = "LORA"
    r: Rank
    lora_alpha: Alpha
    rank_pattern: dict[LayerPattern, Rank] | None = None
    alpha_pattern: dict[LayerPattern, Alpha] | None = None
    use_rslora: Flag | None = None
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal"] = True

    def scale(self, layer: str, rank: int) -> float:
        """Return a layer's alpha / rank. Raises ValueError where it is given another rank."""
        from peft.utils.other import get_pattern_key

        ranks, alphas = self.rank_pattern or {}, self.alpha_pattern or {}
        if (r := ranks.get(get_pattern_key([*ranks], layer), self.r)) != rank:
            raise ValueError(f"rank {r} for {layer}, whose tensors have {rank}")
        alpha = alphas.get(get_pattern_key([*alphas], layer), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _configuration(texts: Mapping[str, str], path: Path, make: str) -> PlainLoRA | None:
    """Return PEFT's configuration beside the file, or of its header; None where it has neither.

    Raises UserError, naming the entry, unless it is a plain LoRA's.
    """
    beside = path.with_name(PEFT_CONFIG)
    if make == "PEFT" and beside.is_file():
        where, config = str(beside), read_json(beside)
    else:
        where = f"{path}, its header {METADATA},"
        header = parse_json(texts.get(METADATA, "{}"), where)
        config = isinstance(header, dict) and {
            key.removeprefix(PREFIX): value
            for key, value in header.items()
            if not TEXT_ENCODERS.match(key)
        }
        if config == {}:
            return None
    if not isinstance(config, dict):
        raise UserError(f"{where} has no configuration of a LoRA: {REMEDY}")
    for name, value in config.items():
        if value and name not in PlainLoRA.model_fields.keys() | IRRELEVANT:
            raise UserError(
                f"{where} has {name} = {value!r:.40}, but flowrl reads plain LoRAs only: convert "
                "it, for example with PEFT's merge_and_unload"
            )
    try:
        return PlainLoRA.model_validate(config)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        name, value = wrong["loc"][0], config.get(wrong["loc"][0], "missing")
        raise UserError(
            f"{where} has {name} = {value!r:.60}: {wrong['msg'].lower()}; {REMEDY}"
        ) from error


def _scales(
    state: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    config: PlainLoRA | None,
    path: Path,
    alpha: float | None,
    default_alpha: float | None,
) -> dict[str, float]:
    """Return alpha / rank by layer: of a configuration, or tensors, or `alpha`, or as assumed."""
    ranks = {name: len(down) for name, (down, _) in layers_of(state).items()}
    if alpha is not None and (config is not None or alphas):
        trained = min(alphas.values()) if config is None else config.lora_alpha
        raise UserError(
            f"{path} was trained with alpha {trained:g}, and --lora-alpha is {alpha:g}: leave it "
            "out"
        )
    if config is not None:
        try:
            return {name: config.scale(name, rank) for name, rank in ranks.items()}
        except ValueError as error:
            raise UserError(f"{path} says {error}") from error
    if alphas:
        if missing := sorted(set(ranks) - set(alphas)):
            raise UserError(f"{path} has alphas, but none for {few(missing)}")
        return {name: alphas[name] / rank for name, rank in ranks.items()}
    value = default_alpha if alpha is None else alpha
    scales = {name: 1.0 if value is None else value / rank for name, rank in ranks.items()}
    if alpha is None:
        why = "alpha = rank" if value is None else f"alpha {value:g}, as lora.alpha"
        LOG.warning(
            "%s has no alpha: using scale %g (%s); give --lora-alpha as in its training",
            path, min(scales.values()), why,
        )  # fmt: skip
    return scales


def lora_bytes(lora: LoRA) -> bytes:
    """Return the LoRA as diffusers' file; its header holds ranks, alphas and a digest.

    The same for the LoRA that is read from it.
    """
    from safetensors.torch import save

    header = {f"{lora.prefix}{key}": value for key, value in lora.header().items()}
    tensors = {f"{lora.prefix}{key}": tensor.contiguous() for key, tensor in lora.state.items()}
    return seal(save(tensors, {"format": "pt", METADATA: json.dumps(header, sort_keys=True)}))
