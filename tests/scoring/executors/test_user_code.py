"""Code of a user's reward: what it changes in the process, and where it failed."""

import importlib
import locale
import logging
import os
import random
import socket
import sys
import warnings

import numpy as np
import pytest
import torch

from flowrl.scoring.executors.base import ask
from flowrl.scoring.executors.pool import PoolExecutor

IMAGE = torch.zeros(1, 3, 8, 8)
CHANGES = {  # by the name in the warning: a change, and what reads the setting
    "torch.set_default_dtype": (
        lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype,
    ),
    "torch.set_num_threads": (lambda: torch.set_num_threads(7), torch.get_num_threads),
    "torch.use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "torch.set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision,
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "numpy.seterr": (lambda: np.seterr(all="raise"), np.geterr),
    "numpy.set_printoptions": (lambda: np.set_printoptions(precision=2), np.get_printoptions),
    "os.chdir": (lambda: os.chdir("/"), os.getcwd),
    "locale.setlocale": (
        lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"), lambda: locale.setlocale(locale.LC_ALL),
    ),
    "socket.setdefaulttimeout": (lambda: socket.setdefaulttimeout(3), socket.getdefaulttimeout),
    "sys.setrecursionlimit": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
}  # fmt: skip


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("setting", CHANGES)
def test_a_setting_of_the_process_is_restored_and_reported_once(setting, raises, tmp_path):
    change, read = CHANGES[setting]
    before_all = locale.setlocale(locale.LC_ALL), os.getcwd()
    locale.setlocale(locale.LC_ALL, "C")
    os.chdir(tmp_path)

    def reward(images, prompts, metadata):
        change()
        assert read() != before
        if raises:
            raise RuntimeError("after the change")
        return [1.0]

    try:
        before = read()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                answer = ask(reward, f"mine {setting} {raises}", IMAGE, ["p"], [{}])
                assert read() == before and answer.scores.isnan().item() == raises
        assert len(caught) == 1 and setting in str(caught[0].message)
    finally:
        locale.setlocale(locale.LC_ALL, before_all[0])
        os.chdir(before_all[1])


def test_random_generators_outside_do_not_depend_on_what_a_reward_draws_or_seeds():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    scores = []

    def seed_all():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    def reseeds(images, prompts, metadata):
        seed_all()
        return [sum(draw())]

    def draws(images, prompts, metadata):
        scores.append(sum(draw()))
        return [scores[-1]]

    after = []
    for reward in (lambda *_: [1.0], reseeds, draws, draws):
        seed_all()
        ask(reward, "mine", IMAGE, ["p"], [{}])
        after.append(draw())
    assert len(set(after)) == 1
    ask(draws, "mine", IMAGE, ["p"], [{}])
    assert scores[0] == scores[1] != scores[2]  # by the process's seed, and new in each call


# --- errors ---------------------------------------------------------------------------------------

BROKEN = """import json

def helper(text):
    return json.loads(text)  # the line to look at

def mine(images, prompts, metadata):
    return helper("{")
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_reward.py").write_text(BROKEN)
    sys.modules.pop("broken_reward", None)
    return importlib.import_module("broken_reward").mine


def test_the_reason_has_the_users_own_file_and_line_and_the_log_the_whole_traceback(broken, caplog):
    with caplog.at_level(logging.DEBUG, "flowrl"):
        answer = ask(broken, "mine", IMAGE, ["p"], [{}])
    line = "broken_reward.py:4: return json.loads(text)  # the line to look at"
    assert "JSONDecodeError" in answer.reasons[0] and line in answer.reasons[0]
    assert 'return helper("{")' in caplog.text and "json/decoder.py" in caplog.text


def test_a_pool_names_the_users_line_too(broken):
    pool = PoolExecutor("broken_reward:mine", {}, "mine")
    try:
        reason = pool.submit(IMAGE, ["p"], [{}]).result(60).reasons[0]
        assert "broken_reward.py:4" in reason
    finally:
        pool.close()
