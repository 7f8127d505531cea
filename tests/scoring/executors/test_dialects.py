"""Servers of other projects, played by the standard library after those projects' documentation."""

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image

from flowrl.cli import main
from flowrl.errors import UserError
from flowrl.scoring.executors.http import HTTPExecutor

IMAGES = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
PROMPTS, METADATA = ["dark", "bright"], [{"tag": "a"}, {}]


def brightness(text: str) -> float:
    image = Image.open(io.BytesIO(base64.b64decode(text))).convert("L")
    return image.getpixel((0, 0)) / 255


@contextmanager
def serving(get, post):
    """The address of a server that answers by `get` (path -> answer) and `post` (path, body)."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, answer):
            data = json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self._reply(get.get(self.path))

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(post(self.path, json.loads(body)))

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(name: str, url: str, dialect: str):
    executor = HTTPExecutor(name, [url], dialect=dialect, timeout=5, deadline=10)
    try:
        return executor.submit(IMAGES, PROMPTS, METADATA).result()
    finally:
        executor.close()


def unirl(path, body):
    assert path == "/score"
    results, errors = [], []
    for request in body["requests"]:
        (turn,), (reward,) = request["history"], request["required_rewards"]
        value = brightness(turn["image_b64"])
        parts = {"pickscore": {"pickscore": value}, "wise": {"wiscore": value, "Realism": 0.25}}
        broken = reward == "pickscore" and turn["text"] == "dark" and request["metadata"] is None
        results.append({} if broken else {reward: parts[reward]})
        errors.append({reward: "no GPU"} if broken else {})
    return {"results": results, "errors": errors}


UNIRL = {"/health": {"status": "ok"}, "/rewards": {"rewards": ["pickscore", "wise"]}}


def test_unirls_service_scores_by_reward_and_part():
    with serving(UNIRL, unirl) as url:
        assert asked("pickscore", url, "unirl").scores.tolist() == [0.0, 1.0]
        assert asked("wise/Realism", url, "unirl").scores.tolist() == [0.25, 0.25]
        several = asked("wise", url, "unirl")
        assert several.scores.isnan().all()
        assert "several parts: name one of wise/wiscore, wise/Realism" in several.reasons[0]


def test_what_unirls_service_could_not_score_is_missing_with_its_reason():
    with serving(UNIRL, unirl) as url:
        executor = HTTPExecutor("pickscore", [url], dialect="unirl", timeout=5, deadline=10)
        found = executor.submit(IMAGES, PROMPTS, [{}, {}]).result()
        executor.close()
    assert found.scores[0].isnan() and found.scores[1] == 1 and "no GPU" in found.reasons[0]


@pytest.mark.parametrize(
    "broken",
    [
        {"results": [{"pickscore": {"pickscore": None}}], "errors": [None]},
        {"results": [None], "errors": "out of memory"},
        {"results": [{"pickscore": "high"}], "errors": [{"pickscore": 3}]},
    ],
)
def test_a_broken_item_of_unirl_costs_no_other_item(broken):
    def post(path, body):
        whole = {"pickscore": {"pickscore": 0.5}}
        errors = broken["errors"]
        return {
            "results": [*broken["results"], whole],
            "errors": [*errors, {}] if isinstance(errors, list) else errors,
        }

    with serving(UNIRL, post) as url:
        found = asked("pickscore", url, "unirl")
    assert found.scores[0].isnan() and found.scores[1] == 0.5 and list(found.reasons) == [0]


def test_a_missing_score_of_flow_factory_costs_no_other_item():
    with serving({"/health": {}}, lambda path, body: {"rewards": [None, 0.5]}) as url:
        found = asked("mine", url, "flow_factory")
    assert found.scores[0].isnan() and found.scores[1] == 0.5


def flow_factory(path, body):
    assert path == "/compute" and body["prompt"] == PROMPTS and body["video"] is None
    return {"rewards": [brightness(text) for text in body["image"]]}


def test_flow_factorys_server_scores_a_list():
    with serving({"/health": {"status": "ok"}}, flow_factory) as url:
        assert asked("mine", url, "flow_factory").scores.tolist() == [0.0, 1.0]


def test_a_server_of_another_kind_is_an_error_that_says_so():
    with serving({"/rewards": {"rewards": ["clip"]}}, unirl) as url:
        with pytest.raises(UserError, match="does not serve it; it serves clip"):
            asked("pickscore", url, "unirl")
    with serving({"/rewards": ["?"], "/health": 1}, lambda path, body: {"scores": [1]}) as url:
        found = asked("mine", url, "flow_factory")
        assert found.scores.isnan().all() and "no JSON of scores" in found.reasons[0]
    with pytest.raises(UserError, match="dialect is one of flowrl, unirl, flow_factory"):
        HTTPExecutor("mine", ["http://127.0.0.1:1"], dialect="pickle")


def test_the_command_score_asks_a_server_in_its_dialect(tmp_path, capsys):
    for name, level in (("a", 0), ("b", 255)):
        Image.new("RGB", (8, 8), (level,) * 3).save(tmp_path / f"{name}.png")

    def post(path, body):
        return {"rewards": [brightness(text) for text in body["image"]]}

    words = ["score", str(tmp_path), "--reward", "mine", "--prompt", "x", "--json"]
    with serving({"/health": {}}, post) as url, pytest.raises(SystemExit) as end:
        main([*words, "--server", url, "--dialect", "flow_factory"])
    assert not end.value.code
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [row["mine"] for row in rows] == [0.0, 1.0]
    with pytest.raises(SystemExit) as end:
        main([*words, "--dialect", "unirl"])
    assert end.value.code and "without --server" in capsys.readouterr().err
