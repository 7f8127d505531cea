"""Batches of images and of chains: what they hold, and how they are cut."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_rollout import rollout_of, sampled

from flowrl.functional.batches import ALONE
from flowrl.objectives.batches import Endpoints, Trajectories
from flowrl.trajectory import Conditioning, Rollout
from flowrl.trees.plan import Step, TreePlan

# --- images --------------------------------------------------------------------------------------


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


# --- chains --------------------------------------------------------------------------------------


PROMPTS, GROUP, STEPS = 3, 2, 4


def velocity(x, sigma, prompt):
    return torch.sin(x) + prompt[:, None]


def rollout(dtype=torch.float32) -> Rollout:
    tree = sampled(velocity, TreePlan(GROUP, (Step(),) * STEPS), PROMPTS, dtype)
    reward = torch.arange(float(PROMPTS * GROUP))
    cond = Conditioning(tensors={"c": torch.eye(PROMPTS)})
    return rollout_of(tree, reward, cond, prompts=("a", "b", "c"), seed=5)


def test_a_chain_holds_its_states_and_velocities_in_32_bits():
    # A chain holds all states and the velocities between them.
    batch = Trajectories.from_rollout(rollout())
    assert batch.x.shape == (PROMPTS * GROUP, STEPS + 1, 3) and batch.steps == STEPS
    assert torch.equal(batch.x0, batch.x[:, -1]) and batch.seed == 5
    row, step = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 2])
    x = batch.at(row, step)
    expected = velocity(x, None, batch.prompt[row])
    torch.testing.assert_close(batch.velocity(row, step), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(batch.sigma(step), torch.tensor([1.0, 0.25, 0.5]))
    assert torch.equal(batch.dt, torch.full((STEPS,), -0.25))
    # States of 16 bits are widened when they are used.
    batch = Trajectories.from_rollout(rollout(dtype=torch.bfloat16))
    row = torch.tensor([0])
    assert batch.x.dtype == torch.bfloat16
    assert {batch.x0.dtype, batch.at(row, row).dtype, batch.velocity(row, row).dtype} == {
        torch.float32
    }


def test_images_without_a_reward_and_of_other_processes_are_left_out():
    whole = rollout()
    reward = whole.reward.clone()
    reward[[1, 4]] = math.nan
    batch = Trajectories.from_rollout(replace(whole, reward=reward, valid=reward.isfinite()))
    assert batch.image.tolist() == [0, 2, 3, 5] and batch.group.tolist() == [0, 1, 1, 2]
    assert batch.metrics()["path/invalid"].item() == pytest.approx(1 / 3)
    assert batch.metrics()["path/chains"].item() == 4
    # A process takes its own chains under their numbers in the rollout.
    whole = rollout()
    own = torch.tensor([4, 1])
    t = whole.tree
    part = Trajectories.from_rollout(
        replace(whole, tree=replace(t, x=t.x[own], prompt=t.prompt[own]), trees=own)
    )
    assert part.image.tolist() == [1, 4] and part.group.tolist() == [0, 2]
    assert torch.equal(part.x, whole.tree.x[[1, 4]]) and part.prompt.tolist() == [0, 2]


def test_chunks_hold_whole_chains_and_updates_whole_groups():
    batch = Trajectories.from_rollout(rollout()).with_forwards(torch.tensor([1, 2, 2, 5, 1, 1]))
    sizes = [chunk.image.tolist() for chunk in ALONE.micro_batches(batch, 3)]
    assert sizes == [[0, 1], [2], [3], [4, 5]]
    assert batch.metrics()["tree/train_forwards"].item() == 12
    assert [len(c) for c in ALONE.micro_batches(batch, 100)] == [6]
    assert list(ALONE.micro_batches(batch.take(batch.chains[:0]), 3)) == []
    # Updates deal whole groups.
    parts = Trajectories.from_rollout(rollout()).updates(2)
    assert [p.group.tolist() for p in parts] == [[0, 0, 2, 2], [1, 1]]
    assert all(isinstance(p, Trajectories) and p.seed == 5 for p in parts)
