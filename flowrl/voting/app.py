"""The page of `flowrl vote`: two images of a prompt, and five keys.

A vote is on disk before it is answered.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from flowrl.errors import UserError
from flowrl.utils.images import png_of_file
from flowrl.voting.ballot import Ballot, Choice, Vote
from flowrl.voting.candidates import Candidates, next_pair
from flowrl.web.jobs import Jobs
from flowrl.web.page import json_answer, make_page

if TYPE_CHECKING:
    from fastapi import FastAPI


class Questions:
    """The pairs to show and the votes so far; several requests at a time may use it."""

    def __init__(self, candidates: Candidates, ballot: Ballot, *, goal: int, seed: int):
        self.candidates, self.ballot, self.goal = candidates, ballot, goal
        self._seed, self._pairs = seed, candidates.pairs()
        self._rows = {name: row for row, name in enumerate(candidates.files)}
        self._lock = threading.Lock()

    def next(self) -> dict[str, Any]:
        """Return the next pair and the number of votes; `pair` is None after the last one."""
        with self._lock:
            texts, votes = self.candidates.texts, self.ballot.votes
            voted = [(self._rows[v.first], self._rows[v.second]) for v in votes
                     if v.first in self._rows and v.second in self._rows]  # fmt: skip
            pair = next_pair(self._pairs, texts, voted, self._seed)
            if pair is not None:
                pair = {"first": pair[0], "second": pair[1], "prompt": texts[pair[0]]}
            return {"votes": len(votes), "goal": self.goal, "pair": pair}

    def cast(self, order: "CastOrder") -> None:
        """Write a vote. Raises UserError unless it is between two images of one prompt."""
        first, second = order.first, order.second
        texts, names = self.candidates.texts, self.candidates.files
        inside = 0 <= min(first, second) and max(first, second) < len(texts)
        if first == second or not inside or texts[first] != texts[second]:
            raise UserError("a vote is for two images of one prompt")
        vote = Vote(
            prompt=texts[first], first=names[first], second=names[second], choice=order.choice
        )
        with self._lock:
            self.ballot.cast(vote)

    def undo(self) -> None:
        """Take the last vote back, if there is one."""
        with self._lock:
            self.ballot.undo()


@dataclass(frozen=True, slots=True, kw_only=True)
class CastOrder:
    """The body of a request to vote."""

    first: int  # rows of the images
    second: int
    choice: Choice


def make_app(
    questions: Questions, *, token: str, host: str, train: Sequence[str] = ()
) -> "FastAPI":
    """Return the application of the page.

    Args:
        token, host: as in `make_page`.
        train: words after `flowrl` that train on the votes; () where no recipe is named.
    """

    jobs = Jobs(questions.candidates.folder)

    def routes(app: "FastAPI") -> None:
        app.state.jobs = jobs
        _add_votes(app, questions)
        _add_training(app, questions.candidates.folder, jobs, train)

    return make_page("flowrl vote", routes, "flowrl.voting", "flowrl.web", token=token, host=host)


def _add_votes(app: "FastAPI", questions: Questions) -> None:
    @app.get("/api/next")
    def following() -> Response:
        return json_answer(questions.next())

    @app.post("/api/vote")
    def vote(order: CastOrder) -> Response:
        questions.cast(order)
        return json_answer(questions.next())

    @app.post("/api/undo")
    def undo() -> Response:
        questions.undo()
        return json_answer(questions.next())

    @app.get("/api/image")
    def image(row: int) -> Response:
        files, data = questions.candidates.files, None
        if 0 <= row < len(files):
            data = png_of_file(questions.candidates.folder / files[row])
        if data is None:
            raise FileNotFoundError
        return Response(data, media_type="image/png")


def _add_training(app: "FastAPI", folder: Path, jobs: Jobs, words: Sequence[str]) -> None:
    @app.get("/api/training")
    def training() -> Response:
        return json_answer({"possible": bool(words), "job": next(iter(jobs.rows()), None)})

    @app.post("/api/train")
    def train() -> Response:
        if not words:
            raise UserError("no recipe is named: repeat `flowrl vote` with one")
        return json_answer({"possible": True, "job": jobs.train_on_votes(words).row()})

    @app.get("/api/grid")
    def grid() -> Response:
        """Send held-out images of the run that the button started, base and LoRA."""
        began = next((row["began"] for row in jobs.rows()), math.inf)
        grids = folder.glob("run*/gallery/grid.png")
        grids = [file for file in grids if file.stat().st_mtime >= began]
        data = png_of_file(grids[-1]) if grids else None
        if data is None:
            raise FileNotFoundError
        return Response(data, media_type="image/png")
