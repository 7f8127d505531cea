"""Let flowrl ask a reward server that speaks pickle, as those of flow_grpo and verl-omni do.

    python pickle_bridge.py geneval --theirs http://127.0.0.1:18085 [--port 8400]

Runs beside their server, on its machine and in its environment: Python 3.8 and the standard
library suffice. flowrl then asks http://127.0.0.1:8400 for the reward `geneval`, in JSON; no pickle
travels further than between this file and their server. What that server answers is unpickled here
with lists, numbers and texts alone: a pickle that asks for anything else is an error.

KIND   what is sent, besides the images           what is taken of the answer
geneval     meta_datas, only_strict               scores (with --strict: strict_rewards)
unified     prompts                               outputs
deqa        -                                     outputs
"""

import argparse
import base64
import io
import json
import pickle
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BODY = 64 * 2**20
TIMEOUT = 120  # seconds, as their clients wait
# What numbers of numpy are made of; everything else in a pickle is refused.
HARMLESS = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "list"),
}


class Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries, and nothing that runs."""

    def find_class(self, module, name):
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError(f"their answer asks for {module}.{name}")
        return super().find_class(module, name)


def geneval(images, items, strict):
    metadata = [dict(item.get("metadata") or {}, prompt=item["prompt"]) for item in items]
    return {"images": images, "meta_datas": metadata, "only_strict": strict}


def unified(images, items, strict):
    return {"images": images, "prompts": [item["prompt"] for item in items]}


def deqa(images, items, strict):
    return {"images": images}


KINDS = {"geneval": geneval, "unified": unified, "deqa": deqa}
REQUIRED = {"geneval": ["tag", "include"]}
ABSENT = -10  # what geneval's server says where a prompt is none of its kinds


def taken(kind, strict, answer):
    """Return their scores as numbers, None where there is none."""
    names = ["outputs", "scores"]
    if kind == "geneval":
        names = ["strict_rewards" if strict else "scores"]
    found = next((answer[name] for name in names if name in answer), None)
    if found is None:
        raise ValueError(f"their answer has {sorted(answer)}, not {names}")
    values = [float(value) for value in found]
    absent = ABSENT if kind == "geneval" else None
    return [None if value != value or value == absent else value for value in values]


def ask(options, images, items):
    """Ask their server; return a score or None for each image."""
    body = pickle.dumps(KINDS[options.kind](images, items, options.strict))
    request = urllib.request.Request(options.theirs, data=body, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT) as reply:
            data = reply.read()
    except urllib.error.HTTPError as error:
        raise ValueError(f"{options.theirs} answered {error.code}") from error
    scores = taken(options.kind, options.strict, Plain(io.BytesIO(data)).load())
    if len(scores) != len(images):
        raise ValueError(f"{options.theirs} answered for {len(scores)} of {len(images)}")
    return scores


def answer(options, question):
    """Answer a question of flowrl's protocol, version 1."""
    items = question["items"]
    images = [base64.b64decode(item["image"], validate=True) for item in items]
    try:
        scores, error = ask(options, images, items), "their server gave no number"
    except Exception as problem:  # a missing score has a reason, and is never 0
        scores, error = [None] * len(items), f"{type(problem).__name__}: {problem}"
    results = [
        {"id": item["id"], "score": score, "error": error if score is None else None}
        for item, score in zip(items, scores)  # noqa: B905  # Python 3.8
    ]
    head = {"protocol": 1, "reward": options.name, "version": options.version}
    return dict(head, key=question["key"], results=results)


class Handler(BaseHTTPRequestHandler):
    options = None  # set by main
    timeout = 30

    def do_GET(self):
        if self.path == "/healthz":
            self.reply(200, {"status": "ready"})
        elif self.path == "/v1/info":
            reward = {
                "name": self.options.name,
                "version": self.options.version,
                "required_metadata": REQUIRED.get(self.options.kind, []),
            }
            self.reply(200, {"protocol": 1, "rewards": [reward], "codecs": ["png", "jpeg"]})
        else:
            self.reply(404, {"error": "there is /healthz, /v1/info and /v1/score"})

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        if self.path != "/v1/score" or not 0 < length <= MAX_BODY:
            return self.reply(413, {"error": f"POST /v1/score takes 1 to {MAX_BODY} bytes"})
        try:
            question = json.loads(self.rfile.read(length).decode())
            if question["protocol"] != 1 or question["reward"] != self.options.name:
                return self.reply(404, {"error": f"there is only {self.options.name}"})
            self.reply(200, answer(self.options, question))
        except Exception as error:
            self.reply(422, {"error": f"not understood: {error!r}"})

    def reply(self, status, content):
        data = json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def main(words=None):
    parser = argparse.ArgumentParser(description="flowrl's protocol for a reward server of pickles")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--theirs", required=True, help="address of the server of pickles")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--strict", action="store_true", help="geneval: strict_rewards")
    parser.add_argument("--name", help="of the reward; KIND by default")
    options = parser.parse_args(words)
    options.name = options.name or options.kind
    options.version = "bridge-1/" + options.kind + "/strict" * options.strict
    Handler.options = options
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    print(f"serving {options.name} at http://127.0.0.1:{server.server_port}")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
