"""`flowrl ui` and `flowrl bench ui` as commands."""

import json
import signal
import subprocess
import sys

import httpx
import pytest

from flowrl.bench.ui import find_chromium
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


@pytest.mark.slow
def test_the_bench_measures_paint_and_memory_of_what_it_writes():
    if find_chromium() is None:
        pytest.skip("needs Chromium, as Debian's package chromium")
    sizes = ["--runs", "2", "--steps", "200", "--metrics", "5", "--seconds", "1", "--samples", "1"]
    command = [*COMMAND, "bench", "ui", *sizes, "--json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = {row["what"]: row for row in map(json.loads, found.splitlines())}
    assert rows["first paint"]["is"] > 0 and rows["first paint"]["expected"] == "< 1"
    assert rows["all runs listed"]["is"] >= rows["first paint"]["is"]
    assert rows["all of them read"]["is"] >= rows["first curves of all runs"]["is"]
    assert rows["memory of the server, most"]["is"] > 10 and rows["memory of the page, most"]["is"]
    assert rows["iterations that came meanwhile"]["is"] > 0
