"""Checkpoints: whole or absent, the right ones kept; a folder has one owner."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from flowrl.errors import DamagedFile, UserError
from flowrl.training.checkpoint import (
    CONFIG,
    Checkpoints,
    claim,
    read_checkpoint,
    remove_checkpoint,
)
from flowrl.training.owner import owner_of


@pytest.fixture
def checkpoints(tmp_path):
    (tmp_path / CONFIG).write_text("run: {}\n")
    return Checkpoints(tmp_path, keep=2)


def state(step: int) -> dict:
    return {"iteration": step, "w": torch.full((3,), float(step))}


def test_the_newest_and_the_best_are_kept_until_a_better_one_comes(checkpoints, tmp_path):
    assert checkpoints.newest() is None  # killed before its first checkpoint: start over
    for step in range(6):
        checkpoints.save(step, state(step), best=1 if step >= 1 else None)
    assert checkpoints.steps() == [1, 4, 5]
    assert checkpoints.newest()[0] == checkpoints.path(5)
    assert checkpoints.newest()[1]["iteration"] == 5
    checkpoints.save(6, state(6), best=6)
    assert checkpoints.steps() == [5, 6]


def test_copies_beside_the_checkpoints_are_no_checkpoints(checkpoints):
    checkpoints.save(1, state(1))
    for name in ("step-000001-backup", "step-9", "step-", "copy"):
        shutil.copytree(checkpoints.path(1), checkpoints.folder / name)
    checkpoints.save(2, state(2))
    assert checkpoints.steps() == [1, 2]
    checkpoints.remove_unfinished()
    assert len(list(checkpoints.folder.iterdir())) == 6


def test_weights_that_are_not_finite_are_not_loaded(checkpoints):
    checkpoints.save(1, state(1) | {"policy": {"w": [torch.tensor([1.0, float("nan")])]}})
    with pytest.raises(DamagedFile, match="policy.*not finite"):
        read_checkpoint(checkpoints.path(1))


def test_one_that_is_being_removed_is_no_checkpoint_any_more(checkpoints, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    checkpoints.save(1, state(1))
    monkeypatch.setattr("flowrl.training.checkpoint.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(checkpoints.path(1))
    monkeypatch.undo()
    assert checkpoints.steps() == [] and checkpoints.path(1).exists()
    checkpoints.remove_unfinished()
    assert not checkpoints.path(1).exists()


def test_an_occupied_folder_is_refused_unless_resumed(tmp_path):
    (tmp_path / CONFIG).write_text("run: {}\n")
    with pytest.raises(UserError, match="--resume latest"), claim(tmp_path, resume=None):
        pass
    with claim(tmp_path, resume="latest"):
        pass
    assert (tmp_path / CONFIG).read_text() == "run: {}\n"


HOLD = """
import sys
from pathlib import Path
from flowrl.training.checkpoint import claim
with claim(Path(sys.argv[1]), resume=None):
    print("mine", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_names_its_process_and_is_refused_to_another_until_that_dies(tmp_path):
    command, pipe = [sys.executable, "-c", HOLD, str(tmp_path)], subprocess.PIPE
    path = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=path) as holder:
        assert holder.stdout and holder.stdout.readline() == "mine\n"
        for resume in (None, "latest"):
            with pytest.raises(UserError, match="in use"), claim(tmp_path, resume=resume):
                pass
        owner = owner_of(tmp_path)
        assert owner and owner.pid == holder.pid and owner.process(tmp_path) is not None
        holder.kill()
    assert owner_of(tmp_path) == owner and owner.process(tmp_path) is None
    with claim(tmp_path, resume=None):
        own = owner_of(tmp_path)
        assert own and own.pid == os.getpid()
    assert owner_of(tmp_path) is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", tmp_path / "new" / ("a" * 300)):
        with pytest.raises(UserError, match="cannot make the folder"):
            with claim(folder, resume=None):
                pass
