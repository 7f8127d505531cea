"""The Dockerfile: what can be known of it without building it."""

import json
import re
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\\\n(?!#)\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
LINES = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def arguments(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.split()[0] == name]


def test_it_is_not_root_in_the_end_and_starts_the_program(capsys):
    users = [i for i, line in enumerate(LINES) if line.startswith("USER ")]
    assert users and LINES[users[-1]] != "USER root"
    assert not any(line.startswith("RUN") for line in LINES[users[-1] :])
    words = json.loads(arguments("ENTRYPOINT")[0]) + json.loads(arguments("CMD")[0])
    assert words == ["flowrl", "doctor"]
    with pytest.raises(SystemExit) as end:
        main(words[1:])
    assert end.value.code in (0, None) and "torch" in capsys.readouterr().out
