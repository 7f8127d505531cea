"""Preferences are read, never computed."""

import pytest
import torch
from flowrl_rewards.preference import Preference


def test_it_applies_to_no_image_and_says_why_it_has_no_scores():
    reward = Preference()
    assert not reward.applies("a star", {"preference": 1})
    with pytest.raises(RuntimeError, match="read from a store of pairs and cannot be computed"):
        reward(torch.zeros(1, 3, 8, 8), ["a star"], [{}])
