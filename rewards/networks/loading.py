"""What a reward with a network needs, or one sentence that says what is missing.

Packages, devices, and files of weights that are loaded without running any code in them.
"""

import contextlib
import importlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CAUSE = 80  # characters of what a library says about a model that it cannot fetch
PACKAGES = {"open_clip": "open-clip-torch"}
N = TypeVar("N", bound=nn.Module)


def imported(target: str, reward: str) -> Any:
    """Return the module "name", or the attribute "name:attribute", that a reward needs.

    A torchvision built for another torch raises more than ImportError, here and in what builds on
    it. Whatever went wrong becomes an ImportError of one sentence.
    """
    name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(name)
        return getattr(module, attribute) if attribute else module
    except Exception as error:
        why = f"which does not load: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            why = f"which is not installed: pip install {PACKAGES.get(name, name)}"
        raise ImportError(f"{reward} needs {name}, {why}") from error


def first_line(error: BaseException) -> str:
    """Return `Type: message` of an exception, the first line of it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def device_of(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def check_dtype(name: str) -> str:
    """Return the name again; raises ValueError for one that is not in DTYPES."""
    if name not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, not {name!r}")
    return name


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Make a network inside without drawing from the process's random generators."""
    with torch.random.fork_rng(devices=[]):
        yield


def small_network(kind: Callable[[], N], path: Path) -> N:
    """Return a network whose weights come with the package, as float32 without gradients."""
    from safetensors.torch import load_file

    with building():
        network = kind()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return network.eval().requires_grad_(False)


@contextlib.contextmanager
def fetching(model: str, file: str = "") -> Iterator[None]:
    """Turn every error of fetching a model into a FileNotFoundError of one sentence."""
    try:
        yield
    except (ImportError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        cause = textwrap.shorten(first_line(error), CAUSE, placeholder=" ...")
        if Path(model).exists():
            raise FileNotFoundError(f"{model} holds no such model: {cause}") from error
        command = f"hf download {model} {file}".strip()
        raise FileNotFoundError(
            f"the model {model!r} is not on this machine and cannot be fetched: run `{command}` "
            "where there is a network (after `hf auth login` for a gated model), or name a folder "
            f"that holds it ({cause})"
        ) from error


def text_tokenizer(source: str, reward: str, revision: str | None = None) -> Any:
    """Return transformers' tokenizer of a folder or a name on the Hub, for a reward."""
    kind = imported("transformers:AutoTokenizer", reward)
    with fetching(source, '--include "*.json" "*.txt"'):
        return kind.from_pretrained(source, revision=revision)


def weights_file(model: str, file: str, revision: str | None = None) -> Path:
    """Return where a file of a model lies; fetched from the Hugging Face hub unless `model` is a
    folder.

    `model` may also be the file itself. Raises FileNotFoundError of one sentence.
    """
    path = Path(model)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / file).is_file():
            raise FileNotFoundError(f"the folder {model} holds no file {file}")
        return path / file
    with fetching(model, file):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, file, revision=revision))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file or of a torch checkpoint, on the CPU.

    Of a checkpoint that holds more, its "state_dict". Raises ValueError for a file that holds
    more than tensors and plain values: loading it could run code.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} is not read as plain weights ({first_line(error)}); expected a file of "
            "tensors, saved by torch.save or as .safetensors"
        ) from error
    return state.get("state_dict", state)


def under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries that begin with a prefix, without it."""
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


def mismatch(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Return how names and shapes differ from the expected ones, the first of each kind, or ""."""
    wrong = {
        "is missing": [name for name in expected if name not in state],
        "is unknown": [name for name in state if name not in expected],
        "has another shape": [
            n for n in expected if n in state and expected[n].shape != state[n].shape
        ],
    }
    return ", ".join(
        f"{names[0]} {how}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
        for how, names in wrong.items()
        if names
    )


def fit(network: nn.Module, state: Mapping[str, Tensor], path: Path, what: str) -> None:
    """Give a network its weights: the same names and shapes, no more and no fewer.

    Raises ValueError of one sentence.
    """
    if wrong := mismatch(network.state_dict(), state):
        raise ValueError(f"{path} does not hold the weights of {what}: {wrong}")
    network.load_state_dict(dict(state))
