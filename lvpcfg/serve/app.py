"""The ASGI application: POST /parse, GET /health, and the page at GET /.

A server on one's own machine can be reached by every page in one's browser. So JSON is asked for by its content type,
which pages of others cannot send without permission, and the name in the Host header has to be one of this server's,
which that of a page whose name was bound to this address (DNS rebinding) is not.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lvpcfg.errors import show
from lvpcfg.serve.asked import BAD, TOO_LARGE, Limits, RefusedError, read
from lvpcfg.serve.batcher import Batcher

PAGE = Path(__file__).with_name("page.html")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
BODY_SECONDS = 30.0  # in which a body has to be there
LARGE = 1 << 16  # bytes of a body that another thread reads
PLACES = "expected POST /parse, GET /health, or the page at GET /"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Service:
    """What the application answers with."""

    batcher: Batcher
    limits: Limits
    max_body: int  # bytes
    about: Callable[[], dict[str, Any]]  # for /health
    compares: bool
    hosts: Sequence[str] | None  # names of this server; None: any


def application(service: Service) -> Starlette:
    page = PAGE.read_text(encoding="utf-8")
    policy = {"Content-Security-Policy": content_policy(page)}

    async def parse(request: Request) -> Response:
        _expect_json(request)
        body = await _body(request, service.max_body)
        arguments = body, service.limits, service.compares
        asked = read(*arguments) if len(body) < LARGE else await asyncio.to_thread(read, *arguments)
        answer = asyncio.ensure_future(service.batcher.ask(asked))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return JSONResponse({"results": answer.result()})
        finally:
            for task in (answer, gone):
                task.cancel()

    async def health(request: Request) -> Response:
        batcher = service.batcher
        queue = {"requests": len(batcher.open), "sentences": batcher.waiting.sentences}
        return JSONResponse({**service.about(), "counts": asdict(batcher.figures), "queue": queue})

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers=policy)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.ensure_future(service.batcher.run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            service.batcher.close()

    app = Starlette(
        routes=[
            Route("/parse", parse, methods=["POST"]),
            Route("/health", health),
            Route("/", show_page),
        ],
        middleware=[Middleware(Guard, hosts=service.hosts)],
        exception_handlers={
            RefusedError: _refused,
            HTTPException: _no_such_place,
            ClientDisconnect: _nobody,
            Exception: _mistake,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Guard:
    """Answers those alone who call this server by its name, and adds headers to all answers."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self.app, self.hosts = app, None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if self.hosts is None or re.sub(r":\d*$", "", host).lower() in self.hosts:
            await self.app(scope, receive, send_with_headers)
        else:
            text = f"the name in the Host header is {show(host)}, not that of this server: hosts=[NAME] adds one."
            await JSONResponse({"error": text}, 421)(scope, receive, send_with_headers)


def content_policy(page: str) -> str:
    """Nothing runs or looks different but by what stands in the page itself, and nothing is loaded but from here."""
    found = {"default": "'none'", "connect": "'self'", "img": "data:"}
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        found[kind] = f"'sha256-{digest}'"
    sources = [f"{kind}-src {source}" for kind, source in found.items()]
    return "; ".join([*sources, "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"])


def _expect_json(request: Request) -> None:
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, f"the Content-Type is {show(kind)}: expected application/json.")


async def _body(request: Request, most: int) -> bytes:
    """No more of it is kept, and for no longer, than a client may ask for."""
    try:
        return await asyncio.wait_for(_read(request, most), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise RefusedError(
            408, f"the body did not come in {BODY_SECONDS:.0f} seconds.", {"Connection": "close"}
        ) from None


async def _read(request: Request, most: int) -> bytes:
    body = bytearray()
    announced = request.headers.get("content-length", "0")
    async for part in request.stream():
        body += part
        if max(len(body), int(announced)) > most:
            text = f"the body has more than {most:,} bytes: send fewer sentences at a time."
            raise RefusedError(TOO_LARGE, text, {"Connection": "close"})
    return bytes(body)


async def _gone(request: Request) -> None:
    """Returns when the client does not wait any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JSONResponse({"error": str(error)}, error.status, dict(error.headers or {}))


async def _no_such_place(request: Request, error: Exception) -> Response:
    """A wrong path, or a wrong method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {show(request.url.path)}"
    return JSONResponse({"error": f"there is no {where}: {PLACES}."}, error.status_code, dict(error.headers or {}))


async def _nobody(request: Request, error: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=BAD)


async def _mistake(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server made a mistake, which its log describes."}, 500)
