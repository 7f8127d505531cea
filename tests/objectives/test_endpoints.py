import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.functional.batches import ALONE
from flowrl.objectives.batches import Endpoints
from flowrl.trajectory import Conditioning


def made(group: list[int], compared="group", forwards: int = 1) -> Endpoints:
    n = len(group)
    return Endpoints(
        x0=torch.arange(n * 2.0).view(n, 2), prompt=torch.tensor(group), group=torch.tensor(group),
        image=torch.arange(n), reward=torch.arange(float(n)), signal=torch.ones(n),
        pull=torch.ones(n),
        sigmas=torch.linspace(1, 0, 3),
        cond=Conditioning(tensors={"a": torch.zeros(max(group, default=0) + 1, 1)}),
        forwards=forwards, compared=compared, seed=7, left_out={"invalid": 0.25},
    )  # fmt: skip


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def side_by_side(counts: list[int]) -> list[int]:
    return [name for name, count in enumerate(counts) for _ in range(count)]


@given(counts=sizes, size=st.integers(1, 20), forwards=st.integers(1, 3))
def test_chunks_hold_every_image_once_and_never_cut_a_group(counts, size, forwards):
    batch = made(side_by_side(counts), forwards=forwards)
    parts = list(ALONE.micro_batches(batch, size))
    assert torch.cat([part.image for part in parts]).tolist() == list(range(len(batch)))
    for part in parts:
        assert len(part) * forwards <= size or len(part.group.unique()) == 1
        for name in part.group.unique():
            assert (part.group == name).sum() == counts[int(name)]


def test_what_an_update_compares_stays_whole_and_an_empty_batch_has_no_chunks():
    batch = made(side_by_side([3, 3]), compared="update")
    assert [len(part) for part in ALONE.micro_batches(batch, 2)] == [6]
    for compared in ["image", "group", "update"]:
        empty = made([0], compared=compared).take(torch.empty(0, dtype=torch.long))
        assert list(ALONE.micro_batches(empty, 4)) == []


@given(counts=sizes, updates=st.integers(1, 4))
def test_updates_take_whole_groups_and_draw_anew(counts, updates):
    parts = made(side_by_side(counts)).updates(updates)
    assert sum(len(part) for part in parts) == sum(counts)
    assert len({part.seed for part in parts}) == updates
    names = [set(part.group.tolist()) for part in parts]
    assert all(a.isdisjoint(b) for i, a in enumerate(names) for b in names[:i])
