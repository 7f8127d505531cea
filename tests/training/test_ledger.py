"""The journal of a run: nothing in it is lost or changed unnoticed."""

from flowrl.training.ledger import FILE, Ledger


def test_events_come_back_in_order_and_from_a_moved_folder(tmp_path):
    ledger = Ledger(tmp_path / "a")
    (tmp_path / "a").mkdir()
    assert ledger.events() == [] and ledger.run_id is None and ledger.last("stop") is None
    ledger.begin(version="1", recipe={}, facts={}, step=None, changed={}, run_id=None)
    ledger.append("checkpoint", step=1, digests={})
    (tmp_path / "a").rename(tmp_path / "b")
    again = Ledger(tmp_path / "b")
    assert again.events() == ledger.events() and again.run_id == ledger.run_id is not None
    again.begin(version="1", recipe={}, facts={}, step=1, changed={}, run_id="another")
    assert again.run_id == ledger.run_id and again.last("checkpoint")["step"] == 1


def test_a_line_that_was_cut_short_is_no_event_and_the_next_stands_below_it(tmp_path, caplog):
    ledger = Ledger(tmp_path)
    for step in (1, 2):
        ledger.append("checkpoint", step=step)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-9])
    Ledger(tmp_path).append("checkpoint", step=3)
    assert [event["step"] for event in Ledger(tmp_path).events()] == [1, 3]
    assert "line 2" in caplog.text


def test_a_changed_line_is_no_event(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.append("stop", step=1)
    path = tmp_path / FILE
    path.write_text(path.read_text().replace('"step": 1', '"step": 7'))
    assert Ledger(tmp_path).events() == []
