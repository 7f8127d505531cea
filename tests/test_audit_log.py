"""Audits on disk: a resumed run sees what an uninterrupted one would, and nothing else."""

import json

import pytest
import torch

from flowrl.errors import UserError
from flowrl.sampling.rank_audit import FILE, AuditEvent, AuditLog, audit


def event(iteration, next=None, seed=0):
    generator = torch.Generator().manual_seed(100 * iteration + seed)
    proxy, true = torch.rand(2, 2, 8, generator=generator)
    return AuditEvent(
        iteration=iteration,
        precision="nvfp4-emulated",
        steps=3,
        action="keep" if next is None else "degrade",
        next=next,
        text="what was found",
        report=audit(proxy, true, 4),
    )


def test_a_new_folder_has_no_audits_and_reading_makes_no_file(tmp_path):
    log = AuditLog(tmp_path / "run")
    log.rewind(0)
    assert log.before(100) == () and not (tmp_path / "run").exists()


def test_only_the_audits_of_earlier_iterations_are_known(tmp_path):
    log, events = AuditLog(tmp_path), [event(0), event(10, next="bf16"), event(20)]
    for one in events:
        log.record(one)
    assert [AuditLog(tmp_path).before(i) for i in (0, 10, 11, 20, 21)] == [
        (),
        tuple(events[:1]),
        tuple(events[:2]),
        tuple(events[:2]),
        tuple(events),
    ]


def test_a_resumed_run_leaves_the_file_that_an_uninterrupted_one_leaves(tmp_path):
    whole, broken = AuditLog(tmp_path / "whole"), AuditLog(tmp_path / "broken")
    for iteration in (0, 10, 20, 30):
        whole.record(event(iteration))
    for iteration in (0, 10, 20):
        broken.record(event(iteration))
    for iteration in (10, 20, 30):  # from the checkpoint at 5
        assert broken.before(iteration) == whole.before(iteration)
        broken.record(event(iteration))
    assert broken.path.read_bytes() == whole.path.read_bytes()


def test_recording_drops_the_audits_of_its_and_later_iterations(tmp_path):
    log = AuditLog(tmp_path)
    for iteration in (0, 10, 20):
        log.record(event(iteration))
    log.record(again := event(10, seed=1))
    assert log.before(100) == (event(0), again)


def test_rewinding_drops_them_too(tmp_path):
    log = AuditLog(tmp_path)
    for iteration in (0, 10, 20):
        log.record(event(iteration))
    log.rewind(11)
    assert [e.iteration for e in log.before(100)] == [0, 10]


def test_the_file_is_a_line_of_strict_json_an_audit(tmp_path):
    flat = audit(torch.zeros(1, 4), torch.rand(1, 4), 2)
    log = AuditLog(tmp_path)
    log.record(AuditEvent(iteration=3, precision="bf16", steps=2, action="warn", next=None,
                          text="", report=flat))  # fmt: skip
    (line,) = (tmp_path / FILE).read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["iteration"] == 3 and row["report"]["prompts"][0]["rho"] is None


def cut(line):
    return line[:-20]


def swap(**changes):
    return lambda line: json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    "spoil",
    [
        cut,
        swap(iteration="ten"),
        swap(action="panic"),
        swap(next=4),
        swap(report={}),
        swap(report=None),
        lambda line: "[]",
        lambda line: "not json",
        lambda line: "",
        lambda line: "\xff\x00",
    ],
    ids=["cut", "word", "action", "number", "empty", "none", "list", "text", "blank", "bytes"],
)
def test_a_line_that_is_no_audit_is_named_in_one_sentence(tmp_path, spoil):
    log = AuditLog(tmp_path)
    for iteration in (0, 10):
        log.record(event(iteration))
    first, second = log.path.read_text().splitlines()
    log.path.write_text(f"{first}\n{spoil(second)}\n", encoding="latin-1")
    with pytest.raises(UserError, match=r"line 2 of .*audits\.jsonl is not the record of an audit"):
        log.before(20)


def test_audits_out_of_order_are_refused(tmp_path):
    log = AuditLog(tmp_path)
    for iteration in (0, 10):
        log.record(event(iteration))
    lines = log.path.read_text().splitlines()
    log.path.write_text("\n".join(reversed(lines)))
    with pytest.raises(UserError, match=r"iterations \[10, 0\], expected ascending"):
        log.before(20)
