"""The server of `flowrl ui`: runs as JSON and PNG. The page polls; unchanged is 304."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import UserError
from flowrl.utils.digests import digest
from flowrl.utils.serving import json_body
from flowrl.web.form import RunForm, choices
from flowrl.web.jobs import Jobs
from flowrl.web.metrics_log import chosen_first, held_out_first
from flowrl.web.page import json_answer, make_page
from flowrl.web.runs import RunFiles, RunFolders, recipe_differences

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

MOST_POINTS = 2000  # of a curve in an answer
MOST_CURVES = 400  # runs times metrics in an answer


def make_app(root: Path, *, token: str, host: str) -> "FastAPI":
    """Return the ASGI application that shows the runs below `root`.

    Args:
        token: that every request below /api carries.
        host: address that the server listens at.
    """
    folders, jobs = RunFolders(root), Jobs(root)

    def routes(app: "FastAPI") -> None:
        app.state.jobs = jobs
        _add_tables(app, folders, jobs)
        _add_curves(app, folders)
        _add_images(app, folders)
        _add_actions(app, folders, jobs)

    return make_page("flowrl ui", routes, "flowrl.web", token=token, host=host)


def unless_current(request: "Request", stamp: Any, make: Callable[[], Any]) -> "Response":
    """Answer with what `make` returns, or 304 when the client has the answer of this stamp.

    stamp: anything that changes with the answer, with the same `repr` while it does not.
    """
    from starlette.responses import Response

    tag = f'"{digest(repr((request.url.query, stamp)).encode())}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    answer = json_answer(make())
    answer.headers["ETag"] = tag
    return answer


def _add_tables(app: "FastAPI", folders: RunFolders, jobs: Jobs) -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    def summary(run: RunFiles) -> dict[str, Any]:
        return run.summary() | {"stopping": jobs.stopping(run)}

    @app.get("/api/runs")
    def runs(request: Request) -> Response:
        listed = folders.runs()
        stamp = [(run.stamp(), jobs.stopping(run)) for run in listed]
        return unless_current(request, stamp, lambda: {"runs": [summary(run) for run in listed]})

    @app.get("/api/run")
    def run(request: Request, run: str) -> Response:
        chosen, log = folders.run(run), folders.log(run)
        log.read()
        stamp = (chosen.stamp(), log.version, jobs.stopping(chosen))
        return unless_current(request, stamp, lambda: summary(chosen) | chosen.details(log))

    @app.get("/api/recipe")
    def recipe(run: str, other: str | None = None) -> Response:
        chosen = folders.run(run)
        content: dict[str, Any] = {"text": chosen.recipe_text()}
        if other is not None:
            pair = (chosen, folders.run(other))
            content["differences"] = recipe_differences(*pair)
            content["without"] = [one.name for one in pair if not one.recipe()]
        return json_answer(content)

    @app.get("/api/jobs")
    def list_jobs(request: Request) -> Response:
        content = {"jobs": jobs.rows()}
        return unless_current(request, content, lambda: content)

    @app.get("/api/choices")
    def list_choices() -> Response:
        return json_answer(choices())


def _add_curves(app: "FastAPI", folders: RunFolders) -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    @app.get("/api/curves")
    def curves(request: Request, points: int = 600) -> Response:
        names, metrics = (
            list(dict.fromkeys(request.query_params.getlist(key))) for key in ("run", "metric")
        )
        if len(names) * max(1, len(metrics)) > MOST_CURVES:
            raise UserError(f"at most {MOST_CURVES} curves at a time")
        logs = {name: folders.log(name) for name in names}
        for log in logs.values():
            log.read()
        most = min(max(points, 2), MOST_POINTS)

        def content() -> dict[str, Any]:
            logged = held_out_first({name for log in logs.values() for name in log.names})
            curves = {name: log.points(metrics, most) for name, log in logs.items()}
            for name in names:
                margins = folders.run(name).margins()
                for metric, curve in curves[name].items():
                    margin = [margins.get(step, {}).get(metric) for step in curve["x"]]
                    curve |= {"margin": margin} if any(margin) else {}
            return {"names": logged, "chosen": chosen_first(logged), "runs": curves}

        stamp = [(name, log.version, folders.run(name).evaluations()) for name, log in logs.items()]
        return unless_current(request, stamp, content)


def _add_images(app: "FastAPI", folders: RunFolders) -> None:
    from starlette.background import BackgroundTask
    from starlette.responses import Response, StreamingResponse

    @app.get("/api/sample")
    def sample(run: str, step: int) -> Response:
        return Response(folders.run(run).sample(step), media_type="image/png")

    @app.get("/api/heldout")
    def held_out(run: str, step: int) -> Response:
        return json_answer(folders.run(run).held_out(step))

    @app.get("/api/heldout/image")
    def held_out_image(run: str, step: int, row: int) -> Response:
        return Response(folders.run(run).held_out_image(step, row), media_type="image/png")

    @app.get("/api/result")
    def result(run: str, name: str) -> Response:
        """Send a file to keep: a page of a run never opens as one of this server's."""
        file = folders.run(run).result(name)
        headers = {"Content-Disposition": "attachment"}
        pieces = iter(lambda: file.read(2**20), b"")
        return StreamingResponse(
            pieces, media_type="application/octet-stream", headers=headers,
            background=BackgroundTask(file.close),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(RunForm):
    """The body of a request to do something; each action reads its fields."""

    run: str = ""
    job: str = ""


def _add_actions(app: "FastAPI", folders: RunFolders, jobs: Jobs) -> None:
    from pydantic import TypeAdapter
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response

    orders = TypeAdapter(Order)

    def stop(order: Order) -> dict[str, Any]:
        if order.job:
            jobs.end(order.job)
        else:
            jobs.stop(folders.run(order.run))
        return {}

    actions: dict[str, Callable[[Order], dict[str, Any]]] = {
        "stop": stop,
        "resume": lambda order: jobs.resume(folders.run(order.run)).row(),
        "plan": lambda order: jobs.plan(order).row(),
        "rehearse": lambda order: jobs.rehearse(order).row(),
        "start": lambda order: jobs.start(order).row(),
    }
    for name, act in actions.items():

        async def action(request: Request, act: Any = act) -> Response:
            order = orders.validate_python(await json_body(request))
            return json_answer(await run_in_threadpool(act, order))

        app.add_route(f"/api/{name}", action, methods=["POST"])
