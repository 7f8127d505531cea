"""Certify: one file per machine, part by part, and a page of all of them."""

import json

import pytest

from flowrl.errors import UserError
from scripts.bench import certify


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


def test_emulated_kernels_and_a_process_alone_have_not_run_on_a_gpu():
    about = {"card": "X", "cards": 1}

    def missing(native, processes):
        low_bits = {f"kernels {name}": {"native": native} for name in certify.LOW_BITS}
        parts = low_bits | {"processes": {"processes": processes}}
        return set(certify.not_run([{"machine": about, "parts": parts}]))

    kernels = {"kernels fp8", "kernels nvfp4"}
    assert missing(False, 2) - missing(True, 2) == kernels
    assert missing(True, 1) - missing(True, 2) == {"processes"}
