"""`flowrl ui` as a command."""

import uvicorn


def test_other_machines_are_let_in_with_a_chosen_token_alone(flowrl, monkeypatch, tmp_path):
    monkeypatch.setenv("UI_TOKEN", "two words")
    (tmp_path / "file").touch()
    for words, told in (
        (("--host", "0.0.0.0"), "--host 0.0.0.0 lets other machines in"),
        (("--token-env", "NOT_THERE"), "no such variable"),
        (("--token-env", "UI_TOKEN"), "visible ASCII"),
        ((tmp_path / "file",), "expected a folder of runs"),
    ):
        code, _, err = flowrl("ui", *words)
        assert code == 1 and told in err


def test_the_token_is_quoted_in_the_address(flowrl, monkeypatch, tmp_path):
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.setenv("UI_TOKEN", "a<token>&")
    _, out, _ = flowrl("ui", tmp_path, "--port", "0", "--token-env", "UI_TOKEN")
    assert out.rstrip().endswith("/#token=a%3Ctoken%3E%26")
