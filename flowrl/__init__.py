"""flowrl aligns diffusion and flow models with reinforcement learning.

A prompt list and a reward go in; a LoRA that diffusers loads in one line comes out. The names
below are loaded when first used, so that `import flowrl` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flowrl.api import align
    from flowrl.backbones.guidance import RLG
    from flowrl.backbones.loading import pipeline_path
    from flowrl.backbones.lora_files import load_lora
    from flowrl.config import Config, load_config
    from flowrl.errors import UserError

_HOMES = {
    "RLG": "flowrl.backbones.guidance",
    "Config": "flowrl.config",
    "UserError": "flowrl.errors",
    "align": "flowrl.api",
    "load_config": "flowrl.config",
    "load_lora": "flowrl.backbones.lora_files",
    "pipeline_path": "flowrl.backbones.loading",
}

__all__ = [
    "RLG", "Config", "UserError", "__version__", "align", "load_config", "load_lora",
    "pipeline_path",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flowrl' has no attribute {name!r}; it has {sorted(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
