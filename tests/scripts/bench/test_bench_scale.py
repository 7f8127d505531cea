"""`python -m scripts.bench scale`: its table, and one job in a program of its own."""

import json

import pytest
import torch

from flowrl.errors import UserError
from flowrl.sampling.workers import pack_weights
from scripts.bench import scale

NAMES = [
    "1 process", "1 worker", "2 processes", "2 processes, sharded", "2 workers",
    "a reward waits: 1 process", "a reward waits: 2 workers",
    "a reward waits: 2 workers, staleness 1",
]  # fmt: skip
ASKED = {"model": "tiny-sd3", "prompts": 2, "steps": 2, "iterations": 1, "threads": 1}


def test_every_job_is_compared_with_the_one_it_should_equal(monkeypatch):
    seen = []

    def measure(recipe, processes=1, **how):
        seen.append((recipe, processes))
        last = float(processes)
        return {"seconds": 6.0 / processes, "bare": 3.0, "weights": 2 * scale.MB,
                "peak": 4 * scale.MB, "trained": [torch.tensor([last])]}  # fmt: skip

    monkeypatch.setattr(scale, "_measure", measure)
    rows = scale.bench_scale(processes=(1, 2), wait=5.0, device="cpu", **ASKED)
    assert [row["job"] for row in rows] == NAMES
    found = {row["job"]: row for row in rows}
    assert found["2 processes"]["ratio"] == 0.5 and found["2 processes"]["differs by"] == 1
    assert found["2 processes, sharded"]["to"] == "2 processes"
    assert found["2 processes, sharded"]["differs by"] == 0
    assert found[NAMES[-1]]["to"] == NAMES[-3] and found[NAMES[-1]]["to bare passes"] is None
    assert found["2 workers"]["to bare passes"] == 2.0
    late, processes = seen[-1]
    assert late["rollout"]["staleness"] == 1 and late["rollout"]["workers"] == {"count": 2}
    assert processes == 1 and late["rewards"][0]["args"] == {"seconds": 5.0 / 8}
    assert len(scale.bench_scale(processes=(1,), wait=0.0, device="cpu", **ASKED)) == 2


def test_processes_without_gpus_are_refused_by_number(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="4 processes need as many GPUs, and this machine has 1"):
        scale._measure({}, 4, folder=tmp_path, iterations=1, threads=1, device="auto")


@pytest.mark.slow
def test_a_job_writes_its_seconds_bytes_and_weights(tmp_path):
    to = tmp_path / "found.json"
    scale.run_job(scale._recipe("tiny-sd3", 2, 2, "cpu"), iterations=1, to=str(to))
    found = json.loads(to.read_text())
    assert found["seconds"] > 0 and found["bare"] > 0 and found["peak"] > found["weights"] > 1e6
    assert len((tmp_path / "weights").read_bytes()) > len(pack_weights([torch.zeros(9)]))
