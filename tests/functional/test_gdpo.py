"""Several rewards as one: GDPO."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.normalise import combine_gdpo, normalise, population

nan = math.nan
SINGLE = {"parent": torch.tensor([-1]), "step": torch.tensor([0])}  # a tree of one node


@st.composite
def several_rewards(draw):
    n, k = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    entry = st.one_of(st.integers(-9, 9).map(float), st.just(nan))
    scores = draw(st.lists(entry, min_size=n * k, max_size=n * k))
    group = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    weights = draw(st.lists(st.floats(0.1, 2), min_size=k, max_size=k))
    return torch.tensor(scores).double().view(n, k), torch.tensor(weights), torch.tensor(group)


@given(case=several_rewards(), ddof=st.integers(0, 1))
def test_gdpo_is_the_weighted_sum_of_z_scores_that_apply(case, ddof):
    scores, weights, group = case
    total = combine_gdpo(scores, weights, group, ddof=ddof)
    for row in range(len(scores)):
        wanted = 0.0
        for k, weight in enumerate(weights.double().tolist()):
            members = scores[group == group[row], k].numpy()
            members = members[~np.isnan(members)]
            if not scores[row, k].isnan() and len(members) > 1:
                z = (scores[row, k].item() - members.mean()) / (members.std(ddof=ddof) + 1e-4)
                wanted += weight * z
        if bool(scores[row].isnan().all()):
            wanted = nan
        assert total[row].item() == pytest.approx(wanted, abs=1e-9, nan_ok=True)


@given(case=several_rewards(), factor=st.sampled_from([0.5, 3.0, 100.0]), shift=st.integers(-9, 9))
def test_gdpo_does_not_depend_on_the_unit_or_the_zero_of_any_single_reward(case, factor, shift):
    scores, weights, group = case
    before = combine_gdpo(scores, weights, group, eps=1e-10)
    scores[:, 0] = factor * scores[:, 0] + shift
    after = combine_gdpo(scores, weights, group, eps=1e-10)
    assert_close(after, before, rtol=0, atol=1e-7, equal_nan=True)


@given(case=several_rewards())
def test_gdpo_sums_to_zero_in_every_group_and_still_does_after_the_batch_scale(case):
    scores, weights, group = case
    total = combine_gdpo(scores, weights, group)
    one = population("prompt", group=group, **SINGLE)
    final = normalise(total[:, None], one, scale="global", ddof=1)[:, 0]
    for name in group.unique():
        assert abs(total[group == name].nansum().item()) < 1e-9
        assert abs(final[group == name].sum().item()) < 1e-6
