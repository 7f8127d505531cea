"""What one process does alone; several together are in tests/training/test_processes.py."""

import pytest
import torch

from flowrl.errors import UserError
from flowrl.utils.distributed import Runtime


@pytest.fixture(scope="module")
def runtime():
    return Runtime(device="cpu")


def test_the_gradient_scaler_goes_on_where_it_was(runtime, monkeypatch):
    assert runtime.state_dict() == {}  # fp32 has none
    for scale in (8.0, 2.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        monkeypatch.setattr(runtime.accelerator, "scaler", scaler)
        if scale == 8.0:
            state = runtime.state_dict()
    runtime.load_state_dict(state)
    assert scaler.get_scale() == 8.0


def test_clipping_shortens_a_long_gradient_and_returns_its_length_before(runtime):
    weight = torch.nn.Parameter(torch.zeros(2))
    for limit, expected in ((1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])):
        weight.grad = torch.tensor([3.0, 4.0])
        assert runtime.clip_gradients([weight], limit) == pytest.approx(5.0)
        torch.testing.assert_close(weight.grad, torch.tensor(expected), rtol=1e-5, atol=0)


def test_what_a_launcher_asks_for_in_vain_is_refused(monkeypatch):
    for variable, value, words in (
        ("ACCELERATE_USE_FSDP", "true", "asks for FSDP"),
        ("WORLD_SIZE", "2", "started 2 processes, but accelerate sees a single one"),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=words):
            patch.setenv(variable, value)
            Runtime(device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_an_error_and_not_a_slow_run():
    with pytest.raises(UserError, match="pipeline.device is cuda"):
        Runtime(device="cuda")
