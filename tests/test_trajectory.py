"""A forest knows who descends from whom; rows are taken, dealt and cut without loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.functional.batches import ALONE
from flowrl.trajectory import Conditioning, Transitions, Tree, transitions


def two_trees() -> Tree:
    """Two trees of one shape:  0 -> 1 -> 3, 4   leaves 3, 4, 5
                                  -> 2 -> 5
    Node n of tree r holds 10 r + n; the edges to 1, 2, 3 and 4 are trained.
    """
    return Tree(
        x=torch.tensor([[0.0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]])[..., None],
        prompt=torch.tensor([0, 1]),
        log_prob=torch.zeros(2, 6),
        mean_old=torch.tensor([[101.0, 102, 103, 104], [111, 112, 113, 114]])[..., None],
        step=torch.tensor([0, 1, 1, 2, 2, 2]),
        parent=torch.tensor([-1, 0, 0, 1, 1, 2]),
        move=torch.tensor([-1, 0, 0, 1, 1, 1]),
        g=torch.tensor([0.0, 0.7, 0.7, 0.3, 0.3, 0.0]),
        leaf=torch.tensor([3, 4, 5]),
        noisy=torch.tensor([1, 2, 3, 4]),
        edge=torch.tensor([1, 2, 3, 4]),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        forwards=6,
    )


def gathered(keep: torch.Tensor, advantage: torch.Tensor) -> Transitions:
    cond = Conditioning(tensors={"a": torch.tensor([[50.0], [60]])})
    return transitions(two_trees(), advantage, keep.bool(), torch.tensor([6, 7]), cond)


def test_edges_stand_under_their_parents_and_leaves_tree_by_tree():
    advantage = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    batch = gathered(torch.ones(2, 4), advantage)
    assert batch.x[:, 0].tolist() == [0, 10, 1, 11]
    assert batch.group.tolist() == [6, 7, 6, 7] and batch.prompt.tolist() == [0, 1, 0, 1]
    assert batch.sigma.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert batch.parent.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.x_next[:, 0].tolist() == [1, 2, 11, 12, 3, 4, 13, 14]
    assert batch.mean_old[:, 0].tolist() == [101, 102, 111, 112, 103, 104, 113, 114]
    assert batch.advantage.tolist() == [1, 2, 5, 6, 3, 4, 7, 8]
    assert batch.g.tolist() == pytest.approx([0.7] * 4 + [0.3] * 4)
    assert batch.sigma_next.tolist() == [0.5] * 4 + [0.0] * 4
    assert batch.step.tolist() == [0] * 4 + [1] * 4
    # A parent without kept edges costs no forward.
    batch = gathered(torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]]), advantage)
    assert batch.x[:, 0].tolist() == [0, 11]
    assert batch.x_next[:, 0].tolist() == [2, 14] and batch.parent.tolist() == [0, 1]
    assert len(gathered(torch.zeros(2, 4), advantage)) == 0
    # Metrics count forwards and the edges without advantage.
    advantage = torch.tensor([[0.0, 2, 3, 0], [5, 0, 7, 8]])
    batch = gathered(advantage, advantage)
    metrics = {name: value.item() for name, value in batch.metrics().items()}
    assert metrics == {"tree/train_forwards": 4, "tree/no_advantage": 3 / 8}
    # Leaves come tree by tree with their prompts.
    assert two_trees().leaves()[:, 0].tolist() == [3, 4, 5, 13, 14, 15]
    assert two_trees().prompt_of_leaves().tolist() == [0, 0, 0, 1, 1, 1]


def rows(groups: list[int], children: int = 1) -> Transitions:
    """A parent for each group number, with so many edges."""
    n = len(groups)
    parent = torch.arange(n).repeat_interleave(children)
    edges = len(parent)
    return Transitions(
        latents=torch.cat([torch.arange(float(n)), torch.arange(float(edges)) + 100])[:, None],
        means=torch.arange(float(edges))[:, None] + 200,
        node=torch.arange(n),
        sigma=torch.ones(n),
        prompt=torch.tensor(groups).long(),
        group=torch.tensor(groups).long(),
        parent=parent,
        child=torch.arange(edges) + n,
        edge=torch.arange(edges),
        sigma_next=torch.zeros(edges),
        g=torch.full((edges,), 0.5),
        advantage=torch.arange(float(edges)) + 300,
        weight=torch.arange(float(edges)) + 400,
        pull=torch.arange(float(edges)) + 500,
        step=torch.zeros(edges).long(),
        cond=Conditioning(tensors={"a": torch.zeros(max(groups, default=0) + 1, 2)}),
        no_advantage=0.0,
    )


@given(groups=st.lists(st.integers(0, 5), max_size=20), count=st.integers(1, 4))
def test_updates_hold_every_row_once_and_never_cut_a_group(groups, count):
    parts = rows(groups).updates(count)
    assert len(parts) == count
    assert sorted(x for part in parts for x in part.x[:, 0].tolist()) == list(range(len(groups)))
    owner = [{g for g in part.group.tolist()} for part in parts]
    assert sum(map(len, owner)) == len(set(groups))


def test_rows_are_dealt_by_group_and_taken_with_their_edges():
    # Updates are dealt by the number of the group alone. So that processes that hold different
    # groups agree on which update a group belongs to.
    assert [p.group.tolist() for p in rows([4, 5, 6, 7]).updates(2)] == [[4, 6], [5, 7]]
    # Taking parents takes their edges.
    part = rows([0, 0, 1, 1], children=2).take(torch.tensor([1, 3]))
    assert part.x[:, 0].tolist() == [1, 3] and part.group.tolist() == [0, 1]
    assert part.parent.tolist() == [0, 0, 1, 1]
    assert part.x_next[:, 0].tolist() == [102, 103, 106, 107]
    assert part.mean_old[:, 0].tolist() == [202, 203, 206, 207]
    assert part.advantage.tolist() == [302, 303, 306, 307]
    assert part.weight.tolist() == [402, 403, 406, 407]
    assert part.pull.tolist() == [502, 503, 506, 507]
    # Conditioning is gathered and joined row by row.
    cond = Conditioning(tensors={"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3.0)})
    joined = Conditioning.cat([cond, cond.take(torch.tensor([2, 0]))])
    assert len(joined) == 5
    assert joined.tensors["b"].tolist() == [0, 1, 2, 2, 0]
    assert torch.equal(joined.tensors["a"][3], cond.tensors["a"][2])


@given(
    groups=st.lists(st.integers(0, 3), max_size=20),
    size=st.integers(1, 7),
    children=st.integers(1, 3),
)
def test_chunks_are_the_parents_in_order_with_all_their_edges(groups, size, children):
    whole = rows(groups, children)
    chunks = list(ALONE.micro_batches(whole, size))
    assert [x for c in chunks for x in c.x[:, 0].tolist()] == list(range(len(groups)))
    assert [a for c in chunks for a in c.advantage.tolist()] == whole.advantage.tolist()
    assert all(0 < len(c.x) <= size and len(c) == children * len(c.x) for c in chunks)
    for chunk in chunks:
        assert torch.equal(chunk.parent, torch.arange(len(chunk.x)).repeat_interleave(children))
