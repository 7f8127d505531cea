"""Killed before any file operation, evaluate, benchmark and encode end as without a kill."""

from pathlib import Path

import pytest
from crashes import fork, kill_at
from safetensors.torch import load

from flowrl.assembly.learner import fill_prompt_cache
from flowrl.evaluation.comparison import compare_loras
from flowrl.evaluation.drawing import Drawing, draw_prompts
from flowrl.evaluation.leaderboard import write_leaderboard
from flowrl.prompts.records import records_of
from flowrl.utils.digests import SEAL, notes_of
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import TEMPORARY, locked_folder

PROMPTS = ["a red circle", "a blue square", "a green star"]


def contents(folder: Path) -> dict[str, object]:
    """The files of a folder by name, leftovers included; of a state file what it holds.

    A header's order is random.
    """
    files: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            data = path.read_bytes()
            if path.suffix == ".safetensors":
                texts = {k: v for k, v in notes_of(data).items() if k not in (SEAL, "digest")}
                tensors = {k: (v.dtype, v.numpy().tobytes()) for k, v in load(data).items()}
                files[str(path.relative_to(folder))] = texts, tensors
            else:
                files[str(path.relative_to(folder))] = data
    return files


@pytest.fixture
def work(tiny_config, monkeypatch):
    """The work of each command on a folder."""
    monkeypatch.setattr("flowrl.assembly.text.ROWS", 4)
    options = {"prompts": "tiny:colors:test", "num_images": 6, "num_inference_steps": 1}
    config = tiny_config(evaluation=options | {"batch_size": 2})
    drawing = Drawing("tiny-sd3", guidance=1, steps=1, max_sequence_length=12, device="cpu")

    def evaluate(folder: Path) -> None:
        write_leaderboard(compare_loras(config, [], folder), folder)

    def benchmark(folder: Path) -> None:
        prompts = records_of([{"prompt": text} for text in PROMPTS])
        with locked_folder(folder, "images"):
            draw_prompts(drawing, prompts, folder, per_prompt=1, seed=0)

    def encode(folder: Path) -> None:
        memory = {"prompt_cache": str(folder)}
        fill_prompt_cache(tiny_config(evaluation=options, memory=memory), Runtime(device="cpu"))

    return {"evaluate": evaluate, "benchmark": benchmark, "encode": encode}


CASES = [("evaluate", 1), ("evaluate", 17), ("benchmark", 1)]
CASES += [pytest.param("encode", 5, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("command", "number"), CASES)
def test_a_killed_command_is_resumed_and_ends_equal(work, tmp_path, command, number):
    """geneval, benchmark and vote that were killed at their first write could never resume.

    Half-written files go, but for those of a cache of prompts, which any process may be writing.
    """
    run = work[command]
    run(tmp_path / "whole")
    killed = tmp_path / "killed"
    assert kill_at(number, killed, lambda: run(killed))
    leftovers = {n: v for n, v in contents(killed).items() if n.endswith(TEMPORARY)}
    assert bool(leftovers) == (number > 1)
    assert fork(lambda: run(killed) or 0) == 0
    stay = leftovers if command == "encode" else {}
    assert contents(killed) == contents(tmp_path / "whole") | stay


def test_a_lost_encoding_is_made_again_in_its_batch(work, tmp_path):
    """Encoded alone, which a killed and repeated call did, a prompt had other last bits."""
    work["encode"](tmp_path)
    before = contents(tmp_path)
    next(tmp_path.rglob("*.safetensors")).unlink()
    work["encode"](tmp_path)
    assert contents(tmp_path) == before
