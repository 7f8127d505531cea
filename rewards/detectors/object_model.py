"""A detector of transformers: its network, its image processor and its tokenizer."""

import functools
from typing import Any

import numpy as np
from torch import Tensor

from ..networks.loading import DTYPES, check_dtype, device_of, fetching, imported
from ..networks.sharing import shared


class ObjectModel:
    """A detector by its name on the Hugging Face hub, or in a folder; loaded when first used.

    family: what transformers calls it ("Owlv2"); kind: what it calls the network. dtype: of the
    network; outputs are for the caller to cast.
    """

    def __init__(self, model: str, *, family: str, kind: str, device: str, dtype: str):
        self.model, self.family, self.kind = model, family, kind
        self.device, self.dtype = device, check_dtype(dtype)
        self._shared = shared((kind, model, device, dtype), self)

    @functools.cached_property
    def network(self) -> Any:
        """Raise ImportError or FileNotFoundError of one sentence for what is not there."""
        return self._shared.load(self._load)

    def _load(self) -> Any:
        imported("scipy", f"the detector {self.family}")
        kind = imported(f"transformers:{self.kind}", f"the detector {self.family}")
        with fetching(self.model):
            network = kind.from_pretrained(self.model)
        return network.eval().requires_grad_(False).to(device_of(self.device), DTYPES[self.dtype])

    @functools.cached_property
    def processor(self) -> Any:
        """Return the one that resizes with Pillow: the default depends on whether torchvision is
        installed, and their pixels differ. Before transformers 5 it had no suffix.
        """
        import transformers

        plain = f"{self.family}ImageProcessor"
        kind = getattr(transformers, plain + "Pil", None) or getattr(transformers, plain)
        with fetching(self.model):
            return kind.from_pretrained(self.model)

    @functools.cached_property
    def tokenizer(self) -> Any:
        kind = imported("transformers:AutoTokenizer", f"the detector {self.family}")
        with fetching(self.model):
            return kind.from_pretrained(self.model)

    def pixels(self, images: np.ndarray, **how: Any) -> dict[str, Tensor]:
        """Convert (B, H, W, 3) uint8 RGB to what the network reads of them, on its device.

        how: what the image processor is told, in place of its own settings.
        """
        inputs = self.processor(
            list(images), return_tensors="pt", input_data_format="channels_last", **how
        )
        return {
            name: value.to(self.network.device, DTYPES[self.dtype])
            if value.is_floating_point()
            else value.to(self.network.device)
            for name, value in inputs.items()
        }
