"""The documentation site: built strictly, and as complete as the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.config import Config
from flowrl.config.messages import walk

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


def headings(page: Path) -> list[str]:
    """Return the text of a page's second-level headings that are code."""
    found = re.findall(r"<h2[^>]*><code>(.*?)</code>(.*?)<a", page.read_text(), re.DOTALL)
    return [name + more.strip() for name, more in found]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_builds_strictly_and_has_every_option_command_metric_and_function(tmp_path):
    """A broken link or a page outside the navigation is an error of the build."""
    pytest.importorskip("mkdocs")
    from scripts.docs_site import commands, public_names

    site = tmp_path / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    env["FLOWRL_REPOSITORY"] = "https://github.com/someone/flowrl"
    built = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr[-3000:]
    pages = sorted((site / "reference" / "options").glob("*/index.html"))
    options = {(o.path, o.variant) for o in walk(Config)}
    sections = {path for path, _ in options if "." not in path}
    assert {page.parent.name for page in pages} == sections
    assert sum(len(headings(page)) for page in pages) == len(options) - len(sections)
    told = headings(site / "reference" / "commands" / "index.html")
    assert told == [name for name, _ in commands()] and len(told) > 20
    python = (site / "reference" / "python" / "index.html").read_text()
    assert headings(site / "reference" / "python" / "index.html") == public_names()
    assert python.count('class="doc doc-contents') >= len(public_names())
    # A notebook opens in Colab from the released address.
    page = (site / "tutorials" / "laptop" / "index.html").read_text()
    notebook = "someone/flowrl/blob/main/examples/notebooks/quickstart.ipynb"
    assert f'href="https://colab.research.google.com/github/{notebook}"' in page
