"""Stores that the policy draws anew, before and after a run was stopped."""

import pytest
import torch
from toy_dataset import numbers, plain_scores, read, source, write

from flowrl.offline.writer import Refresher


class Policy:
    """Writes a store whose latents tell when; `stop` breaks off after its first shard."""

    every, path, steps = 4, Refresher.path, Refresher.steps

    def __init__(self):
        self.drawn, self.found, self.stop = [], [], False

    def generate(self, iteration):
        folder = self.path(iteration)
        self.drawn.append(iteration)
        self.found.append(folder.exists())
        store = write(folder, plain_scores(), first=1000.0 * iteration)
        if self.stop:
            for path in sorted(folder.glob("shards/*"))[1:]:
                path.unlink()
            raise KeyboardInterrupt
        return store

    def finished(self, iteration):
        return len([*self.path(iteration).glob("shards/*")]) == 4


def refreshed(store, policy, folder):
    policy.folder = folder
    return source(store, refresher=policy)


def drawn_at(rollout):
    return int(rollout.tree.leaves()[0, 0, 0, 0]) // 1000


def test_the_store_is_replaced_every_so_often(store, tmp_path):
    policy = Policy()
    groups = refreshed(store, policy, tmp_path / "stores")
    assert [drawn_at(read(groups, i)) for i in range(10)] == [0] * 4 + [4] * 4 + [8] * 2
    assert policy.drawn == [4, 8]
    assert sorted(p.name for p in (tmp_path / "stores").iterdir()) == ["step-000004", "step-000008"]


def test_a_resumed_session_goes_on_with_the_newest_store_it_had(store, tmp_path):
    policy = Policy()
    first = refreshed(store, policy, tmp_path / "stores")
    straight = [numbers(read(first, i)) for i in range(10)]
    policy.drawn.clear()
    second = refreshed(store, policy, tmp_path / "stores")
    assert torch.equal(numbers(read(second, 6)), straight[6])
    assert not (tmp_path / "stores" / "step-000008").exists()  # of a policy that is no more
    read(second, 7)
    assert torch.equal(numbers(read(second, 8)), straight[8])
    assert policy.drawn == [8]


def test_an_unfinished_store_is_kept_for_the_policy_that_began_it(store, tmp_path):
    for resumed, kept in ((4, True), (2, False), (6, False)):
        policy, folder = Policy(), tmp_path / f"resumed at {resumed}"
        policy.stop = True
        with pytest.raises(KeyboardInterrupt):
            read(refreshed(store, policy, folder), 4)
        policy.stop, policy.found = False, []
        again = refreshed(store, policy, folder)
        assert drawn_at(read(again, resumed)) == (4 if resumed == 4 else 0)
        if resumed == 2:
            assert drawn_at(read(again, 4)) == 4
        assert policy.found == ([kept] if resumed <= 4 else [])
