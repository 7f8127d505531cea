"""Rewards asked in this process: how many images at once, when, and in which thread."""

import math
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.rewards import InlineOptions
from flowrl.scoring.executors.base import Answer, InlineExecutor, RewardFailure


class Counting:
    """Scores an image with its first pixel and remembers how many came at once."""

    def __init__(self, room: int = 1000):
        self.room = room  # images that the device has memory for
        self.sizes: list[int] = []
        self.threads: list[str] = []

    def __call__(self, images, prompts, metadata):
        assert len(images) == len(prompts) == len(metadata)
        assert prompts == [f"{pixel:.3f}" for pixel in images[:, 0, 0, 0].tolist()]
        self.sizes.append(len(images))
        self.threads.append(threading.current_thread().name)
        if len(images) > self.room:
            raise torch.cuda.OutOfMemoryError("no room")
        scores = [None if data.get("why") else float(p) for p, data in zip(prompts, metadata)]  # noqa: B905
        reasons = {row: data["why"] for row, data in enumerate(metadata) if data.get("why")}
        return scores, reasons


def ask(executor: InlineExecutor, count: int, why: dict[int, str] | None = None) -> Answer:
    images = torch.arange(count).view(-1, 1, 1, 1).expand(count, 3, 2, 2) / 255
    prompts = [f"{pixel:.3f}" for pixel in images[:, 0, 0, 0].tolist()]
    metadata = [{"why": (why or {}).get(row)} for row in range(count)]
    return executor.submit(images, prompts, metadata).result(30)


@given(st.integers(0, 9), st.none() | st.integers(1, 10), st.data())
def test_micro_batches_change_nothing_but_their_number(count, size, data):
    why = data.draw(st.dictionaries(st.integers(0, max(count - 1, 0)), st.just("torn")))
    why = {row: f"{text} {row}" for row, text in why.items() if row < count}
    reward = Counting()
    answer = ask(InlineExecutor(reward, "r", InlineOptions(micro_batch=size)), count, why)
    assert max(reward.sizes, default=0) <= (size or count) and sum(reward.sizes) == count
    assert len(reward.sizes) == -(-count // (size or max(count, 1)))
    expected = [math.nan if row in why else round(row / 255, 3) for row in range(count)]
    assert torch.equal(answer.scores.nan_to_num(-1), torch.tensor(expected).nan_to_num(-1))
    assert answer.reasons == why


def test_where_memory_does_not_suffice_the_micro_batch_is_halved_for_good():
    reward = Counting(room=3)
    executor = InlineExecutor(reward, "r")
    answer = ask(executor, 9)
    assert reward.sizes == [9, 4, 2, 2, 2, 2, 1]
    assert answer.scores.isfinite().all() and not answer.reasons
    ask(executor, 4)
    assert reward.sizes[7:] == [2, 2]
    answer = ask(InlineExecutor(Counting(room=0), "r", InlineOptions(micro_batch=2)), 3)
    assert answer.scores.isnan().all() and set(answer.reasons) == {0, 1, 2}
    assert "memory does not suffice for 1: no room" in answer.reasons[2]


def test_a_micro_batch_that_raises_leaves_the_others_their_scores():
    def second_stumbles(images, prompts, metadata):
        if "0.008" in prompts:
            raise RuntimeError("stumbled")
        return [1.0] * len(images)

    answer = ask(InlineExecutor(second_stumbles, "r", InlineOptions(micro_batch=2)), 5)
    assert answer.scores.isnan().tolist() == [False, False, True, True, False]
    assert answer.reasons == dict.fromkeys((2, 3), "RuntimeError: stumbled")


def test_what_no_image_can_mend_is_raised_when_the_answer_is_asked_for():
    for background in [False, True]:
        executor = InlineExecutor(lambda *_: [1.0], "r", InlineOptions(background=background))
        future = executor.submit(torch.zeros(2, 3, 2, 2), ["p"] * 2, [{}] * 2)
        for _ in range(2):
            with pytest.raises(RewardFailure, match="'r' answered with shape"):
                future.result(30)
        executor.close()


def test_without_a_thread_of_its_own_the_reward_is_asked_once_by_who_wants_the_answer():
    reward = Counting()
    executor = InlineExecutor(reward, "r")
    future = executor.submit(torch.zeros(1, 3, 2, 2), ["0.000"], [{}])
    assert not reward.sizes and not future.done()
    assert future.result().scores.tolist() == [0] and future.result() is future.result()
    assert reward.threads == [threading.current_thread().name] and future.done()
    executor.close()
    executor.close()
    assert ask(executor, 2).scores.isfinite().all()


def test_in_the_background_it_starts_at_once_in_a_thread_of_its_own_and_keeps_the_order():
    reward, free = Counting(), threading.Event()

    def waiting(images, prompts, metadata):
        assert free.wait(30)
        return reward(images, prompts, metadata)

    executor = InlineExecutor(waiting, "slow one", InlineOptions(background=True))
    images = torch.zeros(1, 3, 2, 2)
    futures = [executor.submit(images, ["0.000"], [{}]) for _ in range(2)]
    assert not any(future.done() for future in futures)
    free.set()
    assert [future.result(30).scores.tolist() for future in reversed(futures)] == [[0], [0]]
    assert len(set(reward.threads)) == 1 and reward.threads[0].startswith("reward slow one")
    executor.close()
    executor.close()
    assert not any(thread.name == reward.threads[0] for thread in threading.enumerate())


def test_a_reward_that_hangs_in_the_background_keeps_nobody_from_ending():
    release = threading.Event()
    executor = InlineExecutor(lambda *_: release.wait(60), "stuck", InlineOptions(background=True))
    images = torch.zeros(1, 3, 2, 2)
    executor.submit(images, ["a"], [{}])
    waiting = executor.submit(images, ["b"], [{}])
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 10 and waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(images, ["c"], [{}])
    release.set()
