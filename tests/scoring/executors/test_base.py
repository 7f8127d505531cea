"""Rewards in this process: what they may answer, how many images at once, when, in which thread."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.rewards import InlineOptions
from flowrl.errors import UserError
from flowrl.scoring.executors.base import (
    Answer,
    InlineExecutor,
    RewardFailure,
    ask,
    read_answer,
    to_levels,
)
from flowrl.utils.distributed import Runtime

IMAGE = torch.zeros(1, 3, 2, 2)


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        [0.5, 1, 2.0],
        torch.tensor([0.5, 1, 2], dtype=torch.bfloat16, requires_grad=True),
        np.array([0.5, 1, 2]),
        [torch.tensor(0.5), np.float32(1), 2],
        ([0.5, 1, 2], {}),
    ],
)
def test_scores_may_be_a_tensor_an_array_or_numbers(answer):
    read = read_answer(answer, 3)
    assert torch.equal(read.scores, torch.tensor([0.5, 1.0, 2.0])) and read.reasons == {}
    assert read.scores.dtype == torch.float32 and not read.scores.requires_grad


@given(st.lists(st.none() | st.floats(width=64), max_size=6), st.data())
def test_a_row_without_a_finite_float32_or_with_a_reason_is_missing(values, data):
    reasons = data.draw(st.dictionaries(st.integers(0, 6), st.text(min_size=1)))
    read = read_answer((values, reasons), len(values))
    rows = range(len(values))
    float32 = torch.tensor([math.nan if v is None else v for v in values]).tolist()
    missing = {i for i in rows if not np.isfinite(float32[i]) or i in reasons}
    assert {i for i in rows if read.scores[i].isnan()} == missing == set(read.reasons)
    assert all(read.scores[i].item() == float32[i] for i in set(rows) - missing)
    assert all(read.reasons[i] == reasons[i] for i in missing if i in reasons)


@pytest.mark.parametrize(
    "answer, words",
    [
        ([1.0, 2.0], r"\(2,\).*\(3,\)"),
        (torch.zeros(3, 1), r"\(3, 1\)"),
        (None, "NoneType"),
        ("0.5", "str"),
        (["0.5", "a", "b"], "list"),
    ],
)
def test_another_length_or_form_stops_the_run(answer, words):
    with pytest.raises(RewardFailure, match=f"'mine'.*{words}"):
        ask(lambda *_: answer, "mine", IMAGE.expand(3, 3, 2, 2), ["p"] * 3, [{}] * 3)


def test_levels_are_those_of_a_file():
    images = torch.rand(3, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    images[0].flatten()[:6] = torch.tensor([0.5, 1.5, 2.5, 254.5, 0, 255]) / 255
    images[1].flatten()[:2] = torch.tensor([-0.1, 1.2])
    for given_images in (images, images.bfloat16(), images.double(), images.mT, images[:0]):
        plain = (given_images.float() * 255).round().clamp(0, 255).byte()
        assert torch.equal(to_levels(given_images), plain)


@pytest.mark.parametrize(
    "error", [ImportError("no detector"), RewardFailure("over"), KeyboardInterrupt("now"),
              torch.cuda.OutOfMemoryError("full")],
)  # fmt: skip
def test_what_no_image_can_mend_is_raised(error):
    def raises(images, prompts, metadata):
        raise error

    expected = UserError if isinstance(error, ImportError) else type(error)
    with pytest.raises(expected, match=str(error)):
        ask(raises, "mine", IMAGE, ["p"], [{}])


# --- calls ----------------------------------------------------------------------------------------


class Counting:
    """Scores an image with its first pixel and remembers how many came at once."""

    def __init__(self, room: int = 1000):
        self.room = room  # images that the device has memory for
        self.sizes: list[int] = []
        self.threads: list[str] = []

    def __call__(self, images, prompts, metadata):
        assert len(images) == len(prompts) == len(metadata)
        self.sizes.append(len(images))
        self.threads.append(threading.current_thread().name)
        if len(images) > self.room:
            raise torch.cuda.OutOfMemoryError("no room")
        if "stumble" in prompts:
            raise RuntimeError("stumbled")
        return images[:, 0, 0, 0], {row: "torn" for row, p in enumerate(prompts) if p == "torn"}


def call(executor: InlineExecutor, *prompts: str) -> Answer:
    count = len(prompts)
    images = torch.arange(count).view(-1, 1, 1, 1).expand(count, 3, 2, 2) / 255
    return executor.submit(images, list(prompts), [{}] * count).result(30)


@given(st.lists(st.sampled_from(["fine", "torn"]), max_size=9), st.none() | st.integers(1, 10))
def test_micro_batches_change_nothing_but_their_number(prompts, size):
    reward = Counting()
    answer = call(InlineExecutor(reward, "r", InlineOptions(micro_batch=size)), *prompts)
    count = len(prompts)
    assert len(reward.sizes) == -(-count // (size or max(count, 1))) and sum(reward.sizes) == count
    expected = [math.nan if p == "torn" else row / 255 for row, p in enumerate(prompts)]
    torch.testing.assert_close(answer.scores, torch.tensor(expected), equal_nan=True)
    assert set(answer.reasons) == {row for row, p in enumerate(prompts) if p == "torn"}


def test_where_memory_does_not_suffice_the_micro_batch_is_halved_for_good():
    reward = Counting(room=3)
    executor = InlineExecutor(reward, "r")
    assert call(executor, *"abcdefghi").scores.isfinite().all()
    assert reward.sizes == [9, 4, 2, 2, 2, 2, 1]
    call(executor, *"abcd")
    assert reward.sizes[7:] == [2, 2]
    answer = call(InlineExecutor(Counting(room=0), "r", InlineOptions(micro_batch=2)), *"abc")
    assert answer.scores.isnan().all() and "no room" in answer.reasons[2]


def test_without_background_the_reward_is_called_when_the_answer_is_taken():
    reward = Counting()
    executor = InlineExecutor(reward, "r")
    future = executor.submit(IMAGE, ["p"], [{}])
    assert not reward.sizes and not future.done()
    assert future.result() is future.result() and reward.sizes == [1]
    assert reward.threads == [threading.current_thread().name]


def test_in_the_background_it_is_called_at_once_in_order_and_errors_come_with_the_answer():
    reward, free = Counting(), threading.Event()

    def waits(images, prompts, metadata):
        assert free.wait(30)
        return reward(images, prompts, metadata) if prompts == ["p"] else [1.0] * 5

    executor = InlineExecutor(waits, "slow", InlineOptions(background=True))
    futures = [executor.submit(IMAGE, [prompt], [{}]) for prompt in ("p", "p", "wrong")]
    assert not any(future.done() for future in futures)
    free.set()
    with pytest.raises(RewardFailure, match="'slow' answered with shape"):
        futures[2].result(30)
    assert [future.result(30).scores.tolist() for future in futures[:2]] == [[0], [0]]
    assert len(set(reward.threads)) == 1 and threading.current_thread().name not in reward.threads
    executor.close()
    executor.close()
    assert not any(thread.name == reward.threads[0] for thread in threading.enumerate())


def current_gpu(images, prompts, metadata):
    return [float(torch.cuda.current_device())] * len(images)


def test_every_executor_puts_a_reward_on_the_gpu_of_its_process(make_learner, monkeypatch):
    """In a process that accelerate has put on GPU 2."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(current, "gpu", gpu))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "gpu", 0))
    torch.cuda.set_device(2)
    runtime = Runtime(device="cpu")
    assert runtime.gpu is None
    for name, expected in (("cuda:3", 3), ("cuda", 2)):
        runtime.device = torch.device(name)
        assert runtime.gpu == expected
    monkeypatch.setattr(Runtime, "gpu", 2)  # on this machine the runtime has no GPU
    learner = make_learner(
        specs=[
            {"name": f"{__name__}:current_gpu", "label": "inline"},
            {"name": f"{__name__}:current_gpu", "label": "thread",
             "executor": {"kind": "inline", "background": True}},
        ]
    )  # fmt: skip
    for spec in learner.specs:
        executor = spec.get_executor()
        assert executor.submit(IMAGE, ["p"], [{}]).result(60).scores.tolist() == [2.0]
        executor.close()
