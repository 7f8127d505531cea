import pytest
from toy_dataset import plain_scores, write


@pytest.fixture
def store(tmp_path):
    return write(tmp_path / "store", plain_scores())
