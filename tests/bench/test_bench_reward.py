"""What `flowrl bench reward` and `tree` measure; how fast it is, is not a test's business."""

import pytest
import torch

from flowrl.bench import reward as bench
from flowrl.bench import rollout as bench_tree
from flowrl.bench.reward import _job, _Question, _questions, bench_reward, served
from flowrl.bench.timing import TimedTurn, TimedTurns
from flowrl.errors import UserError
from flowrl.scoring.executors.base import InlineExecutor
from flowrl.scoring.spec import RewardSpec, load_reward

JOBS = ["direct call", "inline", "background"]


def test_ratios_are_to_the_direct_call_and_every_way_to_ask_has_a_row():
    rows = bench_reward(
        name="brightness", images=6, sizes=(16,), workers=(), codecs=(), micro_batch=3, repeats=1
    )
    assert [row["job"] for row in rows] == JOBS
    for row in rows:
        assert row["images/s"] * row["seconds"] == pytest.approx(6)
        assert row["wall ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"])
    assert rows[0]["CPU ratio"] == 1


@pytest.mark.slow
def test_pools_and_servers_stand_beside_this_process():
    rows = bench_reward(
        name="compressibility", args={"quality": 80}, images=4, sizes=(64,), workers=(1, 2),
        codecs=("raw", "jpeg"), micro_batch=2, repeats=1,
    )  # fmt: skip
    others = ["pool, 1 process", "pool, 2 processes", "server, raw", "server, jpeg"]
    assert [row["job"] for row in rows] == [*JOBS, *others]
    assert all(row["seconds"] > 0 and row["CPU ratio"] >= 0 for row in rows)


@pytest.mark.slow
def test_a_server_that_does_not_start_is_told():
    with pytest.raises(UserError, match="did not start.*JPEG quality"):
        with served("compressibility", {"quality": 0}, ["raw"]):
            pass


def test_the_hidden_share_is_that_of_what_waiting_adds(monkeypatch):
    """10 s an iteration without a wait, 14 s with it, 11 s where it is hidden: three quarters."""
    seconds = iter(bench.ITERATIONS * each for each in (10.0, 10.0, 10.0, 14.0, 11.0))
    runs = []

    def fake(config):
        runs.append((config.rollout.staleness, config.rewards[0].args["seconds"]))
        wall = next(seconds)
        return {"wall": wall, "cpu": wall / 2}

    monkeypatch.setattr(bench, "_run_of", fake)
    monkeypatch.setattr(bench, "best_parts", lambda jobs, _: {n: job() for n, job in jobs.items()})
    rows = bench.bench_overlap(repeats=1)
    wait = bench.WAIT * 10 / bench.GROUP
    assert runs == [(0, 0.0), (0, 0.0), (0, 0.0), (0, wait), (1, wait)]
    assert [row["hidden"] for row in rows] == [None, None, pytest.approx(0.75)]
    assert [row["s an iteration"] for row in rows] == [10, 14, 11]


@pytest.mark.slow
def test_runs_of_waiting_rewards_are_real_ones():
    config = bench._waiting_run(1, 0.001, "cpu")
    assert bench._run_of(config)["wall"] > 0.008 * bench.ITERATIONS


def test_a_reward_is_shown_images_of_every_size_that_it_applies_to():
    for name, tags in [("ocr", {"ocr"}), ("brightness", None)]:
        spec = RewardSpec(name=name, reward=load_reward(name))
        made = _questions(spec, 8, (64, 96, 128), 4)
        assert [tuple(q.images.shape) for q in made] == [
            (3, 3, 64, 64),
            (3, 3, 96, 96),
            (2, 3, 128, 128),
        ]
        for question in made:
            assert torch.equal((question.images * 255).round() / 255, question.images)
            assert len(question.prompts) == len(question.metadata) == len(question.images)
            assert question.images.flatten(1).std(1).min() > 0.05  # something is drawn
            assert tags is None or {data["tag"] for data in question.metadata} == tags


class Picky:
    required_metadata = ("something else",)


def test_what_has_no_speed_is_refused():
    def blind(images, prompts, metadata):
        raise RuntimeError("nothing to see")

    with pytest.raises(UserError, match="4 images do not keep 2 processes busy.* 8 or more"):
        bench_reward(name="brightness", images=4, micro_batch=4)
    with pytest.raises(UserError, match="applies to none"):
        _questions(RewardSpec(name="x", reward=Picky()), 2, (64,), 4)  # pyright: ignore
    image, executor = torch.zeros(1, 3, 8, 8), InlineExecutor(blind, "blind")
    question = _Question(images=image, prompts=["p"], metadata=[{}])
    with pytest.raises(UserError, match="no score, so there is no speed.*nothing to see"):
        _job(executor, [question])()


@pytest.mark.slow
def test_ratios_stand_beside_those_of_the_plans_own_counts(tiny_pipeline_path, monkeypatch):
    def measured(jobs, repeats, device):
        jobs["update pruned"](), jobs["sample tree"]()
        taken = {name: TimedTurn(cpu=2.0 + i**2, wall=1.0) for i, name in enumerate(jobs)}
        return {name: TimedTurns(turns=(turn,), on_gpu=False) for name, turn in taken.items()}

    monkeypatch.setattr(bench_tree, "time_turns", measured)
    rows = bench_tree.bench_tree(
        model=tiny_pipeline_path, prompts=1, batch=16, steps=13, threads=1, repeats=1, device="cpu"
    )
    tree = 1 + 2 * 3 + 4 * 3 + 8 * 3 + 16 * 3  # nodes with children at T = 13, splits 0, 3, 6, 9
    chains, last = 16 * 13, 16
    assert [row["by counts"] for row in rows] == [
        tree / chains,
        (tree - last) / (chains - last),
        (tree - last - 2 * 16) / (tree - last),  # steps 10 and 11 of 13 are left out
    ]
    assert [row["ratio"] for row in rows] == [3 / 2, 11 / 6, 18 / 11]
    for row in rows:
        assert row["of counts"] == row["ratio"] / row["by counts"]
