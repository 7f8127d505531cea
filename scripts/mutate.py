"""Inject single-line bugs one at a time, and report which of them the tests catch.

    python scripts/mutate.py          # all of scripts/mutations.json, on the tests listed there
    python scripts/mutate.py 3 17     # some of them

Each is made in a temporary copy of the clone. A bug is caught when a listed test fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".ci", "runs", "gallery", "__pycache__")


def main(wanted: list[str]) -> None:
    mutations = json.loads((ROOT / "scripts" / "mutations.json").read_text())
    chosen = [m for m in mutations if not wanted or str(m["id"]) in wanted]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "flowrl"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        results = [inject(copy, mutation) for mutation in chosen]
    print(f"caught {results.count('caught')} of {len(results)}")


def inject(copy: Path, mutation: dict) -> str:
    """Make one mutation in the copy, run its tests, undo it; return and print what happened."""
    path = copy / mutation["file"]
    text = path.read_text()
    if text.count(mutation["line"]) != 1:
        result = "its line is not there once: update scripts/mutations.json"
    else:
        path.write_text(text.replace(mutation["line"], mutation["mutant"]))
        tests = [test for test in mutation["tests"] if (copy / test).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True)
        names = {0: "survived", 1: "caught"}
        result = names.get(done.returncode, f"pytest ended with {done.returncode}")
        path.write_text(text)
    print(f"{mutation['id']:3} {mutation['file']}: {mutation['what']}: {result}", flush=True)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
