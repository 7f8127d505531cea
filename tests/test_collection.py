"""pytest collects every test file that git tracks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def git_files(*patterns: str) -> set[str]:
    run = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    if run.returncode:
        pytest.skip("not a git checkout")
    return {name for name in run.stdout.splitlines() if (ROOT / name).is_file()}


def test_pytest_collects_every_test_file_of_the_repository():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:]
    collected = {line.split("::")[0] for line in run.stdout.splitlines() if "::" in line}
    tests = git_files("*/test_*.py", "test_*.py")
    assert tests and tests == collected
