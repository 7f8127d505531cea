"""GenEval with its own detector, mmdet's Mask2Former, as a reward server for flowrl.

    python geneval_mmdet.py --config mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.py \\
        --weights mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.pth [--mode partial] [--port 8400]

For the published environment: Python 3.8, mmdet 2.x, open_clip, numpy and Pillow; flowrl is not
needed. All six kinds of prompt; modes: partial (what Flow-GRPO trains on), strict (all of it) and
official (the published verdict, 0 or 1). flowrl asks it with
executor: {kind: http, urls: ["http://127.0.0.1:8400"]} for the reward geneval_mmdet.

The rules are those of flowrl's own reward `geneval`; only what finds objects differs. Images arrive
lossless, and in BGR as mmdet's configuration expects.
"""

import argparse
import base64
import io
import json
import math
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

NAME = "geneval_mmdet"
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
MODES = ("partial", "strict", "official")
RENAMED = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
COLORS = "red orange yellow green blue purple pink brown black white".split()
TEMPLATES = ("a photo of a {c} {n}", "a photo of a {c}-colored {n}", "a photo of a {c} object")
THRESHOLD, COUNTING_THRESHOLD, MOST = 0.3, 0.9, 16
OVERLAP = 0.1  # share of both sizes that an offset must exceed
MAX_BODY, MAX_PIXELS = 64 * 2**20, 2**24
TURN = threading.Lock()


class Found:
    """One object: box (left, top, right, bottom), score, mask (H, W) bool, and its colour."""

    def __init__(self, box, score, mask=None, color=None):
        self.box, self.score, self.mask, self.color = tuple(box), score, mask, color


# --- the rules ---------------------------------------------------------------------------------


def asked(entry, key):
    return entry.get(key) is not None


def relations(a, b):
    """Return how box a lies to box b."""
    offset = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    sizes = [a[i + 2] - a[i] + b[i + 2] - b[i] for i in (0, 1)]
    x, y = (max(abs(offset[i]) - OVERLAP * sizes[i], 0.0) for i in (0, 1))
    if max(x, y) < 1e-3:
        return set()
    length = math.hypot(*offset)
    x, y = math.copysign(x, offset[0]) / length, math.copysign(y, offset[1]) / length
    tests = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in tests.items() if holds}


def related(found, others, relation):
    return all(relation in relations(a.box, b.box) for a in found for b in others)


def colored(found, entry):
    return sum(one.color == entry["color"] for one in found)


def official(objects, wanted):
    """Return the published verdict: enough of everything among the most confident objects."""
    matched = []
    for entry in wanted["include"]:
        count = entry["count"]
        found = objects.get(entry["class"], [])[:count]
        good = len(found) == count
        good = good and (not asked(entry, "color") or colored(found, entry) == count)
        if good and asked(entry, "position"):
            relation, index = entry["position"]
            good = matched[index] is not None and related(found, matched[index], relation)
        matched.append(found if good else None)
    many = any(len(objects.get(e["class"], [])) >= e["count"] for e in wanted.get("exclude") or [])
    return float(None not in matched and not many)


def terms(objects, include):
    """Return Flow-GRPO's partial terms, each in [0, 1]: counts, colours, relations."""
    result, matched = [], []
    for entry in include:
        found, count = objects.get(entry["class"], []), entry["count"]
        own = [max(0.0, 1 - abs(len(found) - count) / count)]
        if asked(entry, "color"):
            own.append(colored(found, entry) / count if len(found) == count else 0.0)
        good = own == [1.0] * len(own)
        if asked(entry, "position"):
            relation, index = entry["position"]
            other = matched[index] if good else None
            good = other is not None and related(found, other, relation)
            own.append(float(good))
        matched.append(found if good else None)
        result += own
    return result


def verdict(objects, wanted, mode):
    """Return the score of one image's objects, by class, the most confident first."""
    if mode == "official":
        return official(objects, wanted)
    found = terms(objects, wanted["include"])
    return float(all(t == 1.0 for t in found)) if mode == "strict" else sum(found) / len(found)


# --- the models --------------------------------------------------------------------------------


class Judge:
    """mmdet's detector and CLIP's colours; `detect` and `name_colors` may be replaced."""

    def __init__(self, options):
        from mmdet.apis import init_detector

        self.detector = init_detector(options.config, options.weights, device=options.device)
        self.names = [RENAMED.get(name, name) for name in self.detector.CLASSES]
        self.device, self.clip, self.texts = options.device, None, {}

    def detect(self, image):
        """Return the objects of an image (H, W, 3) uint8 RGB as (name, Found)."""
        from mmdet.apis import inference_detector

        boxes, masks = inference_detector(self.detector, np.ascontiguousarray(image[:, :, ::-1]))
        for name, rows, own in zip(self.names, boxes, masks):  # noqa: B905  # Python 3.8
            for row, mask in zip(rows, own):  # noqa: B905
                yield name, Found(row[:4].tolist(), float(row[4]), np.asarray(mask, bool))

    def name_colors(self, image, name, found):
        """Return the colour of each object: CLIP, on the object alone before grey."""
        import torch

        model, transform = self._clip()
        grey = Image.new("RGB", (image.shape[1], image.shape[0]), "#999")
        crops = []
        for one in found:
            whole = Image.composite(Image.fromarray(image), grey, Image.fromarray(one.mask))
            crops.append(transform(whole.crop(one.box)))
        with torch.no_grad():
            pixels = torch.stack(crops).to(self.device)
            vectors = torch.nn.functional.normalize(model.encode_image(pixels), dim=-1)
            best = (vectors @ self._texts(name).T).argmax(1)
        return [COLORS[i] for i in best.tolist()]

    def _clip(self):
        if self.clip is None:
            import open_clip

            model, _, transform = open_clip.create_model_and_transforms(
                "ViT-L-14", pretrained="openai", device=self.device
            )
            self.clip = model.eval(), transform
        return self.clip

    def _texts(self, name):
        """Return a vector for each colour: the mean of three templates, of unit length."""
        import open_clip
        import torch

        if name not in self.texts:
            tokenizer, (model, _) = open_clip.get_tokenizer("ViT-L-14"), self._clip()
            with torch.no_grad():
                rows = []
                for color in COLORS:
                    words = tokenizer([t.format(c=color, n=name) for t in TEMPLATES])
                    own = model.encode_text(words.to(self.device))
                    rows.append(torch.nn.functional.normalize(own, dim=-1).mean(0))
                self.texts[name] = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
        return self.texts[name]


def judged(judge, image, wanted, mode):
    """Return the score of one image; None where the prompt is none of the six kinds."""
    if wanted.get("tag") not in TAGS or not wanted.get("include"):
        return None
    least = COUNTING_THRESHOLD if wanted["tag"] == "counting" else THRESHOLD
    objects = {}
    for name, one in sorted(judge.detect(image), key=lambda pair: -pair[1].score):
        of_class = objects.setdefault(name, [])
        if one.score > least and len(of_class) < MOST:
            of_class.append(one)
    for entry in wanted["include"]:
        if asked(entry, "color"):
            first = objects.get(entry["class"], [])[: entry["count"]]
            colors = judge.name_colors(image, entry["class"], first) if first else []
            for one, color in zip(first, colors):  # noqa: B905  # Python 3.8
                one.color = color
    return verdict(objects, wanted, mode)


# --- the server --------------------------------------------------------------------------------


def decoded(text):
    image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
    if image.mode != "RGB" or image.width * image.height > MAX_PIXELS:
        raise ValueError(f"expected an RGB PNG of at most {MAX_PIXELS} pixels")
    return np.array(image)


def answer(judge, mode, question):
    results = []
    for item in question["items"]:
        image, wanted, error = decoded(item["image"]), item.get("metadata") or {}, None
        try:
            with TURN:
                score = judged(judge, image, wanted, mode)
            error = f"the tag {wanted.get('tag')!r} is none of {', '.join(TAGS)}"
        except Exception as problem:  # a missing score has a reason, and is never 0
            score, error = None, f"{type(problem).__name__}: {problem}"
        missing = error if score is None else None
        results.append({"id": item["id"], "score": score, "error": missing})
    head = {"protocol": 1, "reward": NAME, "version": version(mode)}
    return dict(head, key=question["key"], results=results)


def version(mode):
    return f"mask2former_swin-s/clip-L/{mode}"


class Handler(BaseHTTPRequestHandler):
    judge, mode = None, "partial"  # set by main
    timeout = 60

    def do_GET(self):
        if self.path == "/healthz":
            self.reply(200, {"status": "ready"})
        elif self.path == "/v1/info":
            reward = {"name": NAME, "version": version(self.mode), "bounds": [0.0, 1.0]}
            reward["required_metadata"] = ["tag", "include"]
            self.reply(200, {"protocol": 1, "rewards": [reward]})
        else:
            self.reply(404, {"error": "there is /healthz, /v1/info and /v1/score"})

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        if self.path != "/v1/score" or not 0 < length <= MAX_BODY:
            return self.reply(413, {"error": f"POST /v1/score takes 1 to {MAX_BODY} bytes"})
        try:
            question = json.loads(self.rfile.read(length).decode())
            if question["protocol"] != 1 or question["reward"] != NAME:
                return self.reply(404, {"error": f"there is only {NAME}, by protocol 1"})
            self.reply(200, answer(self.judge, self.mode, question))
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
    parser = argparse.ArgumentParser(description="GenEval with mmdet's detector, for flowrl")
    parser.add_argument("--config", required=True, help="mmdet's configuration of Mask2Former")
    parser.add_argument("--weights", required=True, help="its .pth file")
    parser.add_argument("--mode", choices=MODES, default="partial")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--port", type=int, default=8400)
    options = parser.parse_args(words)
    Handler.judge, Handler.mode = Judge(options), options.mode  # before anyone may ask
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    print(f"serving {NAME} at http://127.0.0.1:{server.server_port}")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
