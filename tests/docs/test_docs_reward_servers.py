"""The page of reward servers: its server runs, its recipe is valid, its commands exist."""

import ast
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from flowrl.config.rewards import RewardOptions
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.protocol import Info, Response, ScoreRequest
from flowrl_rewards import geneval_rules as rules

PAGE = (Path(__file__).parents[2] / "docs" / "reward-servers.md").read_text(encoding="utf-8")
(SERVER,) = re.findall(r"```python server\n(.*?)```", PAGE, re.DOTALL)

STAND_IN = """
import reward_server

class Brightness:
    def __call__(self, image, prompt):
        if prompt == "none":
            return None
        return float(image.mean()) / 255

def score(model, images, prompts, metadata):
    if "bad" in prompts:
        raise RuntimeError("no face")
    return [model(x, p) for x, p in zip(images, prompts)]

reward_server.load = Brightness
reward_server.score = score
reward_server.main(0)
"""


def functions(title: str) -> dict:
    """Those that take the place of the page's server's own."""
    (text,) = re.findall(rf"```python {title}\n(.*?)```", PAGE, re.DOTALL)
    ast.parse(text, feature_version=(3, 8))
    assert max(map(len, text.splitlines())) <= 100
    found = {"Image": Image}
    exec(text, found)
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The page's server, as it stands, with another model in it."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "reward_server.py").write_text(SERVER)
    (folder / "mine.py").write_text(STAND_IN)
    command = [sys.executable, "mine.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.kill()


def test_the_server_scores_a_run_tells_what_is_missing_and_lives_on(url):
    remote = HTTPExecutor("imagereward", [url], micro_batch=4, timeout=5.0, deadline=10.0)
    images = torch.rand(10, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    images = images.mul(255).round() / 255
    scores, reasons = remote(images, ["p"] * 10, [{"a": [1]}] * 10)
    torch.testing.assert_close(scores, images.mean((1, 2, 3)))
    assert not reasons and remote.version == "ImageReward-v1.0/35 tokens"
    remote.close()
    remote = HTTPExecutor("imagereward", [url], micro_batch=1, timeout=5.0, deadline=10.0)
    scores, reasons = remote(torch.ones(3, 3, 4, 4), ["bad", "none", "p"], [{}] * 3)
    remote.close()
    assert scores.isnan().tolist() == [True, True, False] and scores[2] == 1.0
    assert "RuntimeError: no face" in reasons[0] and "the model gave no number" in reasons[1]


CLASSES = ("mouse", "cat", "dog")


def test_geneval_with_mmdet_judges_counts_as_the_reward_does():
    rule, amounts = functions("geneval")["rule"], [(), (0.2, 0.5), (0.95, 0.95), (0.5, 0.95, 0.2)]
    mouse = {"class": "computer mouse", "count": 1}
    wanted = [([mouse], None), ([mouse, {"class": "cat", "count": 2}], []),
              ([{"class": "cat", "count": 1}], [mouse | {"count": 2}])]  # fmt: skip
    names = ("computer mouse", *CLASSES[1:])
    cases = product(product(amounts, amounts, [()]), ("two_object", "counting"), wanted)
    for scores, tag, (include, exclude) in cases:
        boxes = [np.array([[0, 0, 1, 1, s] for s in its]).reshape(-1, 5) for its in scores]
        found = [
            rules.Detection(box=(0, 0, 1, 1), score=s, name=name)
            for name, its in zip(names, scores, strict=True)
            for s in its
        ]
        data = {"tag": tag, "include": include} | ({} if exclude is None else {"exclude": exclude})
        objects = rules.by_class(found, 0.9 if tag == "counting" else 0.3)
        expected = rules.official(objects, include, exclude or [])
        assert rule(CLASSES, boxes, data) == expected, (scores, data)


def test_the_recipe_and_the_messages_are_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    rewards = [RewardOptions.model_validate(entry) for entry in yaml.safe_load(text)["rewards"]]
    assert [reward.executor.kind for reward in rewards] == ["http", "http"]
    info, request, response = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    assert Info.model_validate(info).model_dump(mode="json") == info
    assert ScoreRequest.model_validate(request).model_dump(mode="json") == request
    assert Response.model_validate(response).model_dump(mode="json") == response
