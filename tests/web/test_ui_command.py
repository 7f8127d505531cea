"""`flowrl ui` as a command."""

import os
import signal
import subprocess
import sys
import webbrowser
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import httpx
import pytest
import uvicorn

from flowrl.cli import main

COMMAND = [sys.executable, "-m", "flowrl"]


def refused(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["ui", *words])
    assert end.value.code == 1
    return " ".join(capsys.readouterr().err.split())


def test_other_machines_are_let_in_with_a_chosen_token_alone(capsys, monkeypatch, tmp_path):
    assert "--host 0.0.0.0 lets other machines in" in refused(capsys, "--host", "0.0.0.0")
    assert "no such variable" in refused(capsys, "--token-env", "NOT_THERE")
    monkeypatch.setenv("UI_TOKEN", "two words")
    assert "visible ASCII" in refused(capsys, "--token-env", "UI_TOKEN")
    (tmp_path / "file").touch()
    assert "expected a folder of runs" in refused(capsys, str(tmp_path / "file"))


@pytest.fixture
def ends_at_once(monkeypatch):
    """Servers that end before they serve."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)


def test_the_token_reaches_the_browser_in_a_file_that_others_cannot_read(
    ends_at_once, monkeypatch, capsys, tmp_path
):
    opened = []

    def browser(address: str) -> bool:
        path = Path(url2pathname(urlparse(address).path))
        opened.append((address, path, path.read_text(), path.stat().st_mode & 0o777))
        return False

    monkeypatch.setattr(webbrowser, "open", browser)
    monkeypatch.setenv("UI_TOKEN", "a<token>&")
    words = ["ui", str(tmp_path), "--port", "0", "--open", "--token-env", "UI_TOKEN"]
    with pytest.raises(SystemExit):
        main(words)
    [(address, path, text, mode)] = opened
    out = capsys.readouterr().out
    printed = next(word for word in out.split() if "#token=" in word)
    assert printed.endswith("#token=a%3Ctoken%3E%26") and f"url={printed}" in text
    assert address.startswith("file://") and "token" not in address
    assert os.name != "posix" or mode == 0o600
    assert not path.exists() and "browser" in out


@pytest.mark.slow
def test_it_prints_an_address_whose_token_opens_it_and_ends_with_ctrl_c(make_folder):
    folder = make_folder()
    command = [*COMMAND, "ui", str(folder.parent), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            line = next(line for line in child.stdout if "#token=" in line)
            base, _, token = line.strip().partition("#token=")
            assert len(token) >= 32 and base.startswith("http://127.0.0.1:")
            assert httpx.get(f"{base}api/runs").status_code == 401
            answer = httpx.get(f"{base}api/runs", headers={"Authorization": f"Bearer {token}"})
            assert [run["run"] for run in answer.json()["runs"]] == ["run"]
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 0
        finally:
            child.kill()
