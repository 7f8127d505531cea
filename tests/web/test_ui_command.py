"""`flowrl ui` as a command."""

import os
import signal
import socket
import subprocess
import sys
import webbrowser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlparse
from urllib.request import url2pathname

import httpx
import psutil
import pytest
import uvicorn
from starlette.testclient import TestClient

from flowrl.cli import main
from flowrl.web import app

COMMAND = [sys.executable, "-m", "flowrl"]
CHOSEN = {"authorization": "Bearer chosen"}
CARD = SimpleNamespace(family=socket.AF_INET, address="192.0.2.7")
CARD_6 = SimpleNamespace(family=socket.AF_INET6, address="FE80::7%eth0")


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


def test_a_wildcard_listens_for_the_names_of_this_machine_and_prints_one_of_them(
    ends_at_once, monkeypatch, capsys, tmp_path
):
    names = []
    make = app.make_app

    def recorded(root, *, token, hosts):
        names.extend(hosts)
        return make(root, token=token, hosts=hosts)

    monkeypatch.setattr(app, "make_app", recorded)
    monkeypatch.setenv("UI_TOKEN", "chosen")
    monkeypatch.setattr(socket, "gethostname", lambda: "Box")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [CARD, CARD_6]})
    words = ["ui", str(tmp_path), "--port=0", "--host=0.0.0.0", "--token-env=UI_TOKEN"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--allow-host", "Runs.example.com"])
    assert not end.value.code
    own = {"192.0.2.7", "fe80::7", "box", "localhost", "runs.example.com"}
    assert own <= set(names) and "0.0.0.0" not in names
    printed = next(w for w in capsys.readouterr().out.split() if "#token=" in w)
    client = TestClient(make(tmp_path, token="chosen", hosts=names), headers=CHOSEN)
    for host in ("192.0.2.7:8401", "[fe80::7]:8401", "BOX:8401", urlparse(printed).netloc):
        assert client.get("/api/runs", headers={"host": host}).status_code == 200, host
        wrong = {"host": host, "authorization": "Bearer other"}
        assert client.get("/api/runs", headers=wrong).status_code == 401, host
    # A name of others that leads here, as in DNS rebinding, is refused, and so is the wildcard.
    for host in ("evil.example.com:8401", "0.0.0.0:8401", "192.0.2.7.example.com"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 421, host


@pytest.mark.slow
def test_it_prints_an_address_whose_token_opens_it_and_ends_with_ctrl_c(make_folder):
    folder = make_folder()
    command = [*COMMAND, "ui", str(folder.parent), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            base, _, token = child.stdout.readline().split()[-1].partition("#token=")
            assert len(token) >= 32 and base.startswith("http://127.0.0.1:")
            assert httpx.get(f"{base}api/runs").status_code == 401
            answer = httpx.get(f"{base}api/runs", headers={"Authorization": f"Bearer {token}"})
            assert [run["run"] for run in answer.json()["runs"]] == ["run"]
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 0
        finally:
            child.kill()
