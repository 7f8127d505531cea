import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.functional.groups import (
    best_and_worst,
    best_of_group,
    by_group,
    groups_of,
    lone,
    ranks,
    undecided,
)

RAGGED = torch.tensor([7, 2, 7, 5, 2, 7])
REWARD = torch.tensor([1.0, 3.0, 4.0, 0.0, 3.0, 4.0])
KEYS = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.9, 0.8])


@st.composite
def grouped(draw):
    names = draw(st.lists(st.sampled_from([-3, 0, 4, 900]), min_size=1, max_size=12))
    rewards = draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
    keys = draw(st.permutations(range(len(names))))
    return torch.tensor(rewards).double(), torch.tensor(names), torch.tensor(keys).double()


def test_a_function_of_a_groups_rows_is_put_back_in_their_order():
    assert [rows.tolist() for rows in groups_of(RAGGED)] == [[1, 4], [3], [0, 2, 5]]
    assert by_group(RAGGED, lambda rows: rows).tolist() == list(range(6))
    assert by_group(RAGGED, lambda rows: rows.sum()).tolist() == [7, 5, 7, 3, 5, 7]
    assert len(by_group(RAGGED[:0], lambda rows: rows.max())) == 0


@given(case=grouped(), seed=st.integers(0, 99))
def test_rows_are_best_undecided_or_lone_by_the_rows_of_their_group(case, seed):
    reward, group, _ = case
    valid = torch.rand(len(group), generator=torch.Generator().manual_seed(seed)) < 0.5
    rewards = [reward[group == g] for g in group]
    best = [bool(r == others.max()) for r, others in zip(reward, rewards, strict=True)]
    assert best_of_group(reward, group).tolist() == best  # all of them when tied
    assert undecided(reward, group).tolist() == [len(others.unique()) == 1 for others in rewards]
    alone = [bool(v and valid[group == g].sum() == 1) for v, g in zip(valid, group, strict=True)]
    assert lone(valid, group).tolist() == alone


@given(case=grouped())
def test_pairs_are_a_best_and_a_worst_row_of_each_decided_group(case):
    reward, group, key = case
    winner, loser = best_and_worst(reward, group, key)
    decided = group[~undecided(reward, group)].unique()
    assert torch.equal(group[winner], decided) and torch.equal(group[loser], decided)
    for win, lose in zip(winner.tolist(), loser.tolist(), strict=True):
        members = group == group[win]
        assert reward[win] == reward[members].max() and reward[lose] == reward[members].min()
        assert key[win] == key[members & (reward == reward[win])].max()
        assert key[lose] == key[members & (reward == reward[lose])].max()


@given(case=grouped())
def test_a_rank_is_the_share_of_the_other_rows_below_and_half_of_the_equal_ones(case):
    reward, group, _ = case
    for i, rank in enumerate(ranks(reward, group).tolist()):
        rivals = [reward[j] for j in range(len(group)) if group[j] == group[i] and j != i]
        points = [float(r < reward[i]) + (r == reward[i]).item() / 2 for r in rivals]
        assert rank == pytest.approx(sum(points) / max(len(rivals), 1), abs=1e-6)


def test_a_missing_reward_is_no_rank():
    for bad in [torch.nan, torch.inf, -torch.inf]:
        reward = REWARD.clone()
        reward[3] = bad
        for call in (best_of_group, undecided, lambda r, g: best_and_worst(r, g, KEYS)):
            with pytest.raises(ValueError, match="1 of 6 rewards"):
                call(reward, RAGGED)
