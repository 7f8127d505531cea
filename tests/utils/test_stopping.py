"""Signals end a block at once, or when it is done; a second one at once."""

import os
import signal

import pytest

from flowrl.errors import Interrupted, exit_code, phase
from flowrl.utils.stopping import at_once, stop_request, when_done

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_block_at_once_with_the_shells_code_and_the_phase(number):
    word = "Ctrl-C" if number == signal.SIGINT else number.name
    with pytest.raises(Interrupted, match=f"{word} in phase load") as ended:
        with at_once(), phase("load"):
            os.kill(os.getpid(), number)
    assert exit_code(ended.value) == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_ends(number):
    told = []
    with pytest.raises(Interrupted), when_done(told.append) as request:
        assert not request.name and request.seconds() == 0
        os.kill(os.getpid(), number)
        assert told == [request] and request.name == number.name
        assert stop_request() is request
        os.kill(os.getpid(), number)
    assert not stop_request().name


def test_a_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with at_once(), when_done(lambda request: None) as request:
        os.kill(os.getpid(), signal.SIGHUP)
    assert not request.name and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
