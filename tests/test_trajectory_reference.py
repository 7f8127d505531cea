"""Errors of the reference outlast a rollout, and processes tell each other theirs."""

import torch

from flowrl.trajectory import ReferenceErrors


class Two:
    """Two processes, of which the other one knows `theirs`."""

    world_size, is_main = 2, True

    def __init__(self, theirs):
        self.theirs = theirs

    def gather(self, rows):
        return torch.cat([rows, self.theirs])


def numbered(*rows):
    return torch.tensor(rows)


def test_errors_are_kept_in_one_table_and_shared_under_their_key(tmp_path):
    errors = ReferenceErrors.empty(5, 3, "key")
    first = errors.view(numbered(4, 2, 0), numbered(1, 1, 0))
    first.put(numbered(0, 2), numbered([2, 0], [1, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    second = errors.view(numbered(0, 4), numbered(0, 1))
    everything = numbered([0, 1, 2]).expand(2, -1)
    found = second.get(numbered(1, 0), everything)
    assert found.nan_to_num(-1).tolist() == [[2.0, -1.0, 1.0], [-1.0, 3.0, 4.0]]
    assert int(errors.table.isfinite().sum()) == 4 and errors.pool == 3
    errors = ReferenceErrors.empty(2, 2, "key")
    theirs = errors.table.clone()
    errors.table[0, 0], theirs[0, 0], theirs[1, 1] = 1.0, 5.0, 2.0
    errors.save(tmp_path / "file", Two(theirs))
    assert errors.table.nan_to_num(-1).tolist() == [[1.0, -1.0], [-1.0, 2.0]]
    again = ReferenceErrors.empty(2, 2, "key")
    assert again.load(tmp_path / "file")
    assert torch.equal(again.table.nan_to_num(-1), errors.table.nan_to_num(-1))
    errors = ReferenceErrors.empty(2, 2, "key")
    errors.table.fill_(1.0)
    errors.save(tmp_path / "file", Two(errors.table))
    for other in (ReferenceErrors.empty(2, 2, "other"), ReferenceErrors.empty(2, 3, "key")):
        assert not other.load(tmp_path / "file")
        assert bool(other.table.isnan().all())
    assert not errors.load(tmp_path / "none")
