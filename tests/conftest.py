"""The default tests need a CPU and nothing else: no network, no weights, no patience."""

import os

# Before torch and huggingface_hub are imported, which read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than free cores is far slower
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

settings.register_profile("flowrl", deadline=None, derandomize=True, database=None)
settings.load_profile("flowrl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--weights", action="store_true", help="also run tests that download weights")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--weights"):
        os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {
        name: reason for name in ("slow", "weights", "gpu") if (reason := _lack(config, name))
    }
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def _lack(config: pytest.Config, marker: str) -> str:
    """Why tests with this marker cannot run now, "" if they can."""
    if marker == "gpu":
        import torch

        return "" if torch.cuda.is_available() else "needs a CUDA device"
    wanted = config.getoption(f"--{marker}")
    return "" if wanted else f"marked {marker}: run with --{marker}"
