"""Every command of the tutorials that needs neither a GPU nor a download, as printed, in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import Flux2KleinPipeline

from flowrl.backbones.small import small_folder

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs/tutorials").glob("*.md"))}
NEEDS = {  # what is left out, and why
    "pip install": "an installation",
    "hf download": "a download",
    "vllm serve": "a GPU",
    "flowrl reward-check vlm_judge": "a judge that runs",
    "flowrl train flux.1-dev-nft-24gb --prompts": "a GPU and the weights",
}


def files(page: str) -> dict[str, str]:
    """Return the files that a page tells its reader to write, by the name in the text before."""
    found = {}
    fence = r"([^\n]*)\n\n```(?:python|text|yaml)\n(.*?)```"
    for before, text in re.findall(fence, page, re.DOTALL):
        if name := re.search(r"`(\w+\.(?:py|txt|yaml))`", before):
            found[name[1]] = text
    return found


def commands(page: str) -> list[str]:
    return [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
            for line in block.replace("\\\n", " ").splitlines() if line.strip()]  # fmt: skip


def test_what_is_left_out_is_on_a_page():
    told = [command for page in PAGES.values() for command in commands(page)]
    for start in NEEDS:
        assert any(command.startswith(start) for command in told), start


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", list(PAGES))
def test_a_tutorial_runs_as_printed(name, tmp_path):
    (tmp_path / "bin").mkdir()
    flowrl = tmp_path / "bin" / "flowrl"
    flowrl.write_text(f'#!/bin/sh\nexec {sys.executable} -m flowrl "$@"\n')
    flowrl.chmod(0o755)
    env = os.environ | {"PATH": f"{flowrl.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for file, text in files(PAGES[name]).items():
        (tmp_path / file).write_text(text)
    texts = [
        f"a {colour} {what}" for colour in ("red", "blue") for what in ("cat", "dog", "bus", "hat")
    ]
    (tmp_path / "my_prompts.txt").write_text("\n".join(texts))
    if name == "own-model":  # with a small pipeline of the class
        small_folder(Flux2KleinPipeline, tmp_path / "my-model")
    ran = 0
    for command in commands(PAGES[name]):
        if command.startswith(tuple(NEEDS)):
            continue
        result = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        ran += 1
    assert ran or name == "judge"
