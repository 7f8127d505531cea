"""A vote that was cast is there, whatever happens to the program."""

import subprocess
import sys

import pytest
from PIL import Image

from flowrl.errors import UserError
from flowrl.offline.pairs import read_pairs
from flowrl.voting.ballot import FILE, Ballot, Vote, write_pairs


def vote(choice, number=0):
    return Vote(prompt="a cat", first=f"{number}.png", second="b.png", choice=choice)


def test_votes_are_read_back_and_the_last_can_be_taken_back(tmp_path):
    ballot = Ballot(tmp_path)
    for number, choice in enumerate(("first", "second", "tie", "skip")):
        ballot.cast(vote(choice, number))
    assert ballot.undo() == vote("skip", 3)
    again = Ballot(tmp_path)
    assert again.votes == ballot.votes and len(again.votes) == 3
    assert [v.preferred for v in again.votes] == [("0.png", "b.png"), ("b.png", "1.png"), None]
    assert len((tmp_path / FILE).read_text().splitlines()) == 5  # nothing is ever rewritten
    assert Ballot(tmp_path / "none").undo() is None


def test_a_killed_program_loses_no_vote_that_it_had_answered(tmp_path):
    program = """
import os, signal, sys
from pathlib import Path
from flowrl.voting.ballot import Ballot, Vote
ballot = Ballot(Path(sys.argv[1]))
for number in range(20):
    ballot.cast(Vote(prompt="a cat", first=f"{number}.png", second="b.png", choice="first"))
    print(number, flush=True)
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True)
    assert done.returncode == -9
    assert len(Ballot(tmp_path).votes) == len(done.stdout.split()) == 14


def test_pairs_that_are_written_are_read_as_any_others(tmp_path):
    for name in ("0.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    path = tmp_path / "out" / "pairs.jsonl"
    path.parent.mkdir()
    votes = [vote("first"), vote("tie"), vote("second")]
    assert write_pairs(votes, tmp_path, path) == 2
    pairs, _ = read_pairs(str(path))
    read = [(p.record.text, str(p.chosen)[-5:], str(p.rejected)[-5:]) for p in pairs]
    assert read == [("a cat", "0.png", "b.png"), ("a cat", "b.png", "0.png")]
    with pytest.raises(UserError, match="prefers an image"):
        write_pairs([vote("skip")], tmp_path, path)
