"""Inject single-line bugs one at a time, and report which of them the tests catch.

    python scripts/mutate.py             # all of scripts/mutations/, each on the tests it lists
    python scripts/mutate.py plan obj:3  # those of plan.json, and number 3 of obj.json

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
FOLDER = ROOT / "scripts" / "mutations"
IGNORED = shutil.ignore_patterns(".git", ".ci", "runs", "gallery", "__pycache__")


def main(chosen: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "flowrl"
        shutil.copytree(ROOT, copy, ignore=IGNORED)
        results = [
            inject(copy, f"{path.stem}:{mutation['id']}", mutation)
            for path in sorted(FOLDER.glob("*.json"))
            for mutation in json.loads(path.read_text())
            if not chosen or {path.stem, f"{path.stem}:{mutation['id']}"} & set(chosen)
        ]
    print(f"caught {results.count('caught')} of {len(results)}")


def inject(copy: Path, name: str, mutation: dict) -> str:
    """Make one mutation in the copy, run its tests, undo it; return and print what happened."""
    path = copy / mutation["file"]
    text = path.read_text() if path.exists() else ""
    tests = mutation["tests"]  # files or folders, or a test as FILE::NAME
    missing = [test for test in tests if not (copy / test.partition("::")[0]).exists()]
    if text.count(mutation["line"]) != 1:
        result = "its line is not there once: update its entry"
    elif missing or not tests:
        result = f"its tests do not exist: {missing}"
    else:
        path.write_text(text.replace(mutation["line"], mutation["mutant"]))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([*command, *tests], cwd=copy, env=environment, capture_output=True)
        names = {0: "survived", 1: "caught"}
        result = names.get(done.returncode, f"pytest ended with {done.returncode}")
        path.write_text(text)
    print(f"{name:9} {mutation['file']}: {mutation['what']}: {result}", flush=True)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
