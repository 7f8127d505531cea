"""The reference's errors, found again under other rollouts and in other sessions."""

from dataclasses import replace

import torch
from toy_dataset import GROUPS, SIZE, numbers, plain_scores, read, source, write

from flowrl.offline.source import Caching


def test_errors_are_found_again_under_the_same_key_alone(store, tmp_path):
    caching = Caching(draws=3, path=tmp_path / "reference", key="as configured")
    groups = source(store, caching=caching)
    rollout = read(groups, 0)
    image, draws = torch.tensor([5, 0]), torch.tensor([[2, 0], [1, 2]])
    errors = torch.tensor([[0.25, 0.5], [1.0, 2.0]])
    assert rollout.known is not None and rollout.known.pool == 3
    assert bool(rollout.known.get(image, draws).isnan().all())
    rollout.known.put(image, draws, errors)
    assert torch.equal(rollout.known.image, numbers(rollout))
    assert torch.equal(rollout.known.group, numbers(rollout) // SIZE)
    groups.save_state()
    image = int(numbers(rollout)[5])
    again = source(store, caching=caching, group_size=SIZE, prompts=GROUPS)
    other = read(again, 9)
    place = (numbers(other) == image).nonzero().flatten()
    found = other.known.get(place, torch.tensor([[0, 1, 2]]))[0]
    assert found[[0, 2]].tolist() == [0.5, 0.25] and bool(found[1].isnan())
    caching = Caching(draws=3, path=tmp_path / "reference", key="as configured")
    groups = source(store, caching=caching)
    groups.known.table.fill_(1.0)
    groups.save_state()
    assert not bool(source(store, caching=caching).known.table.isnan().any())
    other = write(tmp_path / "other", plain_scores() + 1)
    for given, changes in ((other, {}), (store, {"key": "else"}), (store, {"draws": 4})):
        fresh = source(given, caching=replace(caching, **changes))
        assert bool(fresh.known.table.isnan().all())
