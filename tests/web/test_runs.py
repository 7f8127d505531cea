"""What is told of a run folder: how it stands, its images, its recipe; damaged and hostile ones."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch

from flowrl.errors import UserError
from flowrl.training.checkpoint import LATEST, claim
from flowrl.training.evaluate import Evaluation
from flowrl.training.ledger import Ledger
from flowrl.training.owner import FILE as OWNER
from flowrl.web.jobs import Jobs
from flowrl.web.runs import RunFiles, RunFolders


def run_of(folder) -> RunFiles:
    return RunFiles(folder.name, folder)


def test_a_run_says_what_its_radar_saw_last(make_folder):
    folder = make_folder("run", stop={"reason": "finished", "complete": True, "detail": ""})
    assert run_of(folder).summary()["hacking"] == ""
    for step, detail in ((2, "first"), (4, "Hacking score 0.80: saturation rose.")):
        Ledger(folder).append("hacking", step=step, detail=detail)
    summary = run_of(folder).summary()
    assert (summary["hacking"], summary["hacking_step"]) == (detail, 4)


def test_the_state_is_what_ledger_and_process_say(make_folder):
    ends = {
        "finished": {"reason": "finished", "complete": True, "detail": ""},
        "stopped": {"reason": "interrupted", "complete": False, "detail": ""},
        "failed": {"reason": "error", "complete": False, "detail": "ValueError: no"},
        "killed": None,
    }
    for name, stop in ends.items():
        run = run_of(make_folder(name, stop=stop))
        assert run.state().name == name
        with claim(run.path, resume=LATEST):
            assert run.state().name == "running" and run.state().pid == os.getpid()
        assert run.state().name == name
    assert run_of(make_folder("again", stop=ends["failed"])).state().detail == "ValueError: no"
    late = {"reason": "time", "complete": True, "detail": ""}
    run = run_of(make_folder("late", stop=late))
    assert run.state().name == "stopped"
    assert "run.max_minutes after 4 of 8" in run.state().detail
    assert f"--resume {run.path}" in run.state().detail


def test_a_process_that_has_ended_or_another_with_its_number_owns_nothing(make_folder):
    run = run_of(make_folder())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    own = psutil.Process().create_time()
    host = socket.gethostname()
    for pid, began in [(child.pid, own), (os.getpid(), own - 60), (-1, 0), (10**12, 0)]:
        (run.path / OWNER).write_text(json.dumps({"pid": pid, "began": began, "host": host}))
        assert run.state().name == "killed", pid
    (run.path / OWNER).write_text(json.dumps({"pid": 1, "began": 0, "host": "elsewhere"}))
    assert run.state().name == "elsewhere"
    (run.path / OWNER).write_text("{")
    assert run.state().name == "killed"


def test_held_out_images_and_samples_are_those_of_the_files(make_folder):
    run = run_of(make_folder(prompts=("a red circle", "two stars")))
    assert run.samples() == [4] and run.evaluations() == [0, 4] and run.checkpoints() == [4]
    assert run.held_out(4) == {
        "prompts": ["a red circle", "two stars"], "names": ["brightness"], "scores": [[0.5], [0.5]],
    }  # fmt: skip
    assert run.held_out_image(4, 1)[:4] == b"\x89PNG" == run.sample(4)[:4]
    for ask in (
        lambda: run.sample(5), lambda: run.held_out(1), lambda: run.held_out_image(4, 2),
        lambda: run.held_out_image(4, -1), lambda: run.sample(-4), lambda: run.sample(10**300),
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError):
            ask()


def test_damaged_files_are_missing_files(make_folder):
    run = run_of(make_folder())
    path = run.path / "evaluations" / "step-000004.safetensors"
    whole = path.read_bytes()
    for data in (b"", whole[:40], b"\xff" * 400, whole[:200] + b"\0" * 50 + whole[250:]):
        path.write_bytes(data)
        for ask in (lambda: run.held_out(4), lambda: run.held_out_image(4, 0)):
            with pytest.raises(FileNotFoundError):
                ask()
    for name in ("ledger.jsonl", "config.yaml", "metrics.jsonl"):
        (run.path / name).write_bytes(b'{"event": [1]}\n\xff\xfe[[[[{')
    assert run.details()["state"] == "unknown"
    json.dumps(run.details(), allow_nan=False)


def test_no_link_leads_out_of_a_run(make_folder, tmp_path):
    run, other = run_of(make_folder()), make_folder("other")
    sample = run.path / "samples" / "step-000004.png"
    sample.unlink()
    sample.symlink_to(other / "samples" / "step-000004.png")
    with pytest.raises(FileNotFoundError):
        run.sample(4)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path)
    assert {r.name for r in RunFolders(tmp_path / "runs").runs()} == {"run", "other"}


def test_runs_are_found_below_folders_and_not_inside_of_runs(make_folder, tmp_path):
    make_folder("a")
    make_folder("group/b")
    make_folder("a/set-aside/001/c")
    (tmp_path / "runs" / "empty").mkdir()
    folders = RunFolders(tmp_path / "runs")
    assert {run.name for run in folders.runs()} == {"a", "group/b"}
    assert [run.name for run in RunFolders(tmp_path / "runs" / "a").runs()] == ["a"]
    for name in ("..", "../runs/a", "a/..", str(tmp_path / "runs" / "a"), "empty", ""):
        with pytest.raises(KeyError):
            folders.run(name)


def test_pipes_and_links_out_of_a_run_stop_nothing_and_show_nothing(make_folder, tmp_path):
    names = ("metrics.jsonl", "config.yaml", "ledger.jsonl", OWNER)
    secret = tmp_path / "secret"
    secret.write_text("secret: 1\n")
    for kind in ("pipe", "link"):
        folder = make_folder(kind)
        for name in names:
            (folder / name).unlink(missing_ok=True)
            if kind == "pipe":
                os.mkfifo(folder / name)
            else:
                (folder / name).symlink_to(secret)
        run = run_of(folder)
        assert not run.details()["metrics"]
        assert "secret" not in json.dumps([run.details(), run.recipe_text()])


def test_a_forged_owner_names_no_process_that_has_not_the_runs_lock(make_folder):
    folder = make_folder()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            began = psutil.Process(child.pid).create_time()
            owner = {"pid": child.pid, "began": began, "host": socket.gethostname()}
            (folder / OWNER).write_text(json.dumps(owner))
            (folder / ".lock").touch()
            assert run_of(folder).state().name != "running"
            with pytest.raises(UserError, match=folder.name):
                Jobs(folder.parent).stop(run_of(folder))
            assert child.poll() is None
        finally:
            child.kill()


def test_intervals_of_held_out_means_are_over_prompts_not_images(make_folder):
    run = run_of(make_folder())
    path = run.path / "evaluations" / "step-000004.safetensors"
    evaluation = Evaluation.load(path)
    scores = torch.tensor([[0.0], [1.0], [4.0], [torch.nan]])
    alone = replace(evaluation, scores=scores, prompt=torch.arange(4))
    alone.save(path)
    error = scores[:3].std().item() / 3**0.5
    assert run.margins() == {0: {}, 4: {"eval/brightness": pytest.approx(1.96 * error)}}
    twice = replace(alone, scores=scores.repeat(2, 1), prompt=torch.arange(4).repeat(2))
    twice.save(path)  # further images of the same prompts, with the same scores, say nothing new
    assert run.margins()[4] == {"eval/brightness": pytest.approx(1.96 * error)}
