"""Journals: every changed byte is noticed, and damage is named by its line."""

import random

import pytest

from flowrl.training.ledger import FILE as LEDGER
from flowrl.training.ledger import Ledger
from flowrl.training.tracking import FILE as METRICS
from flowrl.training.tracking import Report, read_metrics
from flowrl.utils.journal import append_line, read_lines, seal_line
from flowrl.voting.ballot import FILE as BALLOT
from flowrl.voting.ballot import Ballot, Vote


def write_ballot(folder):
    for number in range(4):
        vote = Vote(prompt=f"a cät {number}", first=f"{number}.png", second="b.png", choice="first")
        Ballot(folder).cast(vote)


def write_metrics(folder):
    with Report(folder, trackers=[]) as report:
        for step in range(4):
            report.log(step, {"reward/mean": step / 7, "loss": float("nan")})


def write_ledger(folder):
    for step in range(4):
        Ledger(folder).append("checkpoint", step=step)


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        (BALLOT, write_ballot, lambda folder: list(Ballot(folder).votes)),
        (METRICS, write_metrics, read_metrics),
        (LEDGER, write_ledger, lambda folder: Ledger(folder).events()),
    ],
)
def test_a_flipped_byte_anywhere_is_named_and_spoils_its_lines_alone(
    name, write, read, tmp_path, caplog
):
    write(tmp_path)
    path = tmp_path / name
    data, whole = path.read_bytes(), read(tmp_path)
    draw = random.Random(0)
    for place in range(len(data)):
        changed = data[place] ^ draw.randrange(1, 256)
        path.write_bytes(data[:place] + bytes([changed]) + data[place + 1 :])
        caplog.clear()
        rows = read(tmp_path)
        number = data[:place].count(b"\n") + 1
        assert name in caplog.text and f"line {number}" in caplog.text, (place, changed)
        assert len(whole) - 2 <= len(rows) < len(whole), place
        assert all(row in whole for row in rows), place


def test_the_next_line_begins_below_one_that_was_cut_off(tmp_path):
    path = tmp_path / "a.jsonl"
    append_line(path, {"a": 1})
    with open(path, "ab") as file:
        file.write(seal_line({"a": 2})[:-9])
    append_line(path, {"a": 3})
    lines = read_lines(path)
    assert lines.entries == [{"a": 1}, {"a": 3}] and lines.damaged == [2]
    assert read_lines(tmp_path / "none").entries == []
