"""The server of `flowrl ui`: runs as JSON and PNG. The page polls; unchanged is 304."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from flowrl.errors import UserError
from flowrl.web.form import RunForm, choices
from flowrl.web.jobs import Jobs
from flowrl.web.metrics_log import chosen_first, held_out_first
from flowrl.web.page import json_answer, make_page
from flowrl.web.runs import RunFiles, RunFolders, recipe_differences

if TYPE_CHECKING:
    from fastapi import FastAPI

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
        _add_tables(app, folders, jobs)
        _add_curves(app, folders)
        _add_images(app, folders)
        _add_actions(app, folders, jobs)

    return make_page("flowrl ui", routes, "flowrl.web", token=token, host=host)


def _add_tables(app: "FastAPI", folders: RunFolders, jobs: Jobs) -> None:
    def summary(run: RunFiles) -> dict[str, Any]:
        return run.summary() | {"stopping": jobs.stopping(run)}

    @app.get("/api/runs")
    def runs(request: Request) -> Response:
        return json_answer({"runs": [summary(run) for run in folders.runs()]}, request=request)

    @app.get("/api/run")
    def run(request: Request, run: str) -> Response:
        chosen = folders.run(run)
        content = chosen.details() | {"stopping": jobs.stopping(chosen)}
        return json_answer(content, request=request)

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
        return json_answer({"jobs": jobs.rows()}, request=request)

    @app.get("/api/choices")
    def list_choices() -> Response:
        return json_answer(choices())


def _add_curves(app: "FastAPI", folders: RunFolders) -> None:
    @app.get("/api/curves")
    def curves(request: Request, points: int = 600) -> Response:
        names, metrics = (
            list(dict.fromkeys(request.query_params.getlist(key))) for key in ("run", "metric")
        )
        if len(names) * max(1, len(metrics)) > MOST_CURVES:
            raise UserError(f"at most {MOST_CURVES} curves at a time")
        runs, most = [folders.run(name) for name in names], min(max(points, 2), MOST_POINTS)
        for run in runs:
            run.log.read()
        logged = held_out_first({name for run in runs for name in run.log.names})
        curves = {run.name: run.log.points(metrics, most) for run in runs}
        for run in runs:
            margins = run.margins()
            for metric, curve in curves[run.name].items():
                margin = [margins.get(step, {}).get(metric) for step in curve["x"]]
                curve |= {"margin": margin} if any(margin) else {}
        content = {"names": logged, "chosen": chosen_first(logged), "runs": curves}
        return json_answer(content, request=request)


def _add_images(app: "FastAPI", folders: RunFolders) -> None:
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
    @app.post("/api/stop")
    def stop(order: Order) -> Response:
        if order.job:
            jobs.end(order.job)
        else:
            jobs.stop(folders.run(order.run))
        return json_answer({})

    @app.post("/api/resume")
    def resume(order: Order) -> Response:
        return json_answer(jobs.resume(folders.run(order.run)).row())

    @app.post("/api/{action}")
    def begin(action: Literal["plan", "rehearse", "start"], order: Order) -> Response:
        kind = "dry run" if action == "rehearse" else action
        return json_answer(jobs.order(kind, order).row())
