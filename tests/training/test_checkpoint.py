"""Checkpoints: whole or absent, the right ones kept; a folder has one owner."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import flowrl.utils.files
from flowrl.errors import UserError
from flowrl.training.checkpoint import (
    CONFIG,
    STATE,
    Checkpoints,
    claim,
    random_state,
    restore_random_state,
)
from flowrl.utils.files import load_state, save_state


@pytest.fixture
def checkpoints(tmp_path):
    (tmp_path / CONFIG).write_text("run: {}\n")
    return Checkpoints(tmp_path, keep=2)


def state(step: int) -> dict:
    return {"iteration": step, "w": torch.full((3,), float(step))}


def test_the_newest_and_the_best_are_kept_until_a_better_one_comes(checkpoints, tmp_path):
    assert checkpoints.load("latest") is None  # killed before its first checkpoint: start over
    for step in range(6):
        checkpoints.save(step, state(step), best=1 if step >= 1 else None)
    assert checkpoints.steps() == [1, 4, 5]
    for latest in ("latest", str(tmp_path)):
        assert checkpoints.load(latest)["iteration"] == 5
    checkpoints.save(6, state(6), best=6)
    assert checkpoints.steps() == [5, 6]


class Crash(BaseException):
    pass


def test_a_crash_while_writing_loses_nothing(checkpoints, monkeypatch):
    for function in ["fsync", "replace"]:
        checkpoints.save(1, state(1))

        def crash(*_):
            raise Crash

        monkeypatch.setattr(flowrl.utils.files.os, function, crash)
        with pytest.raises(Crash):
            checkpoints.save(2, state(2))
        monkeypatch.undo()
        assert checkpoints.steps() == [1]
        assert torch.equal(checkpoints.load("latest")["w"], torch.ones(3))


def test_what_a_killed_writer_leaves_is_no_checkpoint(checkpoints):
    """SIGKILL runs no clean-up: the half-written temporary file stays."""
    checkpoints.save(1, state(1))
    folder = checkpoints.path(2)
    folder.mkdir()
    (folder / f".{STATE}.abc123.tmp").write_bytes(b"half")
    assert checkpoints.steps() == [1]
    assert checkpoints.load("latest")["iteration"] == 1
    checkpoints.save(2, state(2))
    assert checkpoints.load("latest")["iteration"] == 2


def test_an_older_checkpoint_can_be_named_and_later_ones_are_then_left(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, state(step))
    assert checkpoints.load(str(checkpoints.path(1)))["iteration"] == 1
    checkpoints.remove_after(1)
    assert checkpoints.steps() == [1]


def test_an_occupied_folder_is_refused_unless_resumed(tmp_path):
    for folder, resume in (("new", "latest"), ("elsewhere", str(tmp_path / "elsewhere"))):
        with pytest.raises(UserError, match=folder):
            Checkpoints(tmp_path / "new", keep=1).load(resume)
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


def test_a_folder_in_use_is_refused_to_another_process_until_that_dies(tmp_path):
    command, pipe = [sys.executable, "-c", HOLD, str(tmp_path)], subprocess.PIPE
    path = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=path) as holder:
        assert holder.stdout and holder.stdout.readline() == "mine\n"
        for resume in (None, "latest"):
            with pytest.raises(UserError, match="in use"), claim(tmp_path, resume=resume):
                pass
        holder.kill()
    with claim(tmp_path, resume=None):
        pass


def test_random_numbers_go_on_where_they_were(tmp_path):
    def draws():
        return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(2)

    random.gauss()
    np.random.randn()  # an odd number: half of a pair is kept in the state
    save_state(tmp_path / "s", random_state())
    first = draws()
    draws()
    restore_random_state(load_state(tmp_path / "s"))
    second = draws()
    assert first[:4] == second[:4] and torch.equal(first[4], second[4])


def test_a_refused_start_leaves_nothing_behind(tmp_path):
    deep = tmp_path / "new" / "deeper" / "run"
    with pytest.raises(UserError, match="no reward"), claim(deep, resume=None):
        (deep / "precision.json").write_text("{}")
        (deep / "evaluations").mkdir()
        raise UserError("no reward")
    assert not (tmp_path / "new").exists()
    # What was there before stays, and so does a run that has begun.
    own = tmp_path / "own"
    (own / "notes").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), claim(own, resume=None):
        (own / "precision.json").write_text("{}")
        raise KeyboardInterrupt
    assert [path.name for path in own.iterdir()] == ["notes"]
    with pytest.raises(UserError, match="out of memory"), claim(deep, resume=None):
        (deep / CONFIG).write_text("run: {}")
        raise UserError("out of memory")
    assert (deep / CONFIG).exists()
    with pytest.raises(UserError, match="holds no run"), claim(tmp_path / "b", resume="latest"):
        Checkpoints(tmp_path / "b", keep=1).load("latest")
    assert not (tmp_path / "b").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", tmp_path / "new" / ("a" * 300)):
        with pytest.raises(UserError, match="cannot make the run folder .*run.output_dir"):
            with claim(folder, resume=None):
                pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
