"""Helper modules lie beside the tests; pytest's importlib mode puts no folder on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(tmp_path):
    from toy_dataset import plain_scores, write

    return write(tmp_path / "store", plain_scores())
