"""Certify: one file per machine, part by part, and a page of all of them."""

import json

import pytest

from flowrl.errors import UserError
from scripts.bench import certify


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
