"""Files are whole or untouched, whatever interrupts; state comes back as it was."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.utils.files import (
    atomic_path,
    foreign_entries,
    load_state,
    remove_leftovers,
    save_state,
    write_bytes,
    write_text,
)

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5).filter(lambda k: "__" not in k), inner, max_size=3)
        | st.dictionaries(st.integers(0, 99), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(state=STATES)
def test_nested_state_comes_back_equal(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("state") / "state.safetensors"
    save_state(path, state)
    assert load_state(path) == state


def test_tensors_come_back_bit_for_bit(tmp_path):
    for dtype in [torch.float32, torch.bfloat16, torch.float64, torch.uint8]:
        for shape in [(), (0, 3), (2, 3)]:
            value = (torch.randn(shape) * 50).abs().to(dtype)
            save_state(tmp_path / "s", {"a": [value, {"b": value.T if value.ndim == 2 else value}]})
            first, second = load_state(tmp_path / "s")["a"]
            assert first.dtype == dtype and torch.equal(first, value)
            assert torch.equal(second["b"], value.T if value.ndim == 2 else value)


def test_files_are_written_whole_or_not_at_all(tmp_path):
    # What json and tensors cannot hold is refused and leaves no file.
    with pytest.raises(TypeError, match="set"):
        save_state(tmp_path / "s", {"a": {1, 2}})
    assert list(tmp_path.iterdir()) == []
    # A crash while writing keeps the old file and no rest.
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    # A reader never sees a part.
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    # Folders are made and files are readable by others.
    path = tmp_path / "a" / "b" / "file"
    write_bytes(path, b"x")
    assert path.stat().st_mode & 0o777 == 0o644


def test_half_written_files_count_as_what_they_would_be_and_are_swept(tmp_path):
    half = ".drawn.json.abc_1234.tmp"
    inside = f"00001/{half}"
    for name in (half, inside, "00001/a.png", "notes/.x.abc_1234.tmp", ".mine.abc_1234.tmp"):
        write_text(tmp_path / name, "")
    foreign = [path.name for path in foreign_entries(tmp_path, "images")]
    assert foreign == [".mine.abc_1234.tmp", "notes"]
    remove_leftovers(tmp_path, "images")
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")) == [
        ".mine.abc_1234.tmp", "00001/a.png", "notes/.x.abc_1234.tmp",
    ]  # fmt: skip
    assert foreign_entries(tmp_path / "missing", "images") == []
