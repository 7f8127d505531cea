"""The journal of a run: nothing in it is lost or changed unnoticed."""

from flowrl.training.ledger import Ledger


def test_events_come_back_in_order_and_from_a_moved_folder(tmp_path):
    ledger = Ledger(tmp_path / "a")
    (tmp_path / "a").mkdir()
    assert ledger.events() == [] and ledger.last("stop") is None
    ledger.append("start", flowrl="1", step=None, recipe={}, facts={}, changed={})
    ledger.append("checkpoint", step=1, digests={})
    (tmp_path / "a").rename(tmp_path / "b")
    again = Ledger(tmp_path / "b")
    assert again.events() == ledger.events()
    again.append("resume", flowrl="1", step=1, recipe={}, facts={}, changed={})
    assert again.last("checkpoint")["step"] == 1
