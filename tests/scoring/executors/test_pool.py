"""A pool of real processes: what it scores, and what becomes of those that hang, crash or leak."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import psutil
import pytest
import torch
from torch import Tensor

from flowrl.config.rewards import InlineOptions, PoolOptions
from flowrl.scoring.executors.base import Answer, InlineExecutor, RewardFailure
from flowrl.scoring.executors.pool import START, PoolExecutor
from flowrl.scoring.scorer import quantise
from flowrl.scoring.spec import load_reward

PATIENCE = 60  # seconds; nothing here may take so long


@pytest.fixture(scope="module")
def pair() -> Iterator[PoolExecutor]:
    """Two workers, two images a micro-batch."""
    options = PoolOptions(workers=2, timeout=1.5, micro_batch=2)
    pool = PoolExecutor("pool_rewards:Scripted", {"offset": 1.0}, "scripted", options)
    yield pool
    pool.close()


@pytest.fixture
def make() -> Iterator[Callable[..., PoolExecutor]]:
    pools: list[PoolExecutor] = []

    def started(name: str, args: dict | None = None, start=START, **options) -> PoolExecutor:
        how = PoolOptions(**options)
        pools.append(PoolExecutor(f"pool_rewards:{name}", args, "r", how, start=start))
        return pools[-1]

    yield started
    for pool in pools:
        pool.close()


def random_images(count: int) -> Tensor:
    return quantise(torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(count)))


def ask(pool: PoolExecutor, *metadata: dict) -> Answer:
    images = random_images(len(metadata))
    return pool.submit(images, ["p"] * len(images), list(metadata)).result(PATIENCE)


def workers() -> list[psutil.Process]:
    """Processes this one started; the tracker that multiprocessing keeps is none of the pool's."""
    return [
        child
        for child in psutil.Process().children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]


def test_scores_are_those_of_this_process_bit_for_bit_in_the_order_of_the_images(pair):
    images, prompts = random_images(7), list("abcdefg")
    slow_first = [{"do": "sleep", "seconds": 0.3}, *[{}] * 6]
    inline = InlineExecutor(
        load_reward("pool_rewards:Scripted", {"offset": 1.0}),
        "r",
        InlineOptions(micro_batch=2),
    )
    expected = inline.submit(images, prompts, slow_first).result()
    found = pair.submit(images, prompts, slow_first).result(PATIENCE)
    assert torch.equal(found.scores, expected.scores) and found.scores.dtype == torch.float32
    assert not found.reasons and found.seconds >= 0.3


def test_no_image_is_lost_or_scored_twice_however_long_each_takes(pair, tmp_path):
    def note(submission: int, row: int) -> dict:
        return {
            "do": "note", "path": str(tmp_path / "seen"), "text": f"{submission},{row}",
            "seconds": (submission * 7 + row * 5) % 4 / 50,
        }  # fmt: skip

    sizes = (5, 0, 1, 8)
    asked = [
        pair.submit(random_images(n), ["p"] * n, [note(i, row) for row in range(n)])
        for i, n in enumerate(sizes)
    ]
    for n, future in reversed(list(zip(sizes, asked, strict=True))):
        assert torch.equal(future.result(PATIENCE).scores, random_images(n).mean((1, 2, 3)) + 1)
    seen = (tmp_path / "seen").read_text().split()
    assert sorted(seen) == [f"{i},{row}" for i, n in enumerate(sizes) for row in range(n)]


def test_a_micro_batch_that_hangs_is_stopped_and_the_others_are_scored(pair):
    ask(pair, *[{"do": "sleep", "seconds": 0.1}] * 4)  # both have loaded
    hangs = {"do": "sleep", "seconds": 600}
    began = time.perf_counter()
    found = ask(pair, {}, {}, {}, hangs, {}, {})
    assert time.perf_counter() - began < 20
    assert found.scores.isnan().tolist() == [False, False, True, True, False, False]
    assert set(found.reasons) == {2, 3}
    assert "longer than 1.5 s" in found.reasons[2]
    assert ask(pair, {}, {}, {}, {}).scores.isfinite().all()


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_asked_once_more_and_then_there_is_a_reason(
    pair, tmp_path
):
    found = ask(pair, {}, {}, {"do": "die", "code": 3}, {}, {}, {})
    assert found.scores.isnan().tolist() == [False, False, True, True, False, False]
    assert "exit code 3" in found.reasons[3]
    assert ask(pair, {}, {}, {}, {}).scores.isfinite().all()
    data = {"do": "die_once", "path": str(tmp_path / "died")}
    assert ask(pair, {}, data).scores.isfinite().all()
    assert (tmp_path / "died").exists()


def test_a_reward_that_raises_gives_its_reason_and_its_process_lives_on(pair):
    for what, reason in [
        ("raise", "RuntimeError: engine stumbled"),
        ("exit", "SystemExit: enough"),
        ("odd_error", "Odd: an error that cannot be sent"),
    ]:
        ask(pair, *[{"do": "sleep", "seconds": 0.1}] * 4)  # both have loaded
        before = {child.pid for child in workers()}
        found = ask(pair, {}, {}, {}, {"do": what})
        assert found.scores.isnan().tolist() == [False, False, True, True]
        assert all(found.reasons[row].startswith(reason) for row in (2, 3))
        assert {child.pid for child in workers()} == before


@pytest.mark.slow
def test_what_no_image_can_mend_stops_with_the_reason(pair, make):
    for data, said in (
        ({"do": "import"}, "'scripted'.*a_package_that_is_not_there"),
        ({"do": "forget"}, r"'scripted'.*\(1,\)"),
        ({"thing": (n for n in range(3))}, "'scripted'.*pickle"),
    ):
        with pytest.raises(RewardFailure, match=said):
            ask(pair, {}, {}, data, {})
        assert ask(pair, {}).scores.isfinite().all()
    with pytest.raises(RewardFailure, match="'r'.*cannot read x.bin"):
        ask(make("Broken", {"path": "x.bin"}), {}, {})


@pytest.mark.slow
def test_after_three_in_a_row_without_an_answer_nothing_is_asked_for_a_while(make):
    pool = make("Scripted", micro_batch=1, timeout=0.1, start=0.1)
    found = ask(pool, *[{"do": "sleep", "seconds": 600}] * 3, {}, {})
    assert found.scores.isnan().all()
    assert [found.reasons[row].split(";")[0] for row in (0, 2, 3, 4)] == [
        *["took longer than 0.2 s with loading and was stopped"] * 2,
        *["skipped, after 3 micro-batches without an answer"] * 2,
    ]


def test_closing_ends_every_process_at_once_and_answers_what_is_open(make):
    before = {child.pid for child in workers()}
    pool = make("Scripted", workers=2, micro_batch=1)
    hanging = pool.submit(random_images(4), ["p"] * 4, [{"do": "sleep", "seconds": 600}] * 4)
    assert not wait([hanging], timeout=0.3).done
    began = time.perf_counter()
    pool.close()
    pool.close()
    assert time.perf_counter() - began < 10
    assert {child.pid for child in workers()} == before
    found = hanging.result(PATIENCE)
    assert found.scores.isnan().all() and "closed" in found.reasons[3]
    with pytest.raises(RuntimeError, match="closed"):
        ask(pool, {})
