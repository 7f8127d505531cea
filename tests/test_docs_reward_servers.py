"""The page of reward servers: its server runs, its recipe is valid, its commands exist."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.main import get_command

from flowrl.cli.rewards import reward_serve
from flowrl.config.rewards import RewardOptions
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.scoring.protocol import Info, Response, ScoreRequest
from flowrl.scoring.spec import load_reward
from rewards import geneval_rules as rules

PAGE = (Path(__file__).parents[1] / "docs" / "reward-servers.md").read_text(encoding="utf-8")
(SERVER,) = re.findall(r"```python server\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^flowrl (reward-serve .*)$", PAGE, re.MULTILINE)
STAND_IN = """
import reward_server

class Brightness:
    def __call__(self, picture, prompt):
        if prompt == "none":
            return None
        return float(picture.mean()) / 255

def score(model, pictures, prompts, metadata):
    if "bad" in prompts:
        raise RuntimeError("no face")
    return [model(x, p) for x, p in zip(pictures, prompts)]

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


def test_the_server_scores_a_run(url):
    remote = HTTPExecutor("imagereward", [url], micro_batch=4, timeout=5.0, deadline=10.0)
    images = torch.rand(10, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    images = images.mul(255).round() / 255
    scores, reasons = remote(images, ["p"] * 10, [{"a": [1]}] * 10)
    torch.testing.assert_close(scores, images.mean((1, 2, 3)))
    assert not reasons and remote.version == "ImageReward-v1.0/35 tokens"
    remote.close()


def test_the_server_tells_what_is_missing_and_lives_on(url):
    remote = HTTPExecutor("imagereward", [url], micro_batch=1, timeout=5.0, deadline=10.0)
    scores, reasons = remote(torch.ones(3, 3, 4, 4), ["bad", "none", "p"], [{}] * 3)
    remote.close()
    assert scores.isnan().tolist() == [True, True, False] and scores[2] == 1.0
    assert "RuntimeError: no face" in reasons[0] and "the model gave no number" in reasons[1]


def test_the_server_needs_old_python_and_two_packages_only():
    tree = ast.parse(SERVER, feature_version=(3, 8))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    others = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert others == {"numpy", "PIL", "ImageReward"}
    assert max(map(len, SERVER.splitlines())) <= 100


CLASSES = ("mouse", "cat", "dog")
AMOUNTS = st.lists(st.sampled_from([0.2, 0.5, 0.95]), max_size=3)
WANTED = st.lists(
    st.fixed_dictionaries({
        "class": st.sampled_from(["computer mouse", "cat", "dog"]),
        "count": st.integers(1, 3),
    }),
    min_size=1,
    max_size=2,
)  # fmt: skip


@given(
    scores=st.tuples(AMOUNTS, AMOUNTS, AMOUNTS),
    tag=st.sampled_from(["single_object", "two_object", "counting"]),
    include=WANTED,
    exclude=st.none() | WANTED,
)
def test_geneval_with_mmdet_judges_counts_as_the_reward_does(scores, tag, include, exclude):
    page = functions("geneval")
    boxes = [np.array([[0, 0, 1, 1, s] for s in its]).reshape(-1, 5) for its in scores]
    names = ["computer mouse", *CLASSES[1:]]
    found = [
        rules.Detection(box=(0, 0, 1, 1), score=s, name=name)
        for name, its in zip(names, scores, strict=True)
        for s in its
    ]
    wanted = {"tag": tag, "include": include} | ({} if exclude is None else {"exclude": exclude})
    objects = rules.by_class(found, 0.9 if tag == "counting" else 0.3)
    expected = rules.official(objects, include, exclude or [])
    assert page["rule"](CLASSES, boxes, wanted) == expected


def test_geneval_with_mmdet_has_no_score_for_what_it_cannot_see():
    rule = functions("geneval")["rule"]
    for tag in ("colors", "position", "color_attr"):
        assert rule(CLASSES, [], {"tag": tag, "include": []}) is None


def test_deqa_is_asked_about_pictures_and_scaled_to_1():
    class Model:
        def score(self, images):
            assert [image.size for image in images] == [(4, 3)] * 2
            return torch.tensor([1.0, 5.0])

    asked = [np.zeros((3, 4, 3), np.uint8)] * 2
    assert functions("deqa")["score"](Model(), asked, ["p"] * 2, [{}] * 2) == [0.2, 1.0]


def test_the_recipe_is_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    rewards = [RewardOptions.model_validate(entry) for entry in yaml.safe_load(text)["rewards"]]
    assert [reward.executor.kind for reward in rewards] == ["http", "http"]


def test_the_messages_are_those_that_travel():
    info, request, response = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    assert Info.model_validate(info).model_dump(mode="json") == info
    assert ScoreRequest.model_validate(request).model_dump(mode="json") == request
    assert Response.model_validate(response).model_dump(mode="json") == response


def test_the_version_on_the_page_is_the_one_that_is_served():
    told = set(re.findall(r'"version": "([^"]*)"', PAGE))
    engine = re.compile(r"rapidocr-[\d.]+")
    assert {engine.sub("rapidocr", text) for text in told} == {
        engine.sub("rapidocr", load_reward("ocr").version)
    }


def test_lines_are_not_longer_than_a_screen():
    """But for tables, whose rows are one line each."""
    prose = [line for line in PAGE.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 110


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_has_the_options_it_names(line):
    app = typer.Typer()
    app.command()(reward_serve)
    context = get_command(app).make_context("reward-serve", shlex.split(line)[1:])
    assert context.params["names"]


def test_every_option_of_executors_is_explained():
    from flowrl.config.rewards import HTTPOptions

    for name in set(HTTPOptions.model_fields) - {"kind"}:
        assert f"| `{name}` |" in PAGE
