"""Runs whose rewards are judges: what ends them, what they ask again, and what nobody may read."""

import json
import logging
import sys
from pathlib import Path

import pytest
from PIL import Image

from flowrl.api import align, evaluate, gallery, score
from flowrl.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
from chat_servers import Scripted, completion, images_of, redness, scripted, text_of

ITERATIONS = 4
KEY = "sk-proj-Zq8wLx7RtYuIoPaSdFgHjKl1234"


class Judge:
    """How red a picture is, or how blue where blue is asked for. Whatever it says holds the key.

    left: questions until its account is empty. faults: answer 500 to every fourth.
    """

    def __init__(self, left: int = 10**6, faults: bool = False):
        self.left, self.faults, self.count, self.wrong = left, faults, 0, 0

    def __call__(self, body: dict):
        self.count += 1
        if self.wrong:
            return self.wrong, {}, self._error(f"Incorrect API key provided: {KEY}")
        if self.faults and self.count % 4 == 0:
            return 500, {}, self._error(f"upstream said: Authorization: Bearer {KEY}")
        if self.left <= 0:
            return 429, {}, self._error(f"{KEY[:20]} is empty", code="insufficient_quota")
        self.left -= 1
        (image,) = images_of(body)
        red = redness(image) if "a blue square" not in text_of(body) else 1 - redness(image)
        said = completion(f"With your {KEY}: <Score>{5 * red:.4f}</Score>")
        return said | {"usage": {"total_tokens": 100}}

    @staticmethod
    def _error(message: str, **more: str) -> bytes:
        return json.dumps({"error": {"message": message, **more}}).encode()


@pytest.fixture
def config_for(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def make(name: str, server: Scripted, staleness: int = 0, limits: dict | None = None, **more):
        chat = {"model": "m", "base_url": server.url, "api_key_env": "JUDGE_KEY", "in_flight": 1}
        chat |= {"cache": str(tmp_path / "answers" / name)} | (limits or {})
        reward = {"name": "vlm_judge", "args": {"rubric": "text", "server": chat}}
        rollout = {
            "prompts_per_iteration": 1, "group_size": 4, "num_inference_steps": 2,
            "batch_size": 4, "tree": {"kind": "ode"}, "staleness": staleness,
        }  # fmt: skip
        run = {"iterations": ITERATIONS, "checkpoint_every": 9, "trackers": []}
        return tiny_config(**{
            "objective": {"kind": "nft", "noising": {"count": 2}},
            "rollout": rollout,
            "run": run | {"sample_every": 0, "output_dir": str(tmp_path / name)},
            "rewards": [reward | {"executor": {"kind": "inline", "background": True}}],
        } | more)  # fmt: skip

    return make


def assert_hidden(texts: list[str]) -> None:
    """No 8 characters of the key in a row are in any text."""
    for text in texts:
        assert not [i for i in range(len(KEY) - 7) if KEY[i : i + 8] in text]


def written(folder: Path) -> list[str]:
    """Return the names and the bytes of all files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files] + [path.read_bytes().decode("latin-1") for path in files]


@pytest.mark.slow
def test_no_key_is_in_any_file_log_or_message_of_a_run_and_of_what_is_made_of_it(
    config_for, load_tiny, tmp_path, caplog, capfd, monkeypatch
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("flowrl_rewards.chat.client.PAUSE_S", 0.01)
    messages = []
    changes = {
        "evaluation": {"prompts": "tiny:geneval:test", "num_images": 4, "num_inference_steps": 2},
    }
    judge = Judge(faults=True)
    with scripted(judge) as server:
        config = config_for("run", server, **changes)
        run = config.run.model_copy(update={"iterations": 1, "sample_every": 1})
        config = config.model_copy(update={"run": run})
        align(config)
        assert f"Bearer {KEY}" in server.keys
        count = len(server.asked)
        first = evaluate(config)
        assert evaluate(config) == first
        assert len(server.asked) == count, "the run's own evaluation asked the same"
        Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
        args = [config.rewards[0].args]
        messages += [repr(first), repr(score([tmp_path / "red.png"], ["vlm_judge"], "red", args))]
        assert len(server.asked) > count
        count = len(server.asked)
        gallery(tmp_path / "run", base=None, lora=None, prompts=None, count=2, seed=7,
                output_dir=None)  # fmt: skip
        assert len(server.asked) > count, "images of another seed are new"
        judge.left = 0  # the account is empty, and then the key is wrong
        for name, said in (("empty", "quota is used up"), ("wrong", "does not take the key")):
            with pytest.raises(UserError, match=said) as caught:
                align(config_for(name, server), pipeline=load_tiny())
            messages += [str(caught.value), repr(caught.value)]
            judge.wrong = 401
    shown = capfd.readouterr()
    texts = [shown.out, shown.err, *messages, *(r.getMessage() for r in caplog.records)]
    assert_hidden([*texts, *written(tmp_path)])
