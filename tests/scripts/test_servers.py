"""The reward server for GenEval's own detector, which runs in an environment of its own."""

import ast
import importlib.util
import random
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from flowrl.config.rewards import HTTPOptions
from flowrl.scoring.executors.http import HTTPExecutor
from flowrl.tiny.world import split_prompts
from flowrl_rewards import geneval_rules as rules

SERVERS = Path(__file__).parents[2] / "scripts" / "servers"


def server(name: str) -> ModuleType:
    path = SERVERS / f"{name}.py"
    ast.parse(path.read_text(), feature_version=(3, 8))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    attributes = {"judge": Scripted(module, found), "mode": "strict"}
    handler = type("ScriptedHandler", (module.Handler,), attributes)
    images = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{serving.server_port}"
        executor = HTTPExecutor("geneval_mmdet", HTTPOptions(urls=[url], deadline=20))
        try:
            other = {"tag": "ocr", "include": []}
            answer = executor.submit(images, ["a cat", "x"], [cat, other]).result()
            assert executor.version == "mask2former_swin-s/clip-L/strict"
        finally:
            executor.close()
            serving.shutdown()
            thread.join()
    assert answer.scores[0] == 1 and answer.scores[1].isnan()
    assert "the tag 'ocr' is none of single_object" in answer.reasons[1]
