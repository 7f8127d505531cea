"""What the pages of `flowrl ui` and `flowrl vote` share: files, headers, JSON answers, errors.

A page itself holds nothing private and needs no token. Everything below `/api` needs it, as
`Authorization: Bearer TOKEN`, which no other site can make a browser send. The page has it from
the fragment of its address, which browsers do not send either. `flowrl.utils.serving.Guard` checks
Host, Origin and token, and the page may load from this server alone.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from flowrl.errors import UserError
from flowrl.utils.digests import digest
from flowrl.utils.serving import Access, Guard, local_names

if TYPE_CHECKING:
    from fastapi import FastAPI

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_BODY = 2**20  # bytes
ERRORS: Mapping[type[Exception], tuple[int, str]] = {  # 0 and "" are the error's own
    UserError: (409, ""),
    KeyError: (404, "no such run"),
    FileNotFoundError: (404, "the file is missing or cannot be read"),
    HTTPException: (0, ""),
    Exception: (500, "an error in the server: its output has more"),
}


def make_page(
    server: str, routes: "Callable[[FastAPI], None]", *packages: str, token: str, host: str
) -> "FastAPI":
    """Return an application that serves a page.

    Args:
        server: the command, for error messages.
        routes: adds routes below /api.
        packages: those with a folder `static` of files; the first that has a file's name counts.
        token: that every request below /api carries.
        host: address that the server listens at.
    """
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError

    app = FastAPI(title=server, openapi_url=None, docs_url=None, redoc_url=None)
    errors = {**ERRORS, RequestValidationError: (422, "not a request of the page")}
    for kind, words in errors.items():
        app.add_exception_handler(kind, functools.partial(_refusal, *words))
    routes(app)
    files = StaticFiles(packages=[(package, "static") for package in packages], html=True)
    app.mount("/", files)  # after the routes: it takes all paths
    access = Access(
        server=server, hosts=local_names(host), token=token, private="/api", max_body=MAX_BODY,
        headers=HEADERS,
    )  # fmt: skip
    app.add_middleware(Guard, access=access)
    return app


def json_answer(content: Any, status: int = 200, request: Request | None = None) -> Response:
    """Return an answer in JSON; 304 where the client of `request` has the same already."""
    # ASCII: halves of characters, which a damaged file may hold, have no UTF-8.
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    headers = {} if request is None else {"ETag": f'"{digest(body)}"'}
    if request is not None and request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, media_type="application/json")


async def _refusal(status: int, sentence: str, _: Request, error: Any) -> Response:
    """Answer an error with one sentence in JSON, and the field of a form that it is about."""
    sentence = sentence or str(getattr(error, "detail", error))
    field = {"field": error.field} if hasattr(error, "field") else {}
    return json_answer({"error": sentence} | field, status or error.status_code)
