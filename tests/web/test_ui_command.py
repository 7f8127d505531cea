"""`flowrl ui` as a command."""

import pytest
import uvicorn

from flowrl.cli import main


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
