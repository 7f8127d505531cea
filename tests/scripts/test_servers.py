"""The servers that run elsewhere: the bridge to servers of pickles, GenEval's own detector."""

import ast
import importlib.util
import io
import pickle
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.tiny.world import split_prompts
from flowrl_rewards import geneval_rules as rules

SERVERS = Path(__file__).parents[2] / "scripts" / "servers"
IMAGES = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
METADATA = [{"tag": "counting", "include": []}, {"tag": "colors", "include": []}]


def server(name: str) -> ModuleType:
    path = SERVERS / f"{name}.py"
    ast.parse(path.read_text(), feature_version=(3, 8))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Running:
    """A server of the standard library, in a thread."""

    def __init__(self, handler: type):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def __enter__(self) -> str:
        return self.url

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Theirs(BaseHTTPRequestHandler):
    """flow_grpo's servers: a pickle in, a pickle out."""

    answer: object = None

    def do_POST(self):
        asked = pickle.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pixels = [
            Image.open(io.BytesIO(data)).getpixel((0, 0))[0] / 255 for data in asked["images"]
        ]
        if "meta_datas" in asked:
            assert [m["tag"] for m in asked["meta_datas"]] == ["counting", "colors"]
            assert [m["prompt"] for m in asked["meta_datas"]] == ["a", "b"]
            answer = {"scores": [-10, 0.75], "strict_rewards": pixels}
        else:
            answer = {"outputs": pixels}
        data = pickle.dumps(self.answer or answer)
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def asked(module: ModuleType, name: str, url: str, *words: str):
    """What flowrl gets through the bridge from the server of pickles at `url`."""
    from argparse import Namespace

    options = Namespace(kind=name, theirs=url, strict="--strict" in words, name=name, version="1")
    handler = type("Own", (module.Handler,), {"options": options})
    with Running(handler) as bridge:
        executor = HTTPExecutor(name, [bridge], timeout=5, deadline=10)
        try:
            return executor.submit(IMAGES, ["a", "b"], METADATA).result()
        finally:
            executor.close()


def test_the_bridge_gives_what_their_servers_answer_and_absent_scores_as_missing():
    module = server("pickle_bridge")
    with Running(Theirs) as url:
        found = asked(module, "geneval", url)
        assert found.scores[0].isnan() and found.scores[1] == 0.75
        assert asked(module, "geneval", url, "--strict").scores.tolist() == [0.0, 1.0]
        assert asked(module, "unified", url).scores.tolist() == [0.0, 1.0]
        assert asked(module, "deqa", url).scores.tolist() == [0.0, 1.0]


def test_the_bridge_runs_nothing_that_a_pickle_asks_for(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    module = server("pickle_bridge")
    bad = type("Bad", (Theirs,), {"answer": Trap()})
    with Running(bad) as url:
        found = asked(module, "deqa", url)
    assert found.scores.isnan().all() and "their answer asks for" in found.reasons[0]
    assert not (tmp_path / "ran").exists()
    short = type("Short", (Theirs,), {"answer": {"outputs": [1.0]}})
    with Running(short) as url:
        assert "answered for 1 of 2" in asked(module, "deqa", url).reasons[0]


@pytest.mark.parametrize("answer", [{"rewards": [1, 2]}, {"outputs": ["x", "y"]}])
def test_an_answer_of_another_kind_is_missing_with_its_reason(answer):
    other = type("Other", (Theirs,), {"answer": answer})
    with Running(other) as url:
        found = asked(server("pickle_bridge"), "deqa", url)
    assert found.scores.isnan().all() and found.reasons[0]


# --- GenEval with mmdet ---------------------------------------------------------------------------


def scenes(count: int):
    """Prompts of all six kinds, and random objects that answer them more or less."""
    rng = random.Random(0)
    for index in range(count):
        tag = rules.TAGS[index % 6]
        wanted = rng.choice(split_prompts(tag, "train"))
        found = []
        for _ in range(rng.randint(0, 6)):
            x, y, side = rng.uniform(0, 50), rng.uniform(0, 50), rng.uniform(4, 20)
            entry = rng.choice(wanted["include"])
            name = entry["class"] if rng.random() < 0.8 else "star"
            color = entry.get("color", "red") if rng.random() < 0.8 else "blue"
            box, score = (x, y, x + side, y + side), rng.choice([0.2, 0.5, 0.95])
            found.append(rules.Detection(box=box, score=score, name=name, color=color))
        yield wanted, found


class Scripted:
    """A judge whose detector and colours are told."""

    def __init__(self, module: ModuleType, found):
        self.module, self.found = module, found

    def detect(self, image):
        for one in self.found:
            yield one.name, self.module.Found(one.box, one.score, color=None)

    def name_colors(self, image, name, found):
        told = {(d.name, d.box, d.score): d.color for d in self.found}
        return [told[name, one.box, one.score] for one in found]


def test_the_rules_of_the_mmdet_server_are_those_of_the_reward():
    module = server("geneval_mmdet")
    image = np.zeros((64, 64, 3), np.uint8)
    seen: dict = {mode: set() for mode in module.MODES}
    own_keys = ("size", "place")  # of the tiny world, which that server does not know
    for asked, found in scenes(600):
        include = [{k: e[k] for k in e if k not in own_keys} for e in asked["include"]]
        wanted = asked | {"include": include}
        least = 0.9 if wanted["tag"] == "counting" else 0.3
        objects = rules.by_class(found, least)
        expected = {
            "partial": rules.partial(objects, wanted["include"]),
            "strict": rules.strict(objects, wanted["include"]),
            "official": rules.official(objects, wanted["include"], wanted.get("exclude") or []),
        }
        for mode, score in expected.items():
            own = module.judged(Scripted(module, found), image, wanted, mode)
            assert own == pytest.approx(score), (mode, wanted, found)
            seen[mode].add(score)
    assert seen["strict"] == seen["official"] == {0.0, 1.0} and len(seen["partial"]) > 5
    assert module.judged(Scripted(module, []), image, {"tag": "ocr"}, "partial") is None


def test_the_mmdet_server_speaks_the_protocol_and_gives_reasons():
    module = server("geneval_mmdet")
    cat = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
    found = [rules.Detection(box=(0, 0, 9, 9), score=0.9, name="cat")]
    own = type("Own", (module.Handler,), {"judge": Scripted(module, found), "mode": "strict"})
    with Running(own) as url:
        executor = HTTPExecutor("geneval_mmdet", [url], timeout=5, deadline=10)
        try:
            result = executor.submit(IMAGES, ["a cat", "x"], [cat, {"tag": "ocr", "include": []}])
            answer = result.result()
            assert executor.version == "mask2former_swin-s/clip-L/strict"
        finally:
            executor.close()
    assert answer.scores[0] == 1 and answer.scores[1].isnan()
    assert "the tag 'ocr' is none of single_object" in answer.reasons[1]
