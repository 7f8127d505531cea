"""Rewards that do what an image's metadata say; workers find this module by its name."""

import os
import sys
import time


class Scripted:
    """Scores are the images' means, plus `offset`; metadata: {"do": ..., ...}."""

    def __init__(self, offset: float = 0.0):
        self.offset = offset

    def __call__(self, images, prompts, metadata):
        for data in metadata:
            if "do" in data:
                getattr(self, f"_{data['do']}")(data)
        scores = (images.mean((1, 2, 3)) + self.offset).tolist()
        reasons = {row: data["why"] for row, data in enumerate(metadata) if "why" in data}
        scores = [None if row in reasons else score for row, score in enumerate(scores)]
        return scores[:-1] if {"do": "forget"} in metadata else (scores, reasons)

    def _sleep(self, data):
        time.sleep(data["seconds"])

    def _note(self, data):
        with open(data["path"], "a") as file:
            file.write(f"{data['text']}\n")
        time.sleep(data["seconds"])

    def _die(self, data):
        os._exit(data["code"])

    def _die_once(self, data):
        if not os.path.exists(data["path"]):
            open(data["path"], "w").close()
            os._exit(7)

    def _raise(self, data):
        raise RuntimeError("engine stumbled")

    def _exit(self, data):
        sys.exit("enough")

    def _forget(self, data):
        pass

    def _import(self, data):
        import a_package_that_is_not_there  # noqa: F401  # pyright: ignore

    def _odd_error(self, data):
        class Odd(Exception):
            def __init__(self, first, second):
                super().__init__("an error that cannot be sent")

        raise Odd(1, 2)


def visible_gpu(images, prompts, metadata):
    return [float(os.environ.get("CUDA_VISIBLE_DEVICES") or "nan")] * len(prompts)


def current_gpu(images, prompts, metadata):
    import torch

    return [float(torch.cuda.current_device())] * len(prompts)


def process_id(images, prompts, metadata):
    return [float(os.getpid())] * len(prompts)


def write_process_id(images, prompts, metadata):
    """Tells who works, then hangs."""
    with open(metadata[0]["path"], "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


def threads(images, prompts, metadata):
    """How many threads libraries were told to use, and torch uses."""
    import torch

    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    found = [*(float(os.environ[name]) for name in names), float(torch.get_num_threads())]
    return found[: len(prompts)]


class Broken:
    def __init__(self, path: str = "weights.bin"):
        raise RuntimeError(f"cannot read {path}")
