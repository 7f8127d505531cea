"""The Dockerfile: what can be known of it without building it."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
WHOLE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
TEXT = re.sub(r"\\\n(?!#)\s*", " ", WHOLE)
LINES = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
KNOWN = {"FROM", "RUN", "ARG", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}


def arguments(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.split()[0] == name]


def test_every_instruction_is_known_and_every_command_parses():
    assert {line.split()[0] for line in LINES} <= KNOWN and LINES[0].startswith("FROM ")
    for command in arguments("RUN"):
        assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, command
    installs = [c for c in arguments("RUN") if "pip install" in c]
    assert len(installs) == 2 and all("--no-cache-dir" in c for c in installs)


def test_it_is_not_root_in_the_end_and_starts_the_program(capsys):
    users = [i for i, line in enumerate(LINES) if line.startswith("USER ")]
    assert users and LINES[users[-1]] != "USER root"
    assert not any(line.startswith("RUN") for line in LINES[users[-1] :])
    words = json.loads(arguments("ENTRYPOINT")[0]) + json.loads(arguments("CMD")[0])
    assert words == ["flowrl", "doctor"]
    with pytest.raises(SystemExit) as end:
        main(words[1:])
    assert end.value.code in (0, None) and "torch" in capsys.readouterr().out
