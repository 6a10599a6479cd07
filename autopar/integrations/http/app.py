"""The routes of the server.

    /v1/completions, /v1/chat/completions     generate, whole or as a stream of server-sent events
    /v1/models, /v1/models/{name}             the model that is served
    /health                                   200, or 503 with the name of the rank that has failed
    /metrics                                  metrics for Prometheus

A client that leaves ends its request, and nothing else: its work is a task that watches the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Model
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from autopar.integrations.http.engine import ServedModel
from autopar.integrations.http.errors import ApiError
from autopar.integrations.http.generation import Generation
from autopar.integrations.http.metrics import CONTENT_TYPE, PrometheusMetrics
from autopar.integrations.http.parsed_request import ParsedRequest, read_chat, read_completion, unknown_model
from autopar.integrations.http.responses import Body, ChatResponses, CompletionResponses, Responses, joined, usage_of
from autopar.values import parse
from autopar.version import VERSION

_LOG = logging.getLogger("uvicorn.error")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def make_app(served: ServedModel) -> FastAPI:
    """The ASGI application that serves one model."""
    app = FastAPI(title="autopar", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    metrics = PrometheusMetrics(served.engine)
    created = int(time.time())

    async def completions(request: Request) -> Response:
        return _GenerationResponse(await _body(request), read_completion, CompletionResponses, served, metrics)

    async def chat(request: Request) -> Response:
        return _GenerationResponse(await _body(request), read_chat, ChatResponses, served, metrics)

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(served, created)]})

    async def model(name: str) -> Response:
        if name != served.name:
            raise unknown_model(name, served)
        return JSONResponse(_model(served, created))

    async def health() -> Response:
        served.check_ready()
        return JSONResponse({"status": "ok"})

    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_api_route("/v1/models", models)
    app.add_api_route("/v1/models/{name:path}", model)
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", prometheus)

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        metrics.error(error.status)
        return _error_response(error)

    async def no_route(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error_response(ApiError(str(error.detail), error.status_code))

    async def gone(_: Request, __: Exception) -> Response:
        return Response()  # nobody reads it

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, no_route)
    return app


def _model(served: ServedModel, created: int) -> dict[str, Any]:
    found = Model(id=served.name, created=created, object="model", owned_by="autopar")
    return found.model_dump() | {"max_model_len": served.engine.max_length}


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)


async def _body(request: Request) -> Any:
    try:
        text = (await request.body()).decode()
        body = parse(text)
        if "\\ud" in text.lower():  # halves of characters, which neither tokenizers nor responses can encode
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except ValueError as error:
        raise ApiError(f"body: expected a JSON object, found {error}") from None


class _GenerationResponse(Response):
    """The answer to a request, generated while the client stays."""

    def __init__(
        self,
        body: Any,
        read: Callable[[Any, ServedModel], ParsedRequest],
        responses: Callable[[ParsedRequest, ServedModel], Responses],
        served: ServedModel,
        metrics: PrometheusMetrics,
    ) -> None:
        super().__init__()
        self._body, self._read, self._responses, self._served, self._metrics = body, read, responses, served, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        left = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(scope, receive, send)
        except ApiError as error:
            self._metrics.error(error.status)
            await _error_response(error)(scope, receive, send)
        except OSError:  # of a client that has left
            pass
        except Exception:
            _LOG.exception("a request failed")
            self._metrics.error(500)
            with contextlib.suppress(Exception):  # a response may have begun
                await _error_response(ApiError("an error of the server", 500))(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        in_thread = asyncio.get_running_loop().run_in_executor
        request = await in_thread(self._served.thread, self._read, self._body, self._served)
        responses = self._responses(request, self._served)
        async with Generation(request, self._served) as generation:
            if request.stream:
                await self._stream(generation, responses, send)
                return
            deltas = [delta async for some in generation.deltas() for delta in some]
            choices = joined(deltas, request.choices)
            text = _json(responses.whole(choices, usage_of(generation)))
        await Response(text, media_type="application/json")(scope, receive, send)

    async def _stream(self, generation: Generation, responses: Responses, send: Send) -> None:
        async def events(texts: Iterable[str], more: bool = True) -> None:
            data = "".join(f"data: {text}\n\n" for text in texts).encode()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        request = generation.request
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        try:
            openings = [responses.opening(choice) for choice in range(request.choices)]
            await events(_json(opening) for opening in openings if opening)
            async for deltas in generation.deltas():
                await events(_json(responses.chunk(delta)) for delta in deltas)
            usage = [_json(responses.usage(usage_of(generation)))] if request.include_usage else []
            await events([*usage, "[DONE]"], more=False)
        except ApiError as error:  # the status is sent already
            self._metrics.error(error.status)
            await events([json.dumps(error.body())], more=False)


def _json(body: Body) -> str:
    return body.model_dump_json(exclude_unset=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
