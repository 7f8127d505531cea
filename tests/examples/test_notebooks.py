"""The notebooks run from top to bottom."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    """Return the code of a notebook; lines for the shell, which only install, are left out."""
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["nbformat"] == 4 and all(c["id"] for c in data["cells"])
    sources = ["".join(c["source"]) for c in data["cells"] if c["cell_type"] == "code"]
    return [
        "\n".join(line.replace("!pip", "pass  # pip") for line in source.splitlines())
        for source in sources
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_is_python(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in data["cells"])
    for source in cells(path):
        compile(source, path.name, "exec")
    assert len(NOTEBOOKS) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_once_more(path, tmp_path):
    (tmp_path / "program.py").write_text("\n\n".join(cells(path)))
    env = os.environ | {"PYTHONPATH": str(ROOT), "FLOWRL_REPOSITORY": ""}
    told = []
    for _ in range(2):  # the second time it finds its finished run
        result = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        told.append([line for line in result.stdout.splitlines() if "->" in line])
    assert told[0] and told[0] == told[1]
