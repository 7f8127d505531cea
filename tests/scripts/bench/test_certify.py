"""Certify: one file per machine, part by part, and a page of all of them."""

import functools
import json

import pytest
import torch

from flowrl.errors import UserError
from flowrl.training.tracking import Report
from scripts.bench import certify
from scripts.bench.__main__ import app


def test_a_file_is_written_after_each_part_and_a_second_call_goes_on(tmp_path, monkeypatch):
    ran, told = [], []

    def part(name, result):
        def run():
            ran.append(name)
            if isinstance(result, Exception):
                raise result
            return dict(result)

        return run

    parts = {"a": part("a", {"ratio": 0.5}), "b": part("b", ValueError("broken")),
             "c": part("c", {"skipped": "no GPU"})}  # fmt: skip
    monkeypatch.setattr(certify, "_parts", lambda recipes: parts)
    path = certify.certify(tmp_path, only=["a"], show=told.append)
    found = json.loads(path.read_text())
    assert found["machine"]["card"].startswith("CPU ") and found["parts"]["a"]["ratio"] == 0.5
    certify.certify(tmp_path, show=told.append)
    assert ran == ["a", "b", "c"] and told[1] == "a: done before"
    certify.certify(tmp_path, only=["a", "b"], show=told.append)
    assert ran.pop() == "b" and len(ran) == 3  # what failed is tried again
    found = json.loads(path.read_text())["parts"]
    assert found["b"]["error"] == "ValueError: broken" and found["c"] == {"skipped": "no GPU"}
    # Another version of anything measures anew.
    monkeypatch.setattr(certify, "machine", lambda: {"card": "CPU x86_64", "torch": "other"})
    certify.certify(tmp_path, show=told.append)
    assert ran[3:] == ["a", "b", "c"]
    with pytest.raises(UserError, match="there is no part 'z', expected some of a, b, c"):
        certify.certify(tmp_path, only=["z"])


def test_no_part_is_begun_once_the_minutes_are_over_and_a_second_call_goes_on(
    tmp_path, monkeypatch
):
    ran, told, now = [], [], [0.0]

    def part(name):
        ran.append(name)
        now[0] += 100
        return {}

    parts = {name: functools.partial(part, name) for name in "abc"}
    monkeypatch.setattr(certify, "_parts", lambda recipes: parts)
    monkeypatch.setattr(certify.time, "monotonic", lambda: now[0])
    path = certify.certify(tmp_path, minutes=3, show=told.append)
    assert ran == ["a", "b"] and set(json.loads(path.read_text())["parts"]) == {"a", "b"}
    assert told[-1] == "c: not begun, 3 minutes are over; the same command goes on"
    certify.certify(tmp_path, minutes=3, show=told.append)
    assert ran == ["a", "b", "c"]


def test_a_part_that_fails_does_not_keep_others_from_their_turn(tmp_path, monkeypatch):
    ran, now = [], [0.0]

    def part(name):
        ran.append(name)
        now[0] += 100
        return {} if name != "a" else {}["a"]

    parts = {name: functools.partial(part, name) for name in "abc"}
    monkeypatch.setattr(certify, "_parts", lambda recipes: parts)
    monkeypatch.setattr(certify.time, "monotonic", lambda: now[0])
    for _ in range(4):
        certify.certify(tmp_path, minutes=1)
    assert ran == ["a", "b", "c", "a"]


def test_what_a_part_took_stands_beside_the_seconds_that_it_measured(tmp_path, monkeypatch):
    ran = []
    parts = {"a": lambda: ran.append("a") or {"seconds": 1234}}
    monkeypatch.setattr(certify, "_parts", lambda recipes: parts)
    row = json.loads(certify.certify(tmp_path).read_text())["parts"]["a"]
    assert row["seconds"] == 1234 and row["part_seconds"] < 600
    assert f"| a | {row['part_seconds']} |" in certify.write_page(tmp_path).read_text()
    certify.certify(tmp_path)
    assert ran == ["a"]


def test_each_part_leaves_the_gpu_free_for_other_processes(tmp_path, monkeypatch):
    did = []

    def broken():
        did.append("b")
        raise ValueError

    monkeypatch.setattr(
        certify, "_parts", lambda _: {"a": lambda: did.append("a") or {}, "b": broken}
    )
    monkeypatch.setattr(certify, "machine", lambda: {"card": "X"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("free"))
    for on_gpu, expected in ((False, ["a", "b"]), (True, ["a", "free", "b", "free"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        did.clear()
        certify.certify(tmp_path / str(on_gpu))
        assert did == expected


def test_the_page_shows_every_file_and_what_no_gpu_has_run(tmp_path):
    about = {"card": "A|<b>", "torch": "2", "flowrl": "1", "blocks": "all", "cards": 1}
    took = {"seconds": 3, "cpu_seconds": 2.5}
    audited = [{"precision": "fp8", "rho": 0.9, "contrast": 0.8}, {"precision": "exact"}]
    parts = {"compile": {"ratio": 0.75, **took}, "rewards": {"error": "x"},
             "kernels fp8": {"native": True, "rows": audited}}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"machine": about, "parts": parts}))
    cpu = {"machine": {"card": "CPU", "cards": 0}, "parts": {"quickstart": {"seconds": 1}}}
    (tmp_path / "b.json").write_text(json.dumps(cpu))
    text = certify.write_page(tmp_path).read_text()
    # Files of before `part_seconds`.
    assert "## A\\|&lt;b>" in text and "| compile | 3 | 2.5 | ratio 0.75 |" in text
    assert "| native True, fp8: rho 0.9, contrast 0.8 |" in text
    missing = text.partition("## Not run on a GPU")[2]
    assert "- compile" not in missing
    assert all(
        f"- {part}\n" in missing for part in ("rewards", "two stages sd3.5-medium", "quickstart")
    )
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(UserError, match="b.json"):
        certify.write_page(tmp_path)


def test_the_sentence_about_what_is_missing_follows_the_files_of_gpus(tmp_path):
    every = list(certify._parts(()))
    assert certify.not_run_sentence(tmp_path).endswith(": " + ", ".join(every))
    about = {"card": "X", "cards": 1}
    for number, ran in enumerate((every[:2], every[2:])):  # two machines, half of it each
        assert every[2] in certify.not_run_sentence(tmp_path)
        parts = {name: {"seconds": 1, "native": True, "processes": 2} for name in ran}
        text = json.dumps({"machine": about, "parts": parts})
        (tmp_path / f"{number}.json").write_text(text)
    assert certify.not_run_sentence(tmp_path).startswith("Every part")


def test_emulated_kernels_and_a_process_alone_have_not_run_on_a_gpu():
    about = {"card": "X", "cards": 1}

    def missing(native, processes):
        low_bits = {f"kernels {name}": {"native": native} for name in certify.LOW_BITS}
        parts = low_bits | {"processes": {"processes": processes}}
        return set(certify.not_run([{"machine": about, "parts": parts}]))

    kernels = {"kernels fp8", "kernels nvfp4"}
    assert missing(False, 2) - missing(True, 2) == kernels
    assert missing(True, 1) - missing(True, 2) == {"processes"}


def test_a_part_that_fails_ends_the_command_with_1(tmp_path, monkeypatch, capsys):
    def broken():
        raise ValueError("broken")

    parts = {"good": dict, "bad": broken}
    monkeypatch.setattr(certify, "_parts", lambda recipes: parts)
    words = ["certify", "-o", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code == 1 and "bad: error: ValueError: broken" in capsys.readouterr().out
    parts["bad"] = dict
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert not ended.value.code and "good: done before" in capsys.readouterr().out


def test_parts_of_recipes_are_those_of_their_checkpoints():
    every = certify._parts(())
    assert {f"iteration {name}" for name in certify.SIZES} <= every.keys()
    assert "two stages sd3.5-medium" in every
    some = set(certify._parts(["flux.1-dev-nft-12gb"])) & {
        f"{part} {name}" for part in ("iteration", "two stages") for name in certify.SIZES
    }
    assert some == {"iteration flux.1-dev", "two stages flux.1-dev"}


def test_a_recipe_of_another_checkpoint_is_refused_with_the_sizes(tmp_path):
    with pytest.raises(UserError, match=f"quickstart's checkpoint .* {', '.join(certify.SIZES)}"):
        certify.certify(tmp_path, recipes=["flux.1-dev-nft-12gb", "quickstart"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lost", [None, "nan", "end"])
def test_a_quickstart_whose_mean_rewards_are_not_all_finite_fails(monkeypatch, lost):
    count = certify.ITERATIONS

    def align(config):
        with Report(config.run.output_dir, trackers=()) as report:
            for step in range(1, count + 1 if lost != "end" else count):
                nan = lost == "nan" and step == 2
                report.log(step, {"reward/mean": float("nan") if nan else 0.5, "loss": 0.0})

    monkeypatch.setattr("flowrl.api.align", align)
    if lost is None:
        assert certify._quickstart("quickstart")["rewards"] == [0.5] * count
        return
    with pytest.raises(RuntimeError, match="expected a finite mean reward from each of"):
        certify._quickstart("quickstart")


@pytest.mark.slow
def test_processes_sum_and_have_the_same_versions(monkeypatch):
    found = certify._processes()
    assert found["processes"] >= 1 and found["all_reduce_gb_per_second"] > 0
    assert len(found["process_cards"]) == found["processes"]
    monkeypatch.setattr(
        certify, "PROCESS", 'print(\'{"versions": [\' + __import__("os").environ["RANK"] + "]}")'
    )
    with pytest.raises(RuntimeError, match="differ in torch"):
        certify._processes()


@pytest.mark.slow
def test_a_reward_has_the_same_scores_wherever_it_lies(monkeypatch):
    found = certify._rewards()
    assert found["places"] == ["training", "thread", "parked on the CPU", "processes"]
    call = certify.NetworkReward.__call__
    monkeypatch.setattr(certify.NetworkReward, "__call__", lambda *given: 1 + call(*given))
    with pytest.raises(RuntimeError, match="rewards in training, thread, parked"):
        certify._rewards()
