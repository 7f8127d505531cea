"""`flowrl reward-serve`: what it refuses."""

import socket

import pytest

from flowrl.commands.serving import reward_serve
from flowrl.errors import UserError


@pytest.mark.parametrize("host", ["::", "rewards.example.com", "0.0.0.0"])
def test_other_machines_are_let_in_only_with_a_token(host, monkeypatch):
    with pytest.raises(UserError, match=f"--host {host} lets other machines in.*--token-env"):
        reward_serve(["compressibility"], host=host)
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with pytest.raises(UserError, match="no such variable"):
        reward_serve(["compressibility"], host=host, token_env="REWARD_TOKEN")


def test_a_server_is_refused_before_it_listens_when_its_options_are_wrong():
    for options, words in [
        ({"names": ["compressability"]}, "unknown reward 'compressability'"),
        ({"names": ["compressibility"], "args": ["{quality: 0}"]}, "JPEG quality"),
        ({"names": ["compressibility"], "args": ["{}", "{}"]}, "given 2 times for 1 rewards"),
        ({"names": ["compressibility"], "args": ["[]"]}, "expected names and values"),
        ({"names": ["compressibility"], "codec": ["gif"]}, "--codec is one of png"),
    ]:
        with pytest.raises(UserError, match=words):
            reward_serve(**options)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Cannot listen at 127.0.0.1 port {port}"):
            reward_serve(["compressibility"], port=port)
