"""Nobody can read a judge's key in what a run writes, logs or says, nor in what is made of it."""

import json
import logging

import pytest
from chat_servers import completion, images_of, redness, scripted, text_of
from PIL import Image

from flowrl.api import align, evaluate, gallery, score
from flowrl.errors import UserError

KEY = "sk-proj-Zq8wLx7RtYuIoPaSdFgHjKl1234"


class Judge:
    """How red a picture is, or how blue where blue is asked for; every fourth question fails.

    Whatever it says holds the key.
    `refusal` is its answer to everything, once it is set.
    """

    def __init__(self) -> None:
        self.count, self.refusal = 0, None

    def __call__(self, body: dict):
        self.count += 1
        if self.refusal is not None:
            return self.refusal
        if self.count % 4 == 0:
            return error(500, f"upstream said: Authorization: Bearer {KEY}")
        (image,) = images_of(body)
        red = redness(image) if "a blue square" not in text_of(body) else 1 - redness(image)
        return completion(f"With your {KEY}: <Score>{5 * red:.4f}</Score>")


def error(status: int, message: str, **more: str) -> tuple[int, dict, bytes]:
    return status, {}, json.dumps({"error": {"message": message, **more}}).encode()


@pytest.mark.slow
def test_no_key_is_in_any_file_log_or_message_of_a_run_and_of_what_is_made_of_it(
    tiny_config, tmp_path, caplog, capfd, monkeypatch
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("flowrl_rewards.chat.client.PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge, messages = Judge(), []
    with scripted(judge) as server:

        def config_for(name: str):
            chat = {"model": "m", "base_url": server.url, "api_key_env": "JUDGE_KEY"}
            chat |= {"in_flight": 1, "cache": str(tmp_path / "answers" / name)}
            return tiny_config(
                rollout={"prompts_per_iteration": 1, "num_inference_steps": 2},
                rewards=[{"name": "vlm_judge", "args": {"rubric": "text", "server": chat}}],
                evaluation={
                    "prompts": "tiny:geneval:test", "num_images": 4, "num_inference_steps": 2,
                },
                run={"iterations": 1, "sample_every": 1, "output_dir": str(tmp_path / name)},
            )  # fmt: skip

        config = config_for("run")
        align(config)
        assert f"Bearer {KEY}" in server.keys
        count = len(server.asked)
        messages.append(repr(evaluate(config)))
        assert len(server.asked) == count, "the run's own evaluation asked the same"
        Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
        args = [config.rewards[0].args]
        messages.append(repr(score([tmp_path / "red.png"], ["vlm_judge"], "red", args)))
        gallery(tmp_path / "run", base=None, lora=None, prompts=None, count=2, seed=7,
                output_dir=None)  # fmt: skip
        assert len(server.asked) > count, "images of another seed are new"
        for name, refusal, said in (
            ("empty", error(429, f"{KEY[:20]} is empty", code="insufficient_quota"), "quota"),
            ("wrong", error(401, f"Incorrect API key provided: {KEY}"), "does not take the key"),
        ):
            judge.refusal = refusal
            with pytest.raises(UserError, match=said) as caught:
                align(config_for(name))
            messages += [str(caught.value), repr(caught.value)]
    shown, files = capfd.readouterr(), [p for p in tmp_path.rglob("*") if p.is_file()]
    messages += [shown.out, shown.err, *(record.getMessage() for record in caplog.records)]
    messages += [str(path) for path in files] + [p.read_bytes().decode("latin-1") for p in files]
    parts = {KEY[i : i + 8] for i in range(len(KEY) - 7)}
    assert not [text for text in messages if any(part in text for part in parts)]
