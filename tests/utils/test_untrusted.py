"""Files of others: pipes, links, sizes, depth."""

import math
import os
import socket
from pathlib import Path

import datasets
import pytest

from flowrl.api import score
from flowrl.backbones.lora_formats import open_lora
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.offline.format import open_dataset
from flowrl.offline.pairs import read_pairs
from flowrl.prompts.records import load_prompts
from flowrl.utils.digests import sealed_digest
from flowrl.utils.files import load_state
from flowrl.utils.untrusted import (
    RefusedFile,
    is_readable,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)
from flowrl.voting.ballot import Ballot


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
        read_bytes(Path("/dev/zero"))


def test_sizes_are_bounded(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, limit=10) == b"0123456789"
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


# --- everything that reads files of others ------------------------------------------------------


def as_image(path):
    return score([path], ["brightness"], "a cat").rows[0]["brightness"]


READERS = {
    "state.safetensors": load_state, "x.safetensors": sealed_digest, "prompts.jsonl": load_prompts,
    "prompts.parquet": load_prompts, "data/train.jsonl": lambda p: load_prompts(p.parent),
    "set/rows.parquet": lambda p: load_prompts(p.parent), "recipe.yaml": load_config,
    "pairs.json": lambda p: read_pairs(str(p)), "pairs.csv": lambda p: read_pairs(str(p)),
    "lora.safetensors": open_lora, "folder/pytorch_lora_weights.safetensors": open_lora,
    "store.json": lambda p: open_dataset(p.parent), "images/a.png": as_image,
    "votes.jsonl": lambda p: list(Ballot(p.parent).votes),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(name, tmp_path):
    """A pipe as a file of a run, a prompt list or a LoRA stopped the reader for good."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    if name.startswith("images"):
        assert math.isnan(READERS[name](path.parent))
        return
    with pytest.raises((OSError, UserError)):
        READERS[name](path)


def test_a_data_folder_holds_no_links_out_of_it(tmp_path):
    (tmp_path / "secret.txt").write_text("a secret\n")
    datasets.Dataset.from_list([{"prompt": "a cat"}]).to_parquet(str(tmp_path / "far.parquet"))
    for name, target in (("train.txt", "secret.txt"), ("rows.parquet", "far.parquet")):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / target)
        with pytest.raises(UserError, match=name):
            load_prompts(folder)
    # The cache of the Hub links snapshots to blobs beside them.
    snapshot = tmp_path / "datasets--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--x" / "blob").write_text("a cat\n")
    (snapshot / "train.txt").symlink_to(tmp_path / "datasets--x" / "blob")
    assert load_prompts(snapshot)[0].text == "a cat"
