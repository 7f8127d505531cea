"""A forest knows who descends from whom; rows are taken, dealt and cut without loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trajectory import Conditioning, Transitions, Tree


def branching_tree() -> Tree:
    """Two roots; the first branches into two, the second of these again into two.

    0 -> 2 -> 5      leaves 5, 6, 7, 8
      -> 3 -> 6, 7
    1 -> 4 -> 8
    """
    parent = torch.tensor([-1, -1, 0, 0, 1, 2, 3, 3, 4])
    step = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    return Tree(
        x=torch.arange(9.0)[:, None],
        step=step,
        parent=parent,
        prompt=torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1]),
        leaf=torch.tensor([5, 6, 7, 8]),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        g=torch.tensor([0.7, 0.0]),
        edge=torch.tensor([2, 3, 4]),
        mean_old=torch.zeros(3, 1),
    )


def transitions(groups: list[int]) -> Transitions:
    n = len(groups)
    return Transitions(
        x=torch.arange(float(n))[:, None],
        x_next=torch.arange(float(n))[:, None] + 100,
        mean_old=torch.arange(float(n))[:, None] + 200,
        step=torch.zeros(n).long(),
        advantage=torch.arange(float(n)) + 300,
        prompt=torch.tensor(groups).long(),
        group=torch.tensor(groups).long(),
        sigmas=torch.tensor([1.0, 0.0]),
        g=torch.tensor([0.5]),
        cond=Conditioning(tensors={"a": torch.zeros(max(groups, default=0) + 1, 2)}),
    )


def test_leaves_below_a_branch_are_those_of_all_its_children():
    below = branching_tree().leaves_below().int().tolist()
    assert below == [
        [1, 1, 1, 0], [0, 0, 0, 1],
        [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1],
        [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1],
    ]  # fmt: skip


@given(groups=st.lists(st.integers(0, 5), max_size=20), count=st.integers(1, 4))
def test_updates_hold_every_row_once_and_never_cut_a_group(groups, count):
    parts = transitions(groups).updates(count)
    assert len(parts) == count
    assert sorted(x for part in parts for x in part.x[:, 0].tolist()) == list(range(len(groups)))
    owner = [{g for g in part.group.tolist()} for part in parts]
    assert sum(map(len, owner)) == len(set(groups))


def test_updates_are_dealt_by_the_number_of_the_group_alone():
    """So that processes that hold different groups agree on which update a group belongs to."""
    assert [p.group.tolist() for p in transitions([4, 5, 6, 7]).updates(2)] == [[4, 6], [5, 7]]


@given(groups=st.lists(st.integers(0, 3), max_size=20), size=st.integers(1, 7))
def test_chunks_are_the_rows_in_order_and_none_is_empty(groups, size):
    chunks = list(transitions(groups).chunks(size))
    assert [x for c in chunks for x in c.x[:, 0].tolist()] == list(range(len(groups)))
    assert all(0 < len(c) <= size for c in chunks)


def test_taking_rows_keeps_the_fields_of_a_row_together():
    part = transitions([0, 0, 1, 1]).take(torch.tensor([3, 1]))
    assert part.x[:, 0].tolist() == [3, 1] and part.x_next[:, 0].tolist() == [103, 101]
    assert part.mean_old[:, 0].tolist() == [203, 201]
    assert part.advantage.tolist() == [303, 301]
    assert part.group.tolist() == [1, 0]
    mask = torch.tensor([False, True, False, True])
    assert transitions([0, 0, 1, 1]).take(mask).x[:, 0].tolist() == [1, 3]


def test_conditioning_is_gathered_and_joined_row_by_row():
    cond = Conditioning(tensors={"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3.0)})
    joined = Conditioning.cat([cond, cond.take(torch.tensor([2, 0]))])
    assert len(joined) == 5
    assert joined.tensors["b"].tolist() == [0, 1, 2, 2, 0]
    assert torch.equal(joined.tensors["a"][3], cond.tensors["a"][2])


@pytest.mark.parametrize("field", ["x", "prompt"])
def test_data_cannot_be_changed_in_place_by_name(field):
    with pytest.raises(AttributeError):
        setattr(branching_tree(), field, torch.zeros(1))
