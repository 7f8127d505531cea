"""Rewards work on the GPU of the process that asks them; CUDA is faked, whose current GPU is a
thread's own and number 0 in a new thread."""

import threading

import pytest
import torch

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
