import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from flowrl.cli.rewards import golden as command
from flowrl.errors import UserError
from flowrl.scoring import golden
from flowrl.scoring.golden import (
    compare_all,
    compare_one,
    measure,
    read_references,
    recorded,
    write_references,
)

SHIPPED = golden.shipped_references()
MINE = """
import math, torch

class Mine:
    name, version, shift = "mine", "mine-1", 0.0

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3)) + self.shift

class Mute(Mine):
    def __call__(self, images, prompts, metadata):
        return [math.nan] * len(images)

class Absent(Mine):
    def __call__(self, images, prompts, metadata):
        raise ImportError("Absent needs nothing_like_it, which is not installed")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The class of a reward "golden_mine:Mine", whose scores can be shifted."""
    (tmp_path / "golden_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    import golden_mine  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(golden_mine.Mine, "shift", 0.0)
    return golden_mine.Mine


NAME = "golden_mine:Mine"


def state(entry):
    return compare_one(NAME, entry).result.state


def test_scores_agree_within_a_share_of_the_largest(mine):
    # The same scores agree and others do not.
    entry = recorded(measure(NAME))
    assert state(entry) == "ok"
    mine.shift = 0.9 * entry["tolerance"]
    assert state(entry) == "ok"
    mine.shift = 1.1 * entry["tolerance"]
    found = compare_one(NAME, entry).result
    assert found.state == "problem"
    assert "expected" in found.detail and "torch" in found.remedy
    # The tolerance is a share of the largest score.
    measured = measure(NAME)
    largest = max(score for row in measured["trials"] for score in row["scores"])
    assert recorded(measured, 0.1)["tolerance"] == pytest.approx(0.1 * largest, rel=0.05)


def test_what_was_not_measured_is_never_compared(mine):
    assert state(None) == "missing"
    entry = recorded(measure(NAME))
    for changed in (
        entry | {"version": "mine-0"},
        entry | {"trials": [row | {"images": "0" * 16} for row in entry["trials"]]},
        entry | {"trials": entry["trials"][:-1]},
    ):
        found = compare_one(NAME, changed).result
        assert found.state == "missing" and "no reference score yet" in found.detail
    listed = {c.result.topic: c for c in compare_all([], {})}
    assert listed["ocr"].result.state == "missing" and listed["ocr"].measured is None
    # A reward that gives no score is not compared.
    entry = recorded(measure(NAME))
    for name in ("golden_mine:Mute", "golden_mine:Absent", "no_such_reward"):
        compared = compare_one(name, entry)
        assert compared.measured is None and compared.result.state != "ok"
    assert compare_one("golden_mine:Absent", entry).result.state == "missing"


def test_a_file_keeps_its_entries_and_a_damaged_one_is_named(mine, tmp_path):
    path = tmp_path / "golden.json"
    assert read_references(path) == {}
    entries = {NAME: recorded(measure(NAME))}
    write_references(path, entries)
    assert read_references(path) == entries and compare_all([], entries)[0].result.state == "ok"
    for text in ("{", "[1]", json.dumps({"a": {"version": "1"}})):
        path.write_text(text)
        with pytest.raises(UserError, match="golden.json is no file of reference scores"):
            read_references(path)


def test_every_reward_without_weights_has_a_shipped_value_that_holds_here():
    assert set(SHIPPED) == {
        "brightness", "compressibility", "diversity", "geneval", "incompressibility", "ocr",
        "similarity", "tiny_colors", "tiny_judge", "tiny_proxy", "tiny_quality",
    }  # fmt: skip
    for name, entry in SHIPPED.items():
        made_with = entry["made_with"]
        if name == "ocr" and any(version(p) != made_with[p] for p in ("rapidocr", "pillow")):
            continue  # the words are drawn by another Pillow, or read by another engine
        found = compare_one(name, entry).result
        assert found.state == "ok", found


def test_the_command_records_compares_and_never_passes_the_rest(mine, tmp_path, capsys):
    # The command never passes what it did not compare.
    path = tmp_path / "golden.json"
    with pytest.raises(UserError, match="There is no file"):
        command([NAME], file=path)
    write_references(path, {})
    with pytest.raises(UserError, match=f"were not compared: {NAME}"):
        command([NAME], file=path)
    with pytest.raises(UserError, match="were not compared: golden_mine:Absent"):
        command(["golden_mine:Absent"], record=True, file=path)
    assert read_references(path) == {}
    # The command records then compares and fails on a difference.
    path = tmp_path / "golden.json"
    command([NAME], record=True, file=path, tolerance=0.01)
    command([NAME], file=path)
    assert "scores agree" in capsys.readouterr().out
    mine.shift = 1.0
    with pytest.raises(UserError, match=f"do not score as recorded: {NAME}"):
        command([NAME], file=path)
    with pytest.raises(UserError, match="do not score as recorded"):
        command(file=path)


def test_recording_takes_what_has_no_reference_yet_and_the_file_can_be_added(
    mine, tmp_path, monkeypatch, capsys
):
    built_in = {"brightness": NAME, NAME: NAME, "golden_mine:Absent": "golden_mine:Absent"}
    monkeypatch.setattr(golden, "BUILT_IN", built_in)
    monkeypatch.chdir(tmp_path)
    command(record=True)
    out = capsys.readouterr().out
    assert "golden_mine:Absent" in out and "not installed" in out
    assert "add recorded-scores.json to rewards/golden/ in a pull request" in " ".join(out.split())
    assert list(read_references(golden.RECORDED)) == [NAME]  # brightness has one

    shipped = tmp_path / "golden.json"
    write_references(shipped, {})
    (tmp_path / "golden").mkdir()
    golden.RECORDED.rename(tmp_path / "golden" / "by-me.json")
    monkeypatch.setattr(golden, "PATH", shipped)
    assert list(golden.shipped_references()) == [NAME]
    command([NAME])
    monkeypatch.setattr(golden, "BUILT_IN", {"golden_mine:Absent": ""})
    with pytest.raises(UserError, match="were not compared"):
        command(record=True, file=tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_the_page_of_rewards_names_the_weights_without_reference_scores():
    from flowrl.planning.plan import REWARDS

    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"No reference scores yet: ([^.]*)\.", page)
    assert set(re.findall(r"`(\w+)`", line)) == {*REWARDS, "hpsv3"} - set(SHIPPED)
