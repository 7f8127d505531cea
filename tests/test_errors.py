"""Which exceptions are failures of the machine, where they happened, and the exit codes."""

import errno
import os
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from flowrl.errors import MEMORY, MachineFailure, UserError, as_failure, exit_code, phase


def raises(error: BaseException):
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "cause", "code"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), "memory", 1),
        (raises(MemoryError()), "memory", 1),
        (raises(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when")), "memory", 1),
        (raises(OSError(errno.EDQUOT, "Disk quota exceeded")), "space", 1),
        (raises(SafetensorError("I/O error: No space left on device (os error 28)")), "space", 1),
        (raises(PermissionError(errno.EACCES, "Permission denied", "some.file")), "file", 1),
        (raises(OSError(errno.EIO, "Input/output error", "some.file")), "file", 1),
        (raises(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))), "pipe", 141),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_machine_fails_at_becomes_one_sentence_with_phase_and_remedy(fail, cause, code):
    with pytest.raises(MachineFailure) as caught, phase("evaluate"), phase("rollout", "a part"):
        fail()
    failure, text = caught.value, str(caught.value)
    assert failure.cause == cause and exit_code(failure) == code
    assert "in phase rollout (a part): " in text and "\n" not in text
    assert "docs/troubleshooting.md" in text
    assert (MEMORY["rollout"] in text) == (cause == "memory")


def test_mistakes_and_what_users_correct_stay_what_they_are():
    for error in (ValueError("a bug"), KeyError("x"), FileNotFoundError("x"), UserError("why")):
        with pytest.raises(type(error)) as caught, phase("learn"):
            raise error
        assert caught.value is error
    assert as_failure(ValueError("a bug")) is None and exit_code(ValueError()) == 1


def test_a_closed_pipe_is_an_error_of_progress_and_no_silent_end():
    script = """
import sys
from flowrl.cli import report_errors
from flowrl.errors import phase
from flowrl.utils import progress
progress.EVERY = 0.0
def program():
    steps = progress.Steps("training", 100_000)
    with phase("save"):
        for _ in range(100_000):
            steps.advance({"reward": 1.0})
report_errors(program, debug=False)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait(60) == 141, told
    assert told.startswith("error: the output is closed (broken pipe) in phase save")
    assert "Traceback" not in told and "Exception ignored" not in told
