"""Files of others: pipes, links, sizes, depth."""

import os
import socket

import pytest

from flowrl.errors import UserError
from flowrl.utils.untrusted import (
    RefusedFile,
    is_readable,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_tail,
    read_text,
)


def test_only_a_regular_file_inside_the_folder_is_read(tmp_path):
    folder = tmp_path / "run"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (folder / "file").write_text("text")
    (folder / "near").symlink_to("file")
    (folder / "away").symlink_to(tmp_path / "secret")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    (folder / "to-pipe").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "s"))
    for name in ("file", "near"):
        assert read_text(folder / name, inside=folder) == "text"
        assert is_readable(folder / name, inside=folder)
    for name in ("away", "circle", "pipe", "to-pipe", "s", "sub", "../secret", "none", "a\0b"):
        assert not is_readable(folder / name, inside=folder), name
        with pytest.raises((OSError, UserError)):
            open_regular(folder / name, inside=folder)
    with pytest.raises(RefusedFile, match="/dev/zero"):
        read_bytes("/dev/zero")


def test_sizes_are_bounded_and_tails_are_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, limit=10) == b"0123456789"
    assert read_tail(path, limit=3) == b"789"
    with pytest.raises(RefusedFile, match="file"):
        read_bytes(path, limit=9)


def test_json_is_bounded_in_depth_and_errors_name_the_file(tmp_path):
    path = tmp_path / "a.json"
    for text in ("[" * 10**6, '{"a":' * 10**5, "{", "9" * 10**5, ""):
        path.write_text(text)
        with pytest.raises(UserError, match=r"a\.json"):
            read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"a\.json"):
        read_text(path)
    assert parse_json('{"a": [1, null]}', "it") == {"a": [1, None]}
