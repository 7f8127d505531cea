"""The page of `flowrl vote` in a real Chromium: keys, sizes, hostile texts, a lost server."""

import os
import time

import pytest
from PIL import Image

from flowrl.voting.app import Questions, make_app
from flowrl.voting.ballot import Ballot
from flowrl.voting.candidates import read_candidates

HOSTILE = '<img src=x onerror="window.hacked=1">\u202e' + "x" * 5000


@pytest.fixture
def serve_votes(serve_app):
    """A context manager that serves the votes of a folder and yields the page's address."""

    def serve(folder, train=()):
        candidates = read_candidates(folder)
        questions = Questions(candidates, Ballot(folder), goal=4, seed=0)
        return serve_app(make_app(questions, token="a-token", host="127.0.0.1", train=train))

    return serve


def opened(page, address):
    page.goto(address)
    page.wait_for_selector("#main[aria-busy=false] #second img[src^=blob]")


def wait_for_count(page, start):
    """Wait until the page counts so many votes."""
    page.wait_for_function(
        "start => document.querySelector('#progress').textContent.startsWith(start) && "
        "document.querySelector('#main').ariaBusy === 'false'", arg=start,
    )  # fmt: skip


def choices(folder):
    return [vote.choice for vote in Ballot(folder).votes]


def test_keys_vote_and_every_vote_is_on_disk_when_the_page_counts_it(
    serve_votes, page, write_images, tmp_path
):
    folder = write_images(tmp_path, ["a cat", HOSTILE], images=4)
    with serve_votes(folder) as address:
        opened(page, address)
        assert "token" not in page.url
        wanted = []
        for key, choice in (("1", "first"), ("2", "second"), ("t", "tie"), ("s", "skip")):
            page.keyboard.press(key)
            wanted.append(choice)
            wait_for_count(page, f"{len(wanted)} of 4 votes")
            assert choices(folder) == wanted
        assert "enough to train" in page.locator("#progress").inner_text()
        page.keyboard.press("u")
        wait_for_count(page, "3 of 4 votes")
        assert choices(folder) == wanted[:-1]
        page.keyboard.press("Control+1")  # the browser's own
        page.locator("#first").focus()
        page.keyboard.press("Enter")  # as a button
        wait_for_count(page, "4 of 4 votes")
        assert choices(folder) == [*wanted[:-1], "first"]
        prompts = {vote.prompt for vote in Ballot(folder).votes}
        assert prompts == {"a cat", HOSTILE} and page.evaluate("window.hacked") is None
        assert not page.faults
        base = address.partition("#")[0]
        assert all(url.startswith((base, f"blob:{base}")) for url in page.asked)


def test_a_button_trains_and_shows_what_came_of_it(serve_votes, page, write_images, tmp_path):
    folder = write_images(tmp_path, ["a cat"], images=4)
    grid = folder / "run" / "gallery" / "grid.png"
    grid.parent.mkdir(parents=True)
    Image.new("RGB", (64, 32), "red").save(grid)
    os.utime(grid, (0, 0))
    with serve_votes(folder, train=("recipes",)) as address:  # a command that ends soon
        opened(page, address)
        page.locator("#train").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#state:text('The LoRA is trained')")
        assert page.locator("#output").inner_text().startswith("flowrl recipes\n")
        assert page.locator("#grid").is_hidden()  # it is of an earlier run
        os.utime(grid, (time.time() + 60,) * 2)
        page.reload()
        page.wait_for_selector("#state:text('The LoRA is trained')")
        page.wait_for_selector("#grid:not([hidden]) img[src^=blob]")
        assert not page.faults
    with serve_votes(folder, train=("no-such-command",)) as address:
        opened(page, address)
        page.locator("#train").click()
        page.wait_for_selector("#state:text('Training failed')")
        assert "no-such-command" in page.locator("#output").inner_text()
    with serve_votes(folder) as address:
        opened(page, address)
        assert page.locator("#training").is_hidden()


def test_a_vote_that_no_server_hears_is_not_counted(serve_votes, page, write_images, tmp_path):
    folder = write_images(tmp_path, ["a cat", "a dog"], images=4)
    with serve_votes(folder) as address:
        opened(page, address)
        page.keyboard.press("1")
        wait_for_count(page, "1 of 4 votes")
    page.keyboard.press("2")
    page.wait_for_selector("#trouble:not([hidden])")
    assert choices(folder) == ["first"]
