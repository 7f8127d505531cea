import pytest
import torch
from small_sizes import TARGETS, small
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.planning import activations
from flowrl.planning.activations import (
    ROWS,
    Forward,
    MemoryCounter,
    add_adapter,
    computed,
    transformer_inputs,
    transformer_peak,
)
from flowrl.planning.model_specs import build_network

NAMES = ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]
# Each further family takes seconds.
ALL = pytest.mark.parametrize(
    "name", [NAMES[2], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[:2])]
)
BF16 = torch.bfloat16


def peak(name, mode, *, rows=2, dtype=BF16, **options):
    return transformer_peak(forward(name, rows, dtype), mode, **options)


def forward(name, rows, dtype):
    return Forward(
        spec=small(name), rows=rows, height=64, width=64, text_tokens=None, dtype=dtype, rank=4,
        targets=TARGETS[small(name).family],
    )  # fmt: skip


@ALL
@pytest.mark.slow
def test_a_few_blocks_tell_the_peak_of_all_with_and_without_checkpoints_and_gradients(name):
    for checkpointing in (False, True):
        short = peak(name, "train", checkpointing=checkpointing)
        assert short == peak(name, "train", checkpointing=checkpointing, count_all=True)
    sampling = peak(name, "sample")
    assert sampling == peak(name, "sample", count_all=True)
    assert sampling < peak(name, "train", checkpointing=True) < peak(name, "train")


@pytest.mark.slow
def test_more_rows_bits_and_the_reference_take_more():
    name = "sana-1.6b"
    for checkpointing in (False, True):
        found = [peak(name, "train", rows=n, checkpointing=checkpointing) for n in (1, 2)]
        assert found == sorted(set(found))
    assert peak(name, "sample", rows=4) > 1.5 * peak(name, "sample")  # as with guidance
    assert peak(name, "train") < peak(name, "train", dtype=torch.float32)
    assert peak(name, "train_with_reference") >= peak(name, "train")


@ALL
def test_tensors_without_memory_are_counted_like_real_ones(name):
    """A forward and backward on the CPU, in fp32 and without fused kernels on both devices."""
    for checkpointing in (False, True):
        assert counted(name, "meta", checkpointing) == counted(name, "cpu", checkpointing)


def counted(name: str, device: str, checkpointing: bool) -> tuple[int, int]:
    size = small(name)
    network = build_network(size.transformer, size.config, torch.float32)
    add_adapter(network, 4, TARGETS[size.family])
    given = transformer_inputs(forward(name, 2, torch.float32))
    if device != "meta":
        network.to_empty(device=device)
        for tensor in (*network.parameters(), *network.buffers()):
            torch.nn.init.normal_(tensor.data, std=0.02)
        given = {k: torch.ones(t.shape, dtype=t.dtype) for k, t in given.items()}
    if checkpointing:
        network.enable_gradient_checkpointing()  # type: ignore[operator]
    outside = [*network.parameters(), *network.buffers(), *given.values()]
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            outside.append(parameter.grad)
    with MemoryCounter(outside) as tracker, sdpa_kernel(SDPBackend.MATH):
        loss = network(**given, return_dict=False)[0].float().square().mean()
        held = tracker.live
        loss.backward()
    return held, tracker.peak


@pytest.mark.parametrize("mode, checkpointing", [("sample", False), ("train", True)])
def test_one_recording_has_the_peaks_of_every_number_of_rows(mode, checkpointing):
    counts = (("num_layers", 2),)
    many = activations._recording(forward("sana-1.6b", ROWS, BF16), counts, mode, checkpointing)
    for rows in (2, 5):
        direct = activations._recording(
            forward("sana-1.6b", rows, BF16), counts, mode, checkpointing
        )
        assert many.peaks({ROWS: rows}) == direct.peaks({}) != many.peaks({})


def test_equal_calls_are_asked_once_and_answered_with_the_same_layout():
    aten = torch.ops.aten
    x = torch.empty(3, 4, 5, device="meta").transpose(0, 2)
    for func, args in (
        (aten.mul.Tensor, (x, 2.0)),
        (aten.native_layer_norm, (x, [3], None, None, 1e-5)),
        (aten.cat, ([x, x], 1)),
    ):
        overload = getattr(func, "default", func)
        torchs, first, again = (overload(*args), *(computed(overload, args, {}) for _ in "ab"))
        for one, other, same in zip(*map(as_tuple, (torchs, first, again)), strict=True):
            assert one.shape == other.shape == same.shape and one.dtype == same.dtype
            assert one.stride() == other.stride() == same.stride()
            assert same is not other and same.untyped_storage().nbytes() == one.nbytes
    assert computed(aten.mul.Tensor, (x, 2), {}).dtype == torch.float32
    whole = torch.empty(3, dtype=torch.long, device="meta")  # 2 and 2.0 are other arguments
    found = [computed(aten.mul.Tensor, (whole, factor), {}).dtype for factor in (2.0, 2, 2.0)]
    assert found == [torch.float32, torch.int64, torch.float32]


def test_views_and_changes_in_place_are_of_the_tensor_that_was_given():
    aten = torch.ops.aten
    x, y = (torch.empty(6, device="meta") for _ in "xy")
    for tensor in (x, y, x):
        for func, args in (
            (aten._unsafe_view.default, ([2, 3],)),  # whose schema says that it is new
            (aten.view.default, ([3, 2],)),
            (aten.add_.Tensor, (1.0,)),
        ):
            found = computed(func, (tensor, *args), {})
            assert found.untyped_storage()._cdata == tensor.untyped_storage()._cdata, func


def as_tuple(found) -> tuple:
    return found if isinstance(found, tuple) else (found,)
