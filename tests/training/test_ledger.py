"""The journal of a run: nothing in it is lost or changed unnoticed."""

from flowrl.training.ledger import Ledger


def test_events_come_back_in_order_and_from_a_moved_folder(tmp_path):
    ledger = Ledger(tmp_path / "a")
    (tmp_path / "a").mkdir()
    assert ledger.events() == [] and ledger.last("stop") is None
    ledger.begin(version="1", recipe={}, facts={}, step=None, changed={})
    ledger.append("checkpoint", step=1, digests={})
    (tmp_path / "a").rename(tmp_path / "b")
    again = Ledger(tmp_path / "b")
    assert again.events() == ledger.events()
    again.begin(version="1", recipe={}, facts={}, step=1, changed={})
    assert again.last("checkpoint")["step"] == 1
