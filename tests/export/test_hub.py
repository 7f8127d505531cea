"""What leaves this machine: a LoRA, its card, its images and recipe, and nothing private."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.api import align, repository_of
from flowrl.backbones.lora_files import FILE
from flowrl.cli import main
from flowrl.config import config_yaml, load_config, parse_config
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError
from flowrl.export.hub import open_repository, public, public_config, publish, push, push_later

TOKEN = "hf_secret"


class Hub:
    """Stands for the Hub: remembers what it was asked for, and the files that it was given."""

    def __init__(self):
        self.asked, self.files, self.fails, self.there = [], {}, set(), set()

    def create_repo(self, name, *, private, exist_ok, repo_type):
        self.asked.append(("create_repo", name, private))
        assert exist_ok and repo_type == "model"
        if "write" in self.fails and name not in self.there:  # as the client: not where it is there
            raise PermissionError("403 Forbidden: this token may only read\nRequest ID: 1")
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def auth_check(self, name, *, repo_type=None, token=None, write=False):
        assert repo_type == "model" and write
        self.asked.append(("auth_check", name))
        if "write" in self.fails:
            raise PermissionError("403 Forbidden: no write access\nRequest ID: 2")

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, **_):
        from huggingface_hub.utils import filter_repo_objects

        self.asked.append(("upload_folder", repo_id))
        if "upload_folder" in self.fails:
            raise ConnectionError("the network went away")
        paths = [p for p in Path(folder_path).rglob("*") if p.is_file()]
        names = [p.relative_to(folder_path).as_posix() for p in paths]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            self.files[name] = (Path(folder_path) / name).read_bytes()


@pytest.fixture
def hub(monkeypatch) -> Hub:
    """A Hub that is there, and a token for it."""
    import huggingface_hub
    from huggingface_hub import constants

    found = Hub()
    for name in ("create_repo", "upload_folder"):
        answer = getattr(found, name)
        call = lambda _, *args, answer=answer, **how: answer(*args, **how)  # noqa: E731
        monkeypatch.setattr(huggingface_hub.HfApi, name, call)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "auth_check",
        lambda _, name, *, repo_type=None, token=None, write=False: found.auth_check(
            name, repo_type=repo_type, token=token, write=write
        ),
    )  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return found


def pushed(tiny_config, folder: Path, **run):
    """Of a run that is pushed at its end."""
    return tiny_config(run={"output_dir": str(folder), "push_to_hub": True} | run)


def test_what_is_uploaded_as_configuration_is_one(hub, tiny_config, tmp_path):
    config = tiny_config(run={"output_dir": str(tmp_path / "a b" / "run")})
    again = load_yaml(public_config(config_yaml(config)))
    assert again["run"]["output_dir"] == "run"
    own = pushed(tiny_config, tmp_path / "run", hub_model_id="me/mine")
    told = load_yaml(public_config(config_yaml(own)))["run"]
    assert (told["push_to_hub"], told["hub_model_id"]) == (False, None)
    named = parse_config(again).model_copy(update={"run": config.run, "pipeline": config.pipeline})
    assert named == config


def test_values_keep_what_says_nothing_of_the_machine():
    for value, told in [
        ("/data/me/prompts.txt", "prompts.txt"),
        ("/data/me/mine.py:Reward", "mine.py:Reward"),
        ("C:\\Users\\me\\prompts.txt", "prompts.txt"),
        ("http://me:secret@host:8000/v1", "http://HOST:PORT"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        ("HTTPS://huggingface.co.evil.com/a", "http://HOST:PORT"),
        ("Http://me:secret@host/v1", "http://HOST:PORT"),
        ("file:///data/me/prompts.txt", "prompts.txt"),
        ("json:/data/me/prompts", "json:prompts"),
        ("hf:/data/me/prompts", "hf:prompts"),
        ("hf:me/prompts:train[:100]", "hf:me/prompts:train[:100]"),
        ("s3://key:secret@bucket/a/prompts.jsonl", "s3://HOST/prompts.jsonl"),
        ("redis://127.0.0.1:6379/0", "redis://HOST/0"),
        ("s3://bucket/prompts.jsonl", "s3://bucket/prompts.jsonl"),
        ("../../me/prompts.txt", "prompts.txt"),
        ("runs/../../me/mine.py:Reward", "mine.py:Reward"),
        ("~me/prompts.txt", "prompts.txt"),
        ("~/prompts.txt", "~/prompts.txt"),
        ("gpu7.lab.org:8000", "HOST:PORT"),
        ("localhost:8000/v1", "HOST:PORT"),
        ("127.0.0.1:8000", "HOST:PORT"),
        ("[::1]:8000", "HOST:PORT"),
        ("mine:Reward", "mine:Reward"),
        ("a clock at 10:30", "a clock at 10:30"),
        ("a photo of 16:9", "a photo of 16:9"),
        (
            {
                "API_Key": "sk-1",
                "tokens": ["a"],
                "db_password": "b",
                "client": {"Secret": {"a": "b"}},
            },
            {"API_Key": None, "tokens": None, "db_password": None, "client": {"Secret": None}},
        ),
        (
            {"max_tokens": 5, "api_key_env": "MY_KEY", "token_env": "hf_secret"},
            {"max_tokens": 5, "api_key_env": "MY_KEY", "token_env": None},
        ),
        ("runs/quickstart", "runs/quickstart"),
        ("tiny:ocr:test", "tiny:ocr:test"),
        (
            {"urls": ["http://localhost:1"], "n": [1, None, True]},
            {"urls": ["http://HOST:PORT"], "n": [1, None, True]},
        ),
    ]:
        assert public(value) == told


def test_nothing_is_loaded_when_it_could_not_be_pushed(hub, tiny_config, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr("flowrl.api.build_learner", lambda *_: pytest.fail("was loaded"))
    config = pushed(tiny_config, tmp_path / "run", hub_model_id="us/named")
    hub.fails.add("write")
    with pytest.raises(UserError, match="us/named: 403 Forbidden: this token may only read; set"):
        align(config)
    hub.there.add("us/named")
    with pytest.raises(UserError, match="us/named: 403 Forbidden: no write access; set HF_TOKEN"):
        align(config)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="there is no token for the Hub; set HF_TOKEN to a token"):
        align(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set; unset it"):
        align(config)
    made = ("create_repo", "us/named", None)
    assert hub.asked == [made, made, ("auth_check", "us/named")]


def run_folder(folder: Path) -> Path:
    """Of a run, as far as the upload looks at it."""
    (folder / "card").mkdir(parents=True)
    for name in (FILE, "card/curve.png", "state.safetensors", "metrics.jsonl", ".env"):
        (folder / name).write_bytes(b"x")
    (folder / "README.md").write_text("---\nlicense: mit\n---\npipe.load_lora_weights('/a/b')\n")
    return folder


def test_a_failed_upload_loses_nothing_and_says_how_to_push_later(
    hub, tiny_config, tmp_path, caplog
):
    folder = run_folder(tmp_path / "my run")
    run: Any = SimpleNamespace(folder=folder, interrupted=False, stopped="")
    config = pushed(tiny_config, folder)
    hub.fails.add("upload_folder")
    with caplog.at_level(logging.INFO, "flowrl"):
        publish(run, repository_of(config))
    (line,) = caplog.messages
    assert "the upload to me/my run failed: the network went away" in line
    assert f"flowrl export '{folder}' --format hub --repo-id 'me/my run'" in line
    caplog.clear()
    hub.fails.clear()
    with caplog.at_level(logging.INFO, "flowrl"):
        publish(run, "me/x")
        run.stopped = "Stopped at iteration 5 by run.stop_when_hacking"
        publish(run, "me/x")
        run.interrupted = True
        publish(run, "me/x")
    later = f"and is not uploaded; {push_later(folder, 'me/x')}"
    assert caplog.messages == [
        "uploaded to https://huggingface.co/me/x",
        f"the run was ended by run.stop_when_hacking {later}",
        f"the run was interrupted {later}",
    ]


def test_only_the_main_process_uploads_and_a_repository_may_be_private(hub, tiny_config, tmp_path):
    folder = run_folder(tmp_path / "run")
    run: Any = SimpleNamespace(folder=folder, interrupted=False, stopped="")
    publish(run, None)  # another process
    assert hub.asked == []
    assert repository_of(pushed(tiny_config, run.folder, hub_private=True)) == "me/run"
    assert hub.asked == [("create_repo", "run", True), ("auth_check", "me/run")]


def test_a_finished_run_is_pushed_by_the_command(hub, tmp_path, capsys):
    folder = run_folder(tmp_path / "run")
    with pytest.raises(UserError, match="not a safetensors file"):
        from flowrl.export.formats import export_hub

        export_hub(str(folder), repository=None, private=False)
    assert push(folder, open_repository("me/other")) == "https://huggingface.co/me/other"
    assert set(hub.files) == {FILE, "README.md", "card/curve.png"}
    assert hub.files["README.md"].endswith(b"pipe.load_lora_weights('me/other')\n")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), "--format", "hub"])
    assert "--format hub takes a run's folder" in capsys.readouterr().err


def test_options_have_the_names_of_diffusers_scripts():
    from flowrl.config.arguments import sort_arguments

    words = [
        "quickstart",
        "--push_to_hub",
        "--hub_model_id",
        "me/x",
        "--revision=v1",
        "--seed",
        "3",
    ]
    request = sort_arguments(words)
    assert request.recipe == "quickstart"
    config = load_config("quickstart", request.overrides)
    assert config.run.push_to_hub and config.run.hub_model_id == "me/x"
    assert (config.pipeline.revision, config.run.seed) == ("v1", 3)
    assert sort_arguments(["--push-to-hub"]).overrides == ["run.push_to_hub=true"]
    assert sort_arguments(["--push_to_hub", "false", "a"]).overrides == ["run.push_to_hub=false"]
    assert sort_arguments(["--push_to_hub", "quickstart"]).recipe == "quickstart"
    capital = sort_arguments(["--push_to_hub", "True", "quickstart"])
    assert (capital.recipe, capital.overrides) == ("quickstart", ["run.push_to_hub=true"])
    for words in (["--hub_token", TOKEN], [f"--hub-token={TOKEN}"]):
        with pytest.raises(UserError, match="set HF_TOKEN in the environment") as told:
            sort_arguments(words)
        assert TOKEN not in str(told.value)
