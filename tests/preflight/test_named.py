import shlex
import socket
import sys
import threading

import pytest
import uvicorn
import yaml

from flowrl.scoring.check import check_named
from flowrl.scoring.server import make_app
from flowrl.scoring.spec import BUILT_IN, load_reward

OFFLINE = (
    "geneval",
    "ocr",
    "similarity",
    "diversity",
    "compressibility",
    "incompressibility",
    "brightness",
    "tiny_colors",
    "tiny_quality",
)
LACKING = {  # what the others say on a machine without weights, packages and servers
    "pickscore": "run `hf download yuvalkirstain/PickScore_v1",
    "clipscore": "run `hf download openai/clip-vit-large-patch14",
    "hpsv2": "run `hf download xswu/HPSv2",
    "aesthetic": "run `hf download trl-lib/ddpo-aesthetic-predictor",
    "imagereward": "pip install image-reward",
    "hpsv3": "pip install hpsv3",
    "vlm_judge": "a judge needs the server",
    "vlm_questions": "a judge needs the server",
    "unified_reward": "a judge needs the server",
    "pairwise": "a judge needs the server",
    "preference": "read from a store of pairs",
}


@pytest.mark.parametrize("name", OFFLINE)
def test_every_built_in_reward_that_needs_nothing_passes(name):
    checked = check_named(name)
    assert [finding.state for finding in checked.findings] == ["ok"], checked.findings
    assert "right" in checked.findings[0].detail  # it has fixtures
    assert checked.version and checked.latency > 0


def test_every_built_in_reward_passes_or_lacks_something():
    assert sorted((*OFFLINE, *LACKING)) == sorted(BUILT_IN)


@pytest.mark.parametrize("name", LACKING)
def test_every_other_built_in_reward_says_in_one_line_what_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for package in ("ImageReward", "hpsv3"):
        monkeypatch.setitem(sys.modules, package, None)
    (finding,) = check_named(name).findings
    assert finding.state == "missing" and LACKING[name] in finding.detail, finding
    assert "\n" not in finding.detail


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("ocr", {"mode": "nope"}, "OCR mode is one of"),
        ("nothing", None, "unknown reward 'nothing'"),
        ("nothing:Here", None, "No module named 'nothing'"),
    ],
)
def test_a_reward_that_cannot_be_made_is_a_problem(name, args, says):
    (finding,) = check_named(name, args).findings
    assert finding.state == "problem" and says in finding.detail


def test_arguments_that_a_reward_must_have_are_named(tmp_path, monkeypatch):
    (tmp_path / "needy_reward.py").write_text("class Needy:\n    def __init__(self, model): ...\n")
    monkeypatch.chdir(tmp_path)
    (finding,) = check_named("needy_reward:Needy").findings
    assert finding.state == "missing" and "'model'" in finding.detail
    assert finding.remedy == "flowrl reward-check needy_reward:Needy --args '{model: VALUE}'"


@pytest.mark.parametrize("name", ["vlm_judge", "vlm_questions", "unified_reward", "pairwise"])
def test_a_judge_without_a_server_shows_the_argument_that_it_needs(name):
    (finding,) = check_named(name).findings
    assert finding.state == "missing"
    words = shlex.split(finding.remedy)
    assert words[:4] == ["flowrl", "reward-check", name, "--args"]
    assert callable(load_reward(name, yaml.safe_load(words[4])))


def test_a_judge_without_the_package_openai_is_missing_and_not_wrong(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    (finding,) = check_named("vlm_judge", {"server": {"model": "m"}}).findings
    assert finding.state == "missing" and "pip install" in finding.detail


def test_ocr_without_the_package_rapidfuzz_is_missing_and_not_wrong(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    (finding,) = check_named("ocr").findings
    assert finding.state == "missing" and "rapidfuzz" in finding.detail


@pytest.mark.parametrize(
    ("text", "state", "says"),
    [
        ("import not_there_at_all", "missing", "not_there_at_all"),
        ("raise ImportError('needs the package cv2')", "missing", "needs the package cv2"),
        ("from math import tau2", "problem", "cannot import name 'tau2'"),
        ("undefined", "problem", "NameError"),
        ("def (", "problem", "SyntaxError"),
        ("raise TypeError('not now')", "problem", "TypeError: not now"),
    ],
)
def test_what_ones_own_module_lacks_is_told_apart_from_what_is_wrong_in_it(
    text, state, says, tmp_path, monkeypatch
):
    (tmp_path / "half_made.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = check_named("half_made:mine").findings
    assert finding.state == state and says in finding.detail


@pytest.fixture(scope="module")
def url():
    listening = socket.create_server(("127.0.0.1", 0))
    rewards = {"ocr": load_reward("ocr", {"mode": "strict"}), "bright": load_reward("brightness")}
    server = uvicorn.Server(uvicorn.Config(make_app(rewards), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_a_served_reward_is_asked_with_the_fixtures_of_the_one_here(url):
    checked = check_named("ocr", {"mode": "strict"}, urls=[url])
    assert [finding.state for finding in checked.findings] == ["ok"], checked.findings
    assert "fixtures right" in checked.findings[0].detail


def test_a_server_with_another_version_is_a_problem(url):
    findings = check_named("ocr", urls=[url]).findings
    assert any("the server's version is 'ocr" in finding.detail for finding in findings)


def test_a_served_reward_that_is_unknown_here_gets_plain_pictures(url):
    (finding,) = check_named("bright", urls=[url]).findings
    assert finding.state == "ok" and "plain pictures" in finding.detail


def test_no_server_is_missing_within_its_deadline():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (finding,) = check_named("ocr", urls=[address], deadline=1.0).findings
    assert finding.state == "missing" and "cannot be reached" in finding.detail
