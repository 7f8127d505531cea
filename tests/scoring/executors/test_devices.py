"""Rewards work on the GPU of the process that asks them; CUDA is faked, whose current GPU is a
thread's own and number 0 in a new thread."""

import threading

import pytest
import torch

from flowrl.utils.distributed import Runtime

PATIENCE = 60


def current_gpu(images, prompts, metadata):
    return [float(torch.cuda.current_device())] * len(images)


@pytest.fixture
def cuda(monkeypatch):
    """A process that accelerate has put on GPU 2."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(current, "gpu", gpu))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "gpu", 0))
    torch.cuda.set_device(2)
    return current


def scores(executor) -> list[float]:
    try:
        return (
            executor.submit(torch.zeros(1, 3, 2, 2), ["p"], [{}]).result(PATIENCE).scores.tolist()
        )
    finally:
        executor.close()


def test_every_executor_puts_a_reward_on_the_gpu_of_its_process(cuda, make_learner, monkeypatch):
    monkeypatch.setattr(Runtime, "gpu", 2)  # on this machine the runtime has no GPU
    learner = make_learner(
        specs=[
            {"name": f"{__name__}:current_gpu", "label": "inline"},
            {"name": f"{__name__}:current_gpu", "label": "thread",
             "executor": {"kind": "inline", "background": True}},
        ]
    )  # fmt: skip
    inline, thread = (spec.get_executor() for spec in learner.specs)
    assert scores(inline) == [2.0]
    assert scores(thread) == [2.0]


def test_the_runtime_knows_its_gpu(cuda):
    runtime = Runtime(device="cpu")
    assert runtime.gpu is None
    for name, expected in (("cuda:3", 3), ("cuda", 2)):
        runtime.device = torch.device(name)
        assert runtime.gpu == expected
