"""`flowrl ui` as a command."""

import signal
import subprocess
import sys

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


def test_the_token_is_quoted_in_the_address(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.setenv("UI_TOKEN", "a<token>&")
    with pytest.raises(SystemExit):
        main(["ui", str(tmp_path), "--port", "0", "--token-env", "UI_TOKEN"])
    assert capsys.readouterr().out.rstrip().endswith("/#token=a%3Ctoken%3E%26")


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
