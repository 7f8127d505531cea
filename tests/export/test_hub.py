"""What leaves this machine: a LoRA, its card, its images and recipe, and nothing private."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.api import align, repository_of
from flowrl.backbones.lora_files import FILE
from flowrl.config import config_yaml, parse_config
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError
from flowrl.export.formats import export_hub
from flowrl.export.hub import open_repository, public, public_config, publish, push, push_later


class Hub:
    """Stands for the Hub: notes requests, and stores the files that it gets."""

    def __init__(self):
        self.requests, self.files, self.fails, self.existing = [], {}, set(), set()

    def create_repo(self, name, *, private, exist_ok, repo_type):
        self.requests.append(("create_repo", name, private))
        assert exist_ok and repo_type == "model"
        if "write" in self.fails and name not in self.existing:  # as the client does
            raise PermissionError("403 Forbidden: this token may only read\nRequest ID: 1")
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def auth_check(self, name, *, repo_type=None, token=None, write=False):
        assert repo_type == "model" and write
        self.requests.append(("auth_check", name))
        if "write" in self.fails:
            raise PermissionError("403 Forbidden: no write access\nRequest ID: 2")

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, **_):
        from huggingface_hub.utils import filter_repo_objects

        self.requests.append(("upload_folder", repo_id))
        if "upload_folder" in self.fails:
            raise ConnectionError("the network went away")
        paths = [p for p in Path(folder_path).rglob("*") if p.is_file()]
        names = [p.relative_to(folder_path).as_posix() for p in paths]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            self.files[name] = (Path(folder_path) / name).read_bytes()


@pytest.fixture
def hub(monkeypatch) -> Hub:
    """A Hub that can be reached, and a token for it."""
    import huggingface_hub
    from huggingface_hub import constants

    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return stand_in


def pushed(tiny_config, folder: Path, **run):
    """The recipe of a run that is pushed at its end."""
    return tiny_config(run={"output_dir": str(folder), "push_to_hub": True} | run)


def test_the_uploaded_configuration_is_a_recipe_without_where_it_ran(tiny_config, tmp_path):
    config = pushed(tiny_config, tmp_path / "a b" / "run", hub_model_id="me/mine")
    public_values = load_yaml(public_config(config_yaml(config)))
    run = public_values["run"]
    assert (run["output_dir"], run["push_to_hub"], run["hub_model_id"]) == ("run", False, None)
    again = parse_config(public_values)
    assert again.model_copy(update={"run": config.run, "pipeline": config.pipeline}) == config


@pytest.mark.parametrize(
    ("private", "shown"),
    [
        ("/data/me/mine.py:Reward", "mine.py:Reward"),
        ("C:\\Users\\me\\prompts.txt", "prompts.txt"),
        ("http://me:secret@host:8000/v1", "http://HOST:PORT"),
        ("http://huggingface.co/a", "http://HOST:PORT"),
        ("runs/../../me/mine.py:Reward", "mine.py:Reward"),
        ("~me/prompts.txt", "prompts.txt"),
        ("gpu7.lab.org:8000", "HOST:PORT"),
        ({"API_Key": "sk-1", "tokens": ["a"]}, {"API_Key": None, "tokens": None}),
        ({"client": {"Secret": {"a": "b"}}}, {"client": {"Secret": None}}),
        ({"token_env": "hf_secret"}, {"token_env": None}),
        ({"urls": ["http://localhost:1"]}, {"urls": ["http://HOST:PORT"]}),
    ],
)
def test_names_of_machines_and_secrets_are_left_out(private, shown):
    assert public(private) == shown


def test_nothing_is_loaded_when_it_could_not_be_pushed(hub, tiny_config, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr("flowrl.api.build_learner", lambda *_: pytest.fail("was loaded"))
    config = pushed(tiny_config, tmp_path / "run", hub_model_id="us/named")
    hub.fails.add("write")
    for existing in (set(), {"us/named"}):
        hub.existing |= existing
        with pytest.raises(UserError, match=r"us/named: 403 Forbidden: .*; set HF_TOKEN"):
            align(config)
    created = ("create_repo", "us/named", None)
    assert hub.requests == [created, created, ("auth_check", "us/named")]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="set HF_TOKEN to a token"):
        align(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        align(config)


def run_folder(folder: Path) -> Path:
    """The files of a run that an upload looks at, and some that it must not."""
    (folder / "card").mkdir(parents=True)
    for name in (FILE, "card/curve.png", "state.safetensors", "metrics.jsonl", ".env"):
        (folder / name).write_bytes(b"x")
    (folder / "README.md").write_text(
        "---\nlicense: mit\n---\npipe = X.from_pretrained('/a/base')\n"
        "pipe.load_lora_weights('/a/b', weight_name='x')\n"
    )
    return folder


def test_a_failed_upload_loses_nothing_and_says_how_to_push_later(
    hub, tiny_config, tmp_path, caplog
):
    folder = run_folder(tmp_path / "my run")
    run: Any = SimpleNamespace(folder=folder, interrupted=False, stopped="", out_of_time=False)
    hub.fails.add("upload_folder")
    with caplog.at_level(logging.INFO, "flowrl"):
        publish(run, repository_of(pushed(tiny_config, folder)))
        (line,) = caplog.messages
        assert "the upload to me/my run failed: the network went away" in line
        assert f"flowrl export '{folder}' --to hub --repo-id 'me/my run'" in line
        caplog.clear()
        hub.fails.clear()
        publish(run, "me/x")
        run.stopped = "Stopped at iteration 5 by run.on_hacking"
        publish(run, "me/x")
        run.interrupted = True
        publish(run, "me/x")
        publish(run, None)  # another process
    assert caplog.messages[0] == "uploaded to https://huggingface.co/me/x"
    assert len(caplog.messages) == 3 and hub.requests[-1] == ("upload_folder", "me/x")
    assert all(push_later(folder, "me/x") in message for message in caplog.messages[1:])
    assert sum(request[0] == "upload_folder" for request in hub.requests) == 2


def test_a_finished_run_is_pushed_by_the_command(hub, tmp_path, flowrl):
    folder = run_folder(tmp_path / "run")
    with pytest.raises(UserError, match="not a safetensors file"):
        export_hub(str(folder), repository=None, private=False)
    assert push(folder, open_repository("me/other")) == "https://huggingface.co/me/other"
    assert set(hub.files) == {FILE, "README.md", "card/curve.png"}
    base, lora = "pipe = X.from_pretrained('base')", "('me/other', weight_name='x')"
    code = f"{base}\npipe.load_lora_weights{lora}\n"
    assert hub.files["README.md"].decode().endswith(code)
    assert "--to hub takes a run's folder" in flowrl("export", tmp_path, "--to", "hub")[2]
