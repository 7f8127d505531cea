"""Rollout workers: whoever draws and dies, the same bits; here they are threads of the test."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.assembly.worker import Worker, build_pool
from flowrl.errors import MachineFailure, UserError
from flowrl.prompts.records import PromptRecord
from flowrl.sampling import workers as module
from flowrl.sampling.rollout import RolloutRequest, group_request
from flowrl.sampling.units import Stage, Unit, UnitAnswer
from flowrl.sampling.workers import Joined, WorkerPool
from flowrl.scoring.spec import RewardResult
from flowrl.trajectory import Conditioning
from flowrl.trees.presets import branch_grpo, ode
from flowrl.utils.digests import digest
from flowrl.utils.distributed import Runtime

PROMPTS = [
    PromptRecord(uid="a", text="a red dot", metadata={"tag": "x", "n": [1, {"k": 2}]}),
    PromptRecord(uid="b", text="two", negative="", paraphrases=("2", "a pair"), wording="2"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "TICK", 0.01)
    monkeypatch.setattr(module, "LEAST", 0.05)
    monkeypatch.setattr(module, "UNKNOWN", 0.3)


def unit(root: int = 0, **changes) -> Unit:
    request = RolloutRequest(
        prompts=PROMPTS, prompt=torch.tensor([0, 1]), group=torch.tensor([0, 1]),
        root=torch.tensor([root, 0]), seed=3, iteration=5,
    )  # fmt: skip
    cond = Conditioning(tensors={"embeds": torch.ones(2, 3), "mask": torch.tensor([[True], [0]])})
    stage = Stage(num_inference_steps=2, rewards=("brightness",))
    fields = {"request": request, "plan": ode(2, 1), "cond": cond, "rows": 2, "stage": stage}
    return Unit(**fields | {"adapter": "0"} | changes)


def answer_of(data: bytes, *, score: float = 1.0, tree: str = "t") -> bytes:
    result = RewardResult(
        scores=torch.tensor([[score]]), valid=torch.tensor([[True]]),
        applicable=torch.tensor([[True]]), names=("brightness",), errors={"a": "why"},
        seconds={"brightness": 0.5},
    )  # fmt: skip
    return UnitAnswer(
        key=digest(data), digest=tree, seconds=0.1, result=result, tree=None, levels=None
    ).to_bytes()


class Thread:
    """A worker that is two threads; what it is asked is answered by functions."""

    def __init__(self, join: Callable, draw: Callable):
        self._join, self._draw, self._open = join, draw, []
        self._threads = ThreadPoolExecutor(2)
        self.dead = False

    def _later(self, work: Callable, *args) -> Future:
        found: Future = Future()
        self._open.append(found)

        if self.dead:
            found.set_exception(ConnectionError("the worker is dead"))
            return found

        def run() -> None:
            try:
                result = work(*args)
            except Exception as error:
                if not found.done():
                    found.set_exception(error)
                return
            if not found.done():
                found.set_result(result)

        self._threads.submit(run)
        return found

    def join(self, probe, weights) -> Future:
        return self._later(self._join, probe, weights)

    def draw(self, unit, weights) -> Future:
        return self._later(self._draw, unit, weights)

    def kill(self) -> None:
        """As SIGKILL: what it was asked ends at once, and nothing more comes."""
        self.dead = True
        for future in self._open:
            if not future.done():
                future.set_exception(ConnectionError("the worker died"))


class Threads:
    """A cluster of such workers; `draw(number of the launch, unit)` is what they do."""

    def __init__(self, draw: Callable, join: Callable | None = None):
        self.draw, self.join_as, self.launched, self.sent = draw, join, [], 0

    def start(self) -> None: ...

    def put(self, data: bytes):
        self.sent += 1
        return data

    def launch(self, number: int) -> Thread:
        turn = len(self.launched)

        def join(probe, weights):
            if self.join_as is not None:
                return self.join_as(turn)
            return Joined(where=f"thread {turn}", machine="cpu", digest="p")

        remote = Thread(join, lambda unit, weights: self.draw(turn, unit))
        self.launched.append(remote)
        return remote

    def close(self) -> None: ...


@pytest.fixture
def make_pool():
    pools = []

    def make(draw, join=None, *, count=2, expected="p", **options):
        settings = {"slow_after": 3.0, "timeout": 30.0, "join_timeout": 30.0} | options
        pool = WorkerPool(Threads(draw, join), count=count, **settings)
        pool.start(unit(), [torch.zeros(2)], expected)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


def ask(pool: WorkerPool, count: int, first: int = 0) -> list[Future]:
    adapter = pool.adapter([torch.zeros(2)])
    return [pool.ask(unit(first + i), adapter, f"unit {i}") for i in range(count)]


def test_a_unit_arrives_as_it_was_and_another_row_plan_adapter_or_text_is_another_unit():
    plan = branch_grpo(4, 4, 2, (0,))
    first = replace(unit(), plan=plan, request=group_request(PROMPTS, plan, seed=1, iteration=2))
    data = first.to_bytes()
    again = Unit.from_bytes(data)
    assert again.to_bytes() == data
    assert again.plan == plan and again.stage == first.stage
    assert list(again.request.prompts) == list(first.request.prompts)
    for name in ("prompt", "group", "root"):
        assert torch.equal(getattr(again.request, name), getattr(first.request, name))
    assert torch.equal(again.cond.tensors["mask"], first.cond.tensors["mask"])
    others = [
        unit(1), unit(plan=ode(3, 1)), unit(adapter="1"), unit(rows=3), unit(keep=False),
        unit(stage=Stage(num_inference_steps=2, rewards=())),
        unit(cond=Conditioning(tensors={"embeds": torch.zeros(2, 3)})),
        unit(request=replace(unit().request, iteration=6)),
    ]  # fmt: skip
    assert len({digest(u.to_bytes()) for u in [unit(), unit(), *others]}) == 1 + len(others)


def test_a_worker_that_dies_is_replaced_and_what_it_was_asked_is_asked_elsewhere(make_pool):
    hold = threading.Event()

    def draw(turn, data):
        if turn == 0:
            hold.wait(5)
        return answer_of(data)

    pool = make_pool(draw)
    asked = ask(pool, 4)
    while not pool.table()[0].where or pool._workers[0].asked == {}:
        time.sleep(0.01)
    pool.cluster.launched[0].kill()  # type: ignore[attr-defined]
    answers = pool.wait(asked)
    hold.set()
    assert [a.key for a in answers] == [digest(unit(i).to_bytes()) for i in range(4)]
    assert answers[0].result.errors == {"a": "why"} and answers[0].result.scores.item() == 1
    assert len(pool.cluster.launched) == 3  # type: ignore[attr-defined]
    assert pool.metrics()["workers/0/failures"] >= 1
    assert pool.metrics()["workers/1/failures"] == 0
    assert pool.cluster.sent == 1, "one version of the weights is sent once"  # type: ignore


def test_a_slow_unit_is_asked_again_and_the_first_answer_counts(make_pool, caplog):
    hold, late = threading.Event(), digest(unit(7).to_bytes())

    def draw(turn, data):
        slow = digest(data) == late and turn == slow_turn[0]
        if slow:
            hold.wait(5)
        return answer_of(data, score=2.0 if slow else 1.0, tree="other" if slow else "t")

    slow_turn = [-1]
    pool = make_pool(draw)
    pool.wait(ask(pool, 4))
    slow_turn[0] = 0
    (found,) = pool.wait(ask(pool, 1, first=7))
    slow_turn[0] = -1
    assert found.result.scores.item() == 1.0
    with caplog.at_level(logging.WARNING):
        hold.set()
        while pool._workers[0].asked:
            time.sleep(0.01)
    assert "answered a unit with other latents than another worker" in caplog.text


def test_a_frozen_worker_is_ended_and_replaced(make_pool):
    hold = threading.Event()
    pool = make_pool(lambda turn, data: hold.wait(9) if turn == 0 else answer_of(data),
                     count=1, timeout=0.2)  # fmt: skip
    assert len(pool.wait(ask(pool, 2))) == 2
    hold.set()
    assert pool.cluster.launched[0].dead and len(pool.cluster.launched) == 2  # type: ignore


def test_what_a_unit_fails_at_ends_the_run_and_what_a_machine_fails_at_is_tried_elsewhere(
    make_pool,
):
    def draw(turn, data):
        if digest(data) == digest(unit(1).to_bytes()):
            raise UserError("no image")
        tries.append(turn)
        if len(tries) < 3:
            raise MachineFailure("memory", "full")
        return answer_of(data)

    tries: list[int] = []
    pool = make_pool(draw)
    good, bad = ask(pool, 2)
    with pytest.raises(UserError, match="no image"):
        pool.wait([bad])
    pool.wait([good])
    assert len(tries) == 3


def test_a_worker_whose_probe_has_other_bits_gets_no_work(make_pool):
    def join(turn):
        if turn:
            first.wait(9)
        return Joined(where="there", machine="another GPU", digest="q" if turn else "p")

    first = threading.Event()
    pool = make_pool(lambda turn, data: answer_of(data), join)
    assert pool.wait(ask(pool, 1))
    first.set()
    while "draws other numbers" not in pool.table()[1].state:
        time.sleep(0.01)
    pool.wait(ask(pool, 6, first=1))
    assert pool.table()[0].units == 7 and "it is another GPU" in pool.table()[1].state
    pool = make_pool(lambda turn, data: answer_of(data), join, expected="r")
    with pytest.raises(UserError, match=r"worker \d \(there\) draws other numbers"):
        pool.wait(ask(pool, 1))
    pool = make_pool(lambda turn, data: answer_of(data), join, expected=None, count=1)
    assert pool.wait(ask(pool, 1)), "the first worker's counts where the trainer has none"


def test_what_no_worker_can_load_ends_the_run_with_its_sentence(make_pool):
    def join(turn):
        raise UserError("no reward my_rewards:taste here")

    pool = make_pool(lambda turn, data: answer_of(data), join, count=3)
    with pytest.raises(UserError, match="no reward my_rewards:taste here"):
        pool.wait(ask(pool, 1))


def test_workers_come_and_go_and_a_run_without_any_ends(make_pool):
    places = threading.Semaphore(1)

    def join(turn):
        assert places.acquire(timeout=9)
        return Joined(where="there", machine="cpu", digest="p")

    pool = make_pool(lambda turn, data: time.sleep(0.02) or answer_of(data), join, count=3)
    pool.wait(ask(pool, 2))
    assert pool.metrics()["workers/joined"] == 1
    places.release(2)
    pool.wait(ask(pool, 30, first=10))
    assert all(stats.units for stats in pool.table())
    pool.cluster.launched[0].kill(), pool.cluster.launched[1].kill()  # type: ignore
    pool.wait(ask(pool, 6, first=50))
    pool.join_timeout = 0.1
    pool.cluster.launched[2].kill()  # type: ignore
    with pytest.raises(MachineFailure, match="no worker joined for 0.1 s"):
        pool.wait(ask(pool, 1, first=90))
    for _ in range(9):
        places.release()


def test_who_is_waited_for_is_said(make_pool, monkeypatch, caplog):
    hold = threading.Event()
    pool = make_pool(lambda turn, data: hold.wait(5) and answer_of(data), count=1)
    monkeypatch.setattr(module, "HEARTBEAT", 0.2)
    asked = ask(pool, 1)
    threading.Timer(0.5, hold.set).start()
    with caplog.at_level(logging.WARNING):
        pool.wait(asked)
    assert "waiting for unit 0: worker 0 (thread 0) since 0 s, for 0 s" in caplog.text


# --- a recipe -----------------------------------------------------------------------------------

SHORT = {"prompts_per_iteration": 3, "group_size": 4, "num_inference_steps": 3, "batch_size": 5}
CASES = {
    "grpo": ({"kind": "grpo"}, {}),
    "nft": ({"kind": "nft", "noising": {"count": 2}}, {"tree": {"kind": "ode"}}),
    "tree": ({"kind": "grpo", "kl_coef": 0.1}, {"tree": {"kind": "branch_grpo", "splits": [0]}}),
    "two_stage": (
        {"kind": "grpo"},
        {"explore": {"candidates": 6, "num_inference_steps": 2, "precision": "nvfp4-emulated",
                     "min_dim": 0, "audit": {"every": 1, "prompts": 1, "min_rho": -1}}},
    ),
    "late": ({"kind": "nft", "noising": {"count": 2}}, {"tree": {"kind": "ode"}, "staleness": 1}),
}  # fmt: skip


class InProcess(Threads):
    """Workers that draw as those of other processes do, in threads of this one."""

    def __init__(self, recipe: str):
        super().__init__(lambda turn, data: None)
        self.recipe = recipe

    def launch(self, number: int) -> Thread:
        worker = Worker(self.recipe, 1)
        remote = Thread(
            lambda probe, weights: worker.join(probe, lambda: weights),
            lambda unit, weights: worker.draw(unit, lambda: weights),
        )
        self.launched.append(remote)
        return remote


def recipe(tiny_config, case: str, **rewards):
    objective, rollout = CASES[case]
    return tiny_config(
        objective=objective,
        rollout=SHORT | rollout | {"workers": {"count": 1}},
        rewards=[{"name": "brightness"}, {"name": "diversity", "weight": 0.1}],
    )


def trained(config, pipeline, cluster=None) -> tuple[list, list]:
    """Weights after two iterations, and the rewards of both; `cluster` draws, or this process."""
    runtime = Runtime(device="cpu")
    pool = build_pool(config, runtime, ProvidedObjects()) if cluster is not None else None
    if pool is not None:
        pool.cluster = cluster
    learner = build_learner(config, runtime, ProvidedObjects(pipeline=pipeline), pool=pool)
    found = [learner.iterate(i) for i in range(2)]
    if pool is not None:
        assert found[1][1]["workers/0/units"] > 0 and found[1][1]["workers/waited"] > 0
        pool.close()
    return learner.policy.weights("default"), [r.scores for r, _ in found]


@pytest.mark.parametrize(
    "case", ["grpo", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "grpo")]
)
def test_weights_and_scores_are_those_of_one_process_bit_for_bit(
    tiny_config, load_tiny, tmp_path, monkeypatch, case
):
    monkeypatch.setattr("flowrl.assembly.worker.build_pipeline", lambda *_, **__: load_tiny())
    config = recipe(tiny_config, case)
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"output_dir": str(tmp_path)})}
    )
    expected, scores = trained(config, load_tiny())
    (tmp_path / "audits.jsonl").unlink(missing_ok=True)
    found, others = trained(config, load_tiny(), InProcess(config.model_dump_json()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(others, scores, strict=True))
    assert not torch.equal(expected[0], torch.zeros_like(expected[0]))


def test_objects_that_workers_could_not_load_are_refused(tiny_config):
    config, runtime = recipe(tiny_config, "grpo"), Runtime(device="cpu")
    for given in (ProvidedObjects(pipeline=object()), ProvidedObjects(rewards={"r": len})):
        with pytest.raises(UserError, match="rollout.workers load everything by its name"):
            build_pool(config, runtime, given)
    assert build_pool(tiny_config(), runtime, ProvidedObjects()) is None
