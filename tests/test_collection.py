"""pytest collects every test file that git tracks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


LIST = """
import sys
import pytest

class Nothing(pytest.File):
    def collect(self):
        return []

class Files:
    def pytest_pycollect_makemodule(self, module_path, parent):
        print("file:", module_path)
        return Nothing.from_parent(parent, path=module_path)

pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[Files()])
"""


def test_pytest_collects_every_test_file_of_the_repository():
    words = ["git", "ls-files", "--", "*/test_*.py", "test_*.py"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tests = {ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    run = subprocess.run([sys.executable, "-c", LIST], cwd=ROOT, capture_output=True, text=True)
    lines = [line.partition("file: ")[2] for line in run.stdout.splitlines()]
    assert tests and tests == {Path(line) for line in lines if line}, run.stdout + run.stderr
