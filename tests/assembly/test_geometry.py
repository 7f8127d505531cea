"""Shares of several GPUs: what they do together is the recipe's, whatever their number."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from flowrl.assembly.work_split import (
    IterationWork,
    check_split,
    deal,
    micro_batches,
    split_work,
    units,
)
from flowrl.errors import UserError
from flowrl.functional.batches import ALONE
from flowrl.objectives.batches import Endpoints
from flowrl.trajectory import Conditioning
from flowrl.utils.distributed import Runtime

BASE = IterationWork(
    prompts=8,
    roots=6,
    forwards=10,
    rows=1,
    row_forwards=4,
    micro_batch=16,
    updates=2,
)


@st.composite
def loads(draw) -> IterationWork:
    updates = draw(st.integers(1, 3))
    roots = draw(st.integers(1, 6))
    whole = draw(st.booleans())
    return IterationWork(
        prompts=updates * draw(st.integers(1, 6)),
        roots=roots,
        leaves=draw(st.integers(1, 3)),
        forwards=draw(st.integers(1, 20)),
        candidates=draw(st.sampled_from([0, roots, 2 * roots + 1])),
        candidate_forwards=draw(st.integers(1, 6)),
        whole_prompts=whole,
        whole_candidates=draw(st.booleans()),
        rows=draw(st.integers(1, 4)),
        group_rows=draw(st.sampled_from([None, 2])) if whole else None,
        row_forwards=draw(st.integers(1, 3)),
        together=draw(st.sampled_from(["image", "group"])) if whole else "image",
        micro_batch=draw(st.integers(1, 12)),
        updates=updates,
    )


@given(load=loads(), gpus=st.integers(1, 12))
def test_what_gpus_do_together_is_what_one_does_alone(load, gpus):
    assume(units(load) >= gpus)
    one, many = split_work(load, 1), split_work(load, gpus)
    assert many.gpus == gpus and many.update_rows == one.update_rows
    for what in ("trees", "images", "forwards", "candidates"):
        together = sum(getattr(share, what) for share in many.shares)
        assert together == getattr(one.shares[0], what), what
    assert one.shares[0].trees == load.prompts * load.roots
    assert one.shares[0].prompts == load.prompts
    if load.group_rows is None:
        assert sum(one.update_rows) == load.prompts * load.roots * load.rows


@given(load=loads(), gpus=st.integers(1, 12))
def test_trees_are_dealt_as_training_deals_them(load, gpus):
    unit = load.roots if load.whole_prompts else 1
    total = load.prompts * load.roots
    for rank, dealt in enumerate(deal(total, gpus, unit)):
        runtime = SimpleNamespace(world_size=gpus, rank=rank)
        assert Runtime.local_rows(runtime, total, unit).tolist() == list(dealt)  # type: ignore[arg-type]


@given(
    groups=st.lists(st.integers(1, 5), max_size=6),
    draws=st.integers(1, 3),
    size=st.integers(1, 14),
    together=st.sampled_from(["image", "group", "update"]),
)
def test_micro_batches_are_those_of_a_batch(groups, draws, size, together):
    load = replace(BASE, micro_batch=size, row_forwards=draws, together=together)
    group = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups).long())
    rows = torch.zeros(len(group))
    batch = Endpoints(
        x0=rows, prompt=group, group=group, image=group, reward=rows, signal=rows, pull=rows,
        sigmas=rows, cond=Conditioning(tensors={}), forwards=draws, compared=together, seed=0,
        left_out={},
    )  # fmt: skip
    assert micro_batches(load, groups) == [len(chunk) for chunk in ALONE.micro_batches(batch, size)]


@given(load=loads(), gpus=st.integers(1, 12))
def test_what_is_suggested_keeps_every_gpu_busy(load, gpus):
    assert split_work(replace(load, prompts=gpus * load.updates * load.prompts), gpus).even


@given(load=loads(), gpus=st.integers(1, 40))
def test_a_refusal_names_numbers_that_are_not_refused(load, gpus):
    try:
        check_split(load, gpus)
    except UserError as error:
        told = str(error)
        prompts = int(told.partition("rollout.prompts_per_iteration=")[2].partition(",")[0])
        check_split(replace(load, prompts=prompts), gpus)
        check_split(load, int(told.rpartition("or ")[2].partition(" ")[0]))
    else:
        assert all(share.trees for share in split_work(load, gpus).shares)


def test_shares_that_cannot_be_dealt_are_refused():
    with pytest.raises(UserError, match="got 0 GPUs"):
        check_split(BASE, 0)
