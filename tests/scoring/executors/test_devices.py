"""Rewards work on the GPU of the process that asks them; CUDA is faked, whose current GPU is a
thread's own and number 0 in a new thread."""

import threading

import pytest
import torch

from flowrl.assembly.learner import build_rewards
from flowrl.cli.rewards import _gpu_numbers, _shared_gpus
from flowrl.config import parse_config
from flowrl.config.rewards import PoolOptions
from flowrl.errors import UserError
from flowrl.scoring.executors.pool import PoolExecutor, visible_name
from flowrl.utils.distributed import Runtime

HERE = "pool_rewards:"
PATIENCE = 60


@pytest.fixture
def cuda(monkeypatch):
    """A process that accelerate has put on GPU 2 of the four that it sees, named 4 to 7."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(current, "gpu", gpu))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "gpu", 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6,7")
    torch.cuda.set_device(2)
    return current


def scores(executor, count: int = 1) -> list[float]:
    try:
        images = torch.zeros(count, 3, 2, 2)
        return executor.submit(images, ["p"] * count, [{}] * count).result(PATIENCE).scores.tolist()
    finally:
        executor.close()


def test_every_executor_puts_a_reward_on_the_gpu_of_its_process(cuda, make_learner, monkeypatch):
    monkeypatch.setattr(Runtime, "gpu", 2)  # on this machine the runtime has no GPU
    learner = make_learner(
        specs=[
            {"name": f"{HERE}current_gpu", "label": "inline"},
            {"name": f"{HERE}current_gpu", "label": "thread",
             "executor": {"kind": "inline", "background": True}},
            {"name": f"{HERE}visible_gpu", "label": "pool",
             "executor": {"kind": "pool", "workers": 2, "micro_batch": 1}},
        ]
    )  # fmt: skip
    inline, thread, pool = (spec.get_executor() for spec in learner.specs)
    assert scores(inline) == [2.0]
    assert scores(thread) == [2.0]
    assert scores(pool, 2) == [6.0, 6.0]  # the third of the four


def test_the_runtime_knows_its_gpu(cuda):
    runtime = Runtime(device="cpu")
    assert runtime.gpu is None
    for name, expected in (("cuda:3", 3), ("cuda", 2)):
        runtime.device = torch.device(name)
        assert runtime.gpu == expected


def test_processes_take_the_gpus_that_are_named_in_turn(cuda):
    executor = {"kind": "pool", "workers": 3, "gpus": [1, 3]}
    entry = {"name": f"{HERE}visible_gpu", "executor": executor}
    config = parse_config({"prompts": {"train": "p.txt"}, "rewards": [entry]})
    (spec,) = build_rewards(config, gpu=2)
    assert isinstance(spec.executor, PoolExecutor)
    assert [process._gpu for process in spec.executor._processes] == [1, 3, 1]
    assert [visible_name(gpu) for gpu in (1, 3)] == ["5", "7"]
    # A reward that is told a GPU by its number keeps seeing all.
    told = PoolExecutor(
        "m:r", {"detector_args": {"device": "cuda:1"}}, "r", PoolOptions(workers=2, gpus=[0])
    )
    assert [process._gpu for process in told._processes] == [None, None]


def test_a_server_s_processes_take_the_machine_s_gpus_in_turn(cuda, monkeypatch):
    for gpus, expected in ((4, [[0, 1, 2], [3, 0, 1]]), (0, [[], []])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert _shared_gpus(2, 3) == expected


def test_a_server_has_a_worker_on_each_of_the_gpus_that_are_named():
    assert _gpu_numbers("0-3,6") == [0, 1, 2, 3, 6]
    assert _shared_gpus(2, 5, [0, 1, 2, 3, 6]) == [[0, 1, 2, 3, 6]] * 2
    assert _shared_gpus(1, 3, [4, 5]) == [[4, 5, 4]]
    for wrong in ("", "all", "3-1", "0-", "-1", "1,,2"):
        with pytest.raises(UserError, match="expected numbers of GPUs, as in 0-7"):
            _gpu_numbers(wrong)
