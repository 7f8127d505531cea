"""`flowrl reward-serve`: what it refuses."""

import socket
import sys

import pytest

from flowrl.cli import rewards as serving
from flowrl.cli.rewards import bound, listen, reward_serve
from flowrl.errors import UserError
from flowrl.scoring import server


def test_other_machines_need_a_token_that_a_header_can_hold(monkeypatch):
    # Other machines are let in only with a token.
    for host in ["::", "rewards.example.com", "0.0.0.0"]:
        with pytest.raises(UserError, match=f"--host {host} lets other machines in.*--token-env"):
            reward_serve(["compressibility"], host=host)
        monkeypatch.delenv("REWARD_TOKEN", raising=False)
        with pytest.raises(UserError, match="no such variable"):
            reward_serve(["compressibility"], host=host, token_env="REWARD_TOKEN")
    # A token that no header can hold is refused and not shown.
    monkeypatch.setenv("REWARD_TOKEN", "schlüssel")
    with pytest.raises(UserError, match="token must be of visible ASCII") as caught:
        reward_serve(["compressibility"], port=0, token_env="REWARD_TOKEN")
    assert "schl" not in str(caught.value)


def test_a_server_is_refused_before_it_listens_when_its_options_are_wrong():
    for options, words in [
        ({"names": ["compressability"]}, "unknown reward 'compressability'"),
        ({"names": ["compressibility"], "args": ["{quality: 0}"]}, "JPEG quality"),
        ({"names": ["compressibility"], "args": ["{}", "{}"]}, "given 2 times for 1 rewards"),
        ({"names": ["compressibility"], "args": ["[]"]}, "expected names and values"),
        ({"names": ["compressibility"], "codec": ["gif"]}, "--codec is one of png"),
        ({"names": ["compressibility"], "timeout": 5.0}, "give --workers as well"),
        ({"names": ["compressibility"], "micro_batch": 4}, "give --workers as well"),
    ]:
        with pytest.raises(UserError, match=words):
            reward_serve(**options, port=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Cannot listen at 127.0.0.1 port {port}"):
            reward_serve(["compressibility"], port=port)


def test_an_address_that_is_taken_is_told_first(tmp_path, monkeypatch):
    # An address that is taken is told before anything is loaded.
    (tmp_path / "loads_for_minutes.py").write_text("raise AssertionError('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="Cannot listen at 127.0.0.1"):
            reward_serve(["loads_for_minutes:Reward"], port=taken.getsockname()[1])
    # Of two servers that load for one address the second is told.
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bound("127.0.0.1", port) as second:
            listen(first)
            with pytest.raises(
                UserError, match=f"Cannot listen at 127.0.0.1 port {port}: .*in use"
            ):
                listen(second)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    packages = {"python_multipart": "python-multipart"}
    for module in ("fastapi", "uvicorn", "python_multipart", "pebble"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(UserError, match=f"pip install {packages.get(module, module)}$"):
                reward_serve(["no_such:Reward"], port=0, workers=int(module == "pebble"))
            if module == "pebble":  # not missed without processes
                with pytest.raises(UserError, match="cannot load reward"):
                    reward_serve(["no_such:Reward"], port=0)


def test_processes_get_the_time_and_the_images_that_are_asked_for(monkeypatch):
    pools = []
    monkeypatch.setattr(
        serving, "_serve", lambda app, *_: pools.extend(app.state.service.executors.values())
    )
    monkeypatch.setattr(server, "warm_up", lambda spec: True)
    for name, size in [("compressibility", 3), ("diversity", None)]:
        pools.clear()
        reward_serve([name], port=0, workers=2, timeout=7.0, micro_batch=3)
        (pool,) = pools
        assert [process.timeout for process in pool._processes] == [7.0, 7.0]
        assert pool.micro_batch == size
