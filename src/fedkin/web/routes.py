"""The application: pages, the read-only API under /api/, and what is served beside them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, FileSystemLoader
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from fedkin import report
from fedkin.errors import FedKinError, UsageError
from fedkin.report import one_client, palette
from fedkin.report.figures import Figure, LeftOut
from fedkin.report.one_run import FIGURES
from fedkin.report.queries import PAGE
from fedkin.report.saving import KINDS
from fedkin.report.several_runs import MEASURES
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.folder import REPORT, RunFolder
from fedkin.runs.reading import read_bytes
from fedkin.web import views
from fedkin.web.guard import App, Guard
from fedkin.web.stream import Streams, place_of
from fedkin.web.values import text

HERE = Path(__file__).parent
MOST_REPORT = 64 << 20

Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=PAGE.rows)]
Round = Annotated[int | None, Query(ge=0, le=10**9)]
Client = Annotated[int | None, Query(ge=0, le=10**9)]
Word = Annotated[str | None, Query(max_length=200)]


def create_app(
    runs_dir: str | Path | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
    streams: Streams | None = None,
) -> App:
    """The web page (`fedkin web`) as an application behind its guard, for uvicorn or any other server that speaks ASGI.

    `runs_dir` is the folder of the runs, `host` where it will be served, `token` what a visitor from elsewhere has to
    give."""
    app = FastAPI(title="FedKin", docs_url=None, redoc_url=None, openapi_url=None)
    catalogue = Catalogue(Path(runs_dir).resolve() if runs_dir is not None else None)
    pages = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True)
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    _add_pages(app, catalogue, pages)
    _add_api(app, catalogue)
    _add_files(app, catalogue)
    _add_stream(app, catalogue, streams or Streams())
    _add_errors(app, pages)
    return Guard(app, host, token)


class Json(Response):
    """As JSON has it: what is not finite has become null before, and text is escaped whatever it holds."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


def _add_pages(app: FastAPI, catalogue: Catalogue, pages: Environment) -> None:
    def page(name: str, **values: Any) -> HTMLResponse:
        return HTMLResponse(pages.get_template(name).render(where=text(catalogue.path, 500), **values))

    @app.get("/")
    def runs() -> HTMLResponse:
        return page("list.html")

    @app.get("/run/{name}")
    def run(name: str) -> Response:
        found = catalogue.find(name).info
        if found.id != name:
            return RedirectResponse(f"/run/{found.id}")
        return page("run.html", run=found.id, figures=FIGURES, put=found.metric.put)

    @app.get("/run/{name}/client/{client}")
    def client(name: str, client: int) -> Response:
        found = catalogue.find(name).info
        if not 0 <= client < len(found.names):
            raise UsageError(f"client {client}: this run has clients 0 to {len(found.names) - 1}")
        own = {
            k: plan for k, plan in one_client.FIGURES.items() if k != "classes" or found.prepared.get("classes") != 0
        }
        return page("client.html", run=found.id, client=client, figures=own, put=found.metric.put)

    @app.get("/palette.css")
    def colours() -> Response:
        return Response(palette.css() + palette.classes(), media_type="text/css")

    @app.get("/compare")
    def compare() -> HTMLResponse:
        return page("compare.html", measures=MEASURES)

    @app.get("/report/{name}")
    def report(name: str) -> Response:
        """The file in the folder, in a sandbox of its own: no network, no access to this page, no script but ours."""
        found = catalogue.find(name)
        if not (found.path / REPORT).exists():
            raise UsageError(f"run {found.info.id!r} has no report yet: fedkin report {found.info.id}")
        text = read_bytes(found.path / REPORT, MOST_REPORT)
        return HTMLResponse(text, headers={"Content-Security-Policy": report_policy()})


def report_policy() -> str:
    """A report moves its slider with a script that we know by its hash; no other runs, whoever wrote the file."""
    script = (Path(report.__file__).parent / "templates" / "report.js").read_bytes()
    known = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src 'sha256-{known}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _add_api(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/runs")
    def runs(
        method: Word = None,
        data: Word = None,
        status: Word = None,
        attack: Word = None,
        text: Word = None,
        sort: Word = "created",
        order: Word = None,
        offset: Offset = 0,
        limit: Limit = 200,
    ) -> Json:
        wanted = {"method": method, "data": data, "status": status, "attack": attack}
        return Json(views.listing(catalogue, wanted, text or "", sort or "created", order == "up", offset, limit))

    @app.get("/api/compare")
    def compare(run: Annotated[list[str] | None, Query()] = None, measure: Word = None, seeds: bool = True) -> Json:
        return Json(views.compare_page(_several(catalogue, run), measure or "macro", seeds))

    @app.get("/api/runs/{name}")
    def run(name: str) -> Json:
        return Json(views.run_page(catalogue.find(name)))

    @app.get("/api/runs/{name}/table/{table}")
    def table(
        name: str, table: str, round: Round = None, client: Client = None, offset: Offset = 0, limit: Limit = 1000
    ) -> Json:
        return Json(views.table_page(catalogue.find(name), table, {"round": round, "client": client}, offset, limit))

    @app.get("/api/runs/{name}/notes")
    def notes(
        name: str, note: Annotated[str, Query(alias="name", max_length=200)], start: Offset = 0, limit: Limit = 1000
    ) -> Json:
        return Json(views.notes_page(catalogue.find(name), note, start, limit))

    @app.get("/api/runs/{name}/clients")
    def clients(name: str, offset: Offset = 0, limit: Limit = views.MOST_CLIENTS) -> Json:
        return Json(views.clients_page(catalogue.find(name), offset, limit))

    @app.get("/api/runs/{name}/clients/{client}")
    def client(name: str, client: int) -> Json:
        return Json(views.client_page(catalogue.find(name), client))

    @app.get("/api/runs/{name}/figures/{figure}")
    def figure(name: str, figure: str, round: Round = None) -> Json:
        return Json(views.figure_page(catalogue.find(name), figure, round))

    @app.get("/api/runs/{name}/clients/{client}/figures/{figure}")
    def client_figure(name: str, client: int, figure: str) -> Json:
        return Json(views.client_figure_page(catalogue.find(name), client, figure))


def _add_files(app: FastAPI, catalogue: Catalogue) -> None:
    """Figures to keep: as the report draws them, or as a table of their numbers."""

    def file(found: Figure | LeftOut, kind: str, *words: object) -> Response:
        content = views.saved_page(found, kind)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(map(str, words)))  # nothing that a header or a disk could mind
        headers = {
            "Content-Disposition": f'attachment; filename="{name}.{kind}"',
            "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
        }
        return Response(content, media_type=KINDS[kind], headers=headers)  # type: ignore[index]

    @app.get("/api/compare/{figure}/{kind}")
    def compared(
        figure: str,
        kind: str,
        run: Annotated[list[str] | None, Query()] = None,
        measure: Word = None,
        seeds: bool = True,
    ) -> Response:
        runs, measure = _several(catalogue, run), measure or "macro"
        return file(views.compared_figure_of(runs, figure, measure, seeds), kind, "compare", figure, measure)

    @app.get("/api/runs/{name}/figures/{figure}/{kind}")
    def of_a_run(name: str, figure: str, kind: str, round: Round = None) -> Response:
        run = catalogue.find(name)
        when = [] if round is None else ["round", round]
        return file(views.figure_of(run, figure, round), kind, run.info.id, figure, *when)

    @app.get("/api/runs/{name}/clients/{client}/figures/{figure}/{kind}")
    def of_a_client(name: str, client: int, figure: str, kind: str) -> Response:
        run = catalogue.find(name)
        return file(views.client_figure_of(run, client, figure), kind, run.info.id, "client", client, figure)


def _several(catalogue: Catalogue, given: list[str] | None) -> list[RunFolder]:
    names = list(dict.fromkeys(given or []))
    if not 2 <= len(names) <= views.MOST_COMPARED:
        raise UsageError(f"{len(names)} runs to compare: select from 2 to {views.MOST_COMPARED}")
    return [catalogue.find(name) for name in names]


def _add_stream(app: FastAPI, catalogue: Catalogue, streams: Streams) -> None:
    @app.get("/api/runs/{name}/stream")
    async def stream(name: str, request: Request) -> Response:
        if streams.full:
            return Json({"error": f"{streams.most} runs are being watched already: close a page"}, status_code=503)
        run: RunFolder = catalogue.find(name)
        place = place_of(request.headers.get("last-event-id") or request.query_params.get("after"))
        return StreamingResponse(streams.watch(run, place), media_type="text/event-stream")


def _add_errors(app: FastAPI, pages: Environment) -> None:
    def answer(request: Request, status: int, text: str) -> Response:
        if request.url.path.startswith("/api/"):
            return Json({"error": text}, status_code=status)
        return HTMLResponse(pages.get_template("error.html").render(text=text, status=status), status_code=status)

    @app.exception_handler(FedKinError)
    def known(request: Request, error: FedKinError) -> Response:
        return answer(request, 404 if isinstance(error, UsageError) else 422, text(error, 1000))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return answer(request, 400, text(f"{first['loc'][-1]}: {first['msg']}", 300))

    @app.exception_handler(HTTPException)
    def missing(request: Request, error: HTTPException) -> Response:
        return answer(request, error.status_code, text(error.detail, 300))
