"""Code of a user's reward: what it changes in the process, and where it failed."""

import logging
import os
import signal
import threading
import warnings

import pytest
import torch

from flowrl.config.rewards import InlineOptions
from flowrl.scoring.executors.base import InlineExecutor, ask
from flowrl.scoring.spec import load_reward

IMAGE = torch.zeros(1, 3, 8, 8)
CHANGES = {  # by the name in the warning: what changes the setting, to what, and what reads it
    "torch.set_default_dtype": (torch.set_default_dtype, torch.float64, torch.get_default_dtype),
    "torch.set_num_threads": (torch.set_num_threads, 7, torch.get_num_threads),
    "torch.set_float32_matmul_precision": (
        torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision,
    ),
    "torch.set_default_device": (torch.set_default_device, "meta", torch.get_default_device),
    "torch.set_autocast_enabled": (
        lambda on: torch.set_autocast_enabled("cpu", on), True,
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "os.chdir": (os.chdir, "/", os.getcwd),
    "signal.SIGINT": (
        lambda handler: signal.signal(signal.SIGINT, handler), print,
        lambda: signal.getsignal(signal.SIGINT),
    ),
}  # fmt: skip
CASES = [(name, False) for name in CHANGES]
CASES += [(name, True) for name in CHANGES if name != "signal.SIGINT"]  # of the main thread alone


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("setting", "background"), CASES)
def test_a_setting_of_the_process_is_restored_in_any_thread_and_reported_once(
    setting, background, raises, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    change, value, read = CHANGES[setting]
    before = read()

    def reward(images, prompts, metadata):
        in_thread = read()
        change(value)
        assert read() != in_thread
        if raises:
            raise RuntimeError("after the change")
        return [1.0]

    name = f"mine {setting} {background} {raises}"
    executor = InlineExecutor(reward, name, InlineOptions(background=background))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            answer = executor.submit(IMAGE, ["p"], [{}]).result(30)
            assert read() == before and answer.scores.isnan().item() == raises
    executor.close()
    assert len(caught) == 1 and setting in str(caught[0].message)


def test_a_call_that_begins_beside_a_changed_setting_does_not_bring_the_change_back():
    changed, release = threading.Event(), threading.Event()

    def changes(images, prompts, metadata):
        torch.set_default_dtype(torch.float64)
        changed.set()
        release.wait(30)
        return [1.0]

    executor = InlineExecutor(changes, "beside", InlineOptions(background=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = executor.submit(IMAGE, ["p"], [{}])
        assert changed.wait(30)
        ask(lambda *_: [1.0], "mine", IMAGE, ["p"], [{}])
        release.set()
        first.result(30)
    executor.close()
    assert torch.get_default_dtype() == torch.float32


# --- errors ---------------------------------------------------------------------------------------

BROKEN = """import json

def helper(text):
    return json.loads(text)  # the line to look at

def mine(images, prompts, metadata):
    return helper("{")
"""


def test_the_reason_has_the_users_own_file_and_line_and_the_log_the_whole_traceback(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_reward.py").write_text(BROKEN)
    broken = load_reward("broken_reward:mine")
    with caplog.at_level(logging.DEBUG, "flowrl"):
        answer = ask(broken, "mine", IMAGE, ["p"], [{}])
    line = "broken_reward.py:4: return json.loads(text)  # the line to look at"
    assert "JSONDecodeError" in answer.reasons[0] and line in answer.reasons[0]
    assert 'return helper("{")' in caplog.text and "json/decoder.py" in caplog.text
