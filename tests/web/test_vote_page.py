"""The page of `flowrl vote` in a real Chromium: keys, sizes, hostile texts, a server that dies."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from itertools import product

import pytest
import torch
from PIL import Image

from flowrl.voting.app import Questions, make_app
from flowrl.voting.ballot import FILE, Ballot
from flowrl.voting.candidates import read_candidates

HOSTILE = '<img src=x onerror="window.hacked=1">\u202e' + "x" * 5000


class Encoder:
    """Stands for an autoencoder: a quarter of the size, three channels."""

    size = (16, 16)

    def __call__(self, images):
        return torch.nn.functional.avg_pool2d(images, 4)


def make_candidates(folder, texts, images=4):
    for index, text in enumerate(texts):
        place = folder / f"{index:05d}"
        (place / "samples").mkdir(parents=True)
        (place / "metadata.jsonl").write_text(json.dumps({"prompt": text}))
        for k in range(images):
            color = (60 * k, 40 * index, 90)
            Image.new("RGB", (20, 16), color).save(place / "samples" / f"{k:04d}.png")
    return folder


@pytest.fixture
def serving(serve_app):
    """A context manager that serves the votes of a folder and yields the page's address."""

    def serve(folder):
        candidates = read_candidates(folder, Encoder())
        questions = Questions(candidates, Ballot(folder), goal=4, informative=True, seed=0)
        return serve_app(make_app(questions, token="a-token", hosts=["127.0.0.1"]))

    return serve


@pytest.fixture
def open_page(browser):
    """Open an address in a window of its own; return the page with what it asked and its faults."""
    with contextlib.ExitStack() as opened:

        def open_page(address, width=1366, scheme="light"):
            context = opened.enter_context(
                contextlib.closing(
                    browser.new_context(
                        viewport={"width": width, "height": 800}, color_scheme=scheme
                    )
                )
            )
            context.set_default_timeout(60_000)
            page = context.new_page()
            page.faults, page.asked = [], []
            page.on("pageerror", lambda error: page.faults.append(str(error)))
            page.on("request", lambda request: page.asked.append(request.url))
            page.goto(address)
            page.wait_for_selector("#main[aria-busy=false] #second img[src^=blob]")
            return page

        yield open_page


def told(page, start):
    """Wait until the page counts so many votes."""
    page.wait_for_function(
        "start => document.querySelector('#told').textContent.startsWith(start) && "
        "document.querySelector('#main').ariaBusy === 'false'", arg=start,
    )  # fmt: skip


def choices(folder):
    return [vote.choice for vote in Ballot(folder).votes]


def test_keys_vote_and_every_vote_is_on_disk_when_the_page_counts_it(serving, open_page, tmp_path):
    folder = make_candidates(tmp_path, ["a cat", HOSTILE])
    with serving(folder) as address:
        page = open_page(address)
        assert "token" not in page.url
        wanted = []
        for key, choice in (("1", "first"), ("2", "second"), ("t", "tie"), ("s", "skip")):
            page.keyboard.press(key)
            wanted.append(choice)
            told(page, f"{len(wanted)} of 4 votes")
            assert choices(folder) == wanted
        assert "enough to train" in page.locator("#told").inner_text()
        page.keyboard.press("u")
        told(page, "3 of 4 votes")
        assert choices(folder) == wanted[:-1]
        page.keyboard.press("Control+1")  # the browser's own
        page.locator("#first").focus()
        page.keyboard.press("Enter")  # as a button
        told(page, "4 of 4 votes")
        assert choices(folder) == [*wanted[:-1], "first"]
        prompts = {vote.prompt for vote in Ballot(folder).votes}
        assert prompts == {"a cat", HOSTILE} and page.evaluate("window.hacked") is None
        assert not page.faults
        base = address.partition("#")[0]
        assert all(url.startswith((base, f"blob:{base}")) for url in page.asked)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), product((390, 1366), ("light", "dark")))
def test_the_page_fits_and_can_be_read(serving, open_page, tmp_path, width, scheme):
    folder = make_candidates(tmp_path, [HOSTILE])
    with serving(folder) as address:
        page = open_page(address, width, scheme)
        told(page, "0 of 4 votes")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("first", "second"):
            box = page.locator(f"#{name} img").bounding_box()
            assert box["width"] > 100 and box["x"] + box["width"] <= width
        ground = "getComputedStyle(document.body).backgroundColor"
        light = [int(n) for n in page.evaluate(ground)[4:-1].split(",")[:3]]
        ink = page.evaluate("getComputedStyle(document.querySelector('h1')).color")
        ink = [int(n) for n in ink[4:-1].split(",")[:3]]
        assert (min(light) > 200 > 100 > max(ink)) == (scheme == "light")
        assert (max(light) < 60 < 150 < min(ink)) == (scheme == "dark")
        page.keyboard.press("1")
        told(page, "1 of 4 votes")


def test_an_image_that_is_gone_can_be_skipped(serving, open_page, tmp_path):
    folder = make_candidates(tmp_path, ["a cat"], images=3)
    with serving(folder) as address:
        page = open_page(address)
        for file in folder.glob("*/samples/*.png"):
            file.write_bytes(b"no image")
        page.keyboard.press("1")
        told(page, "1 of 4 votes")
        page.wait_for_selector('#second img[alt*="skip it"]')
        page.keyboard.press("s")
        told(page, "2 of 4 votes")
        assert choices(folder) == ["first", "skip"] and not page.faults


def start_vote(folder, port):
    """Start `flowrl vote` on a folder; return its process and the page's address."""
    command = [sys.executable, "-m", "flowrl", "vote", "quickstart", "--images", str(folder),
               "--port", str(port), "pipeline.device=cpu"]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "#token=" in line:
            return process, next(word for word in line.split() if "#token=" in word)
    raise AssertionError(f"flowrl vote ended with {process.wait()}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_server_keeps_every_vote_and_the_same_command_goes_on(open_page, tmp_path):
    folder = make_candidates(tmp_path, ["a cat", "a dog"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process, address = start_vote(folder, port)
    try:
        page = open_page(address)
        for count, key in enumerate("12t", 1):
            page.keyboard.press(key)
            told(page, f"{count} of 50 votes")
        process.kill()
        process.wait()
        page.keyboard.press("1")  # nobody hears it, and the page says so
        page.wait_for_selector("#trouble:not([hidden])")
        assert choices(folder) == ["first", "second", "tie"]
        (folder / FILE).open("ab").write(b'{"prompt": "a c')  # a line that was cut off
        process, address = start_vote(folder, port)
        page = open_page(address)
        told(page, "3 of 50 votes")
        page.keyboard.press("2")
        told(page, "4 of 50 votes")
        assert choices(folder) == ["first", "second", "tie", "second"]
    finally:
        process.kill()
