"""The page of `flowrl vote`: two images of a prompt, and five keys.

It is guarded as `flowrl ui` is: a token for everything below /api, one host name, nothing from
elsewhere. A vote is on disk before it is answered.
"""

import threading
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from flowrl.errors import UserError
from flowrl.utils.serving import Guard, json_body
from flowrl.voting.ballot import ANSWERS, CHOICES, Ballot, Vote
from flowrl.voting.candidates import Candidates
from flowrl.voting.choose import Pair, all_pairs, next_pair
from flowrl.web.app import json_answer, page_access

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.responses import Response

STATIC = {
    "/": ("flowrl.voting", "vote.html", "text/html"),
    "/vote.js": ("flowrl.voting", "vote.js", "text/javascript"),
    "/vote.css": ("flowrl.voting", "vote.css", "text/css"),
    "/ask.js": ("flowrl.web", "ask.js", "text/javascript"),
    "/page.css": ("flowrl.web", "page.css", "text/css"),
    "/icon.svg": ("flowrl.web", "icon.svg", "image/svg+xml"),
}


class Questions:
    """Which pair is asked, and what was said so far. Safe for several requests at a time."""

    def __init__(
        self, candidates: Candidates, ballot: Ballot, *, goal: int, informative: bool, seed: int
    ):
        self.candidates, self.ballot, self.goal = candidates, ballot, goal
        self._informative, self._seed = informative, seed
        self._rows = {name: row for row, name in enumerate(candidates.files)}
        self._pairs = all_pairs(candidates.numbers)
        self._lock = threading.Lock()

    def next(self) -> dict[str, Any]:
        """Return the next pair and how far the voter is; `pair` is None when all were asked."""
        with self._lock:
            pair = next_pair(
                self._pairs, self.candidates.numbers, self.candidates.features, self.asked(),
                informative=self._informative, seed=self._seed,
            )  # fmt: skip
            told = {"votes": len(self.ballot.votes), "goal": self.goal, "pair": None}
            if pair is None:
                return told
            prompt = self.candidates.texts[pair[0]]
            return told | {"pair": {"first": pair[0], "second": pair[1], "prompt": prompt}}

    def asked(self) -> list[tuple[Pair, float | None]]:
        """Return the votes as pairs of rows with answers; those of images that are gone are out."""
        return [
            ((self._rows[v.first], self._rows[v.second]), ANSWERS[v.choice])
            for v in self.ballot.votes
            if v.first in self._rows and v.second in self._rows
        ]

    def cast(self, first: object, second: object, choice: object) -> None:
        """Write a vote. Raises UserError for what is no pair of one prompt, or no choice."""
        rows = [row for row in (first, second) if isinstance(row, int) and row is not True]
        known = self.candidates.numbers
        if (
            choice not in CHOICES
            or len(rows) != 2
            or rows[0] == rows[1]
            or not all(0 <= row < len(known) for row in rows)
            or known[rows[0]] != known[rows[1]]
        ):
            raise UserError(f"a vote is for two images of one prompt, one of {', '.join(CHOICES)}")
        names = [self.candidates.files[row] for row in rows]
        prompt = self.candidates.texts[rows[0]]
        with self._lock:
            vote = Vote(prompt=prompt, first=names[0], second=names[1], choice=choice)
            self.ballot.cast(vote)

    def undo(self) -> None:
        """Take the last vote back, if there is one."""
        with self._lock:
            self.ballot.undo()


def make_app(questions: Questions, *, token: str, hosts: Sequence[str]) -> "FastAPI":
    """Return the ASGI application that asks. token, hosts: as in `flowrl.web.app.make_app`."""
    from fastapi import FastAPI

    app = FastAPI(title="flowrl vote", openapi_url=None, docs_url=None, redoc_url=None)
    _add_page(app)
    _add_questions(app, questions)
    _add_errors(app)
    app.add_middleware(Guard, access=page_access("flowrl vote", token, hosts))
    return app


def _add_page(app: "FastAPI") -> None:
    from starlette.responses import Response

    for path, (package, name, media) in STATIC.items():
        data = (files(package) / "static" / name).read_bytes()

        def page(data: bytes = data, media: str = media) -> Response:
            return Response(data, media_type=media)

        app.add_api_route(path, page, methods=["GET"], response_model=None)


def _add_questions(app: "FastAPI", questions: Questions) -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    @app.get("/api/next")
    def following() -> Response:
        return json_answer(questions.next())

    @app.post("/api/vote")
    async def vote(request: Request) -> Response:
        told = await json_body(request)
        told = told if isinstance(told, dict) else {}
        questions.cast(told.get("first"), told.get("second"), told.get("choice"))
        return json_answer(questions.next())

    @app.post("/api/undo")
    def undo() -> Response:
        questions.undo()
        return json_answer(questions.next())

    @app.get("/api/image")
    def image(row: int) -> Response:
        return _image(questions.candidates, row)


def _add_errors(app: "FastAPI") -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    @app.exception_handler(UserError)
    def refused(request: Request, error: UserError) -> Response:
        return json_answer({"error": str(error)}, 400)

    @app.exception_handler(ValueError)
    def malformed(request: Request, error: ValueError) -> Response:
        return json_answer({"error": "expected JSON"}, 400)


def _image(candidates: Candidates, row: int) -> "Response":
    from starlette.responses import Response

    from flowrl.utils.images import png_of_file

    if not 0 <= row < len(candidates.files):
        return json_answer({"error": "there is no such image"}, 404)
    data = png_of_file(candidates.folder / candidates.files[row])
    if data is None:
        return json_answer({"error": "the image cannot be read"}, 404)
    return Response(data, media_type="image/png")
