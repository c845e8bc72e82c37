"""The HTTP application: a FastAPI app for the cold routes, in which the hot ones are plain ASGI endpoints.

Knows: paths, and that one handler answers every error. Does not know what an endpoint does.
"""

import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from kv_transfer.errors import InvalidRequest, ServingError
from router.config import GatewayConfig, GatewayProcessConfig
from router.gateway.chat import ChatEndpoint
from router.gateway.chat_template import ChatEncoder, ChatTemplate, read_pinned_template
from router.gateway.completions import CompletionEndpoint
from router.gateway.edge import Edge
from router.gateway.errors import MethodNotAllowed, NotFound, error_reply
from router.gateway.grammar_checker import GrammarChecker
from router.gateway.metrics import GatewayMetrics
from router.gateway.sampling import describe_model
from router.gateway.status import describe_status
from router.gateway.status_page.assets import ASSETS, Asset
from router.gateway.surface import GatewayParts
from router.gateway.token_endpoints import DetokenizeEndpoint, TokenizeEndpoint
from router.gateway.tokenizer import TextTokenizer
from router.service import DirectoryAddress, RouterService

DISTRIBUTION = "glm-cluster"
READ_METHODS = ["GET", "HEAD"]
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Gateway:
    """One gateway: the application and the router behind it. Create it on the loop that it runs on."""

    def __init__(self, config: GatewayProcessConfig, secret: bytes) -> None:
        self.config = config.gateway
        self.metrics = GatewayMetrics()
        directory = DirectoryAddress(host=config.gateway.directory_host, port=config.gateway.directory_port, secret=secret)
        self.service = RouterService(
            config.router, directory, self.metrics.hooks(), wire=config.wire, num_recent=config.gateway.recent_requests
        )  # fmt: skip
        self.relay = self.service.relay
        self.metrics.watch(self.relay)
        self.grammar_checker = GrammarChecker(config.gateway.grammar_check_s)
        self.parts = _make_parts(config.gateway, self)
        self.version = metadata.version(DISTRIBUTION)
        self.started_s = time.monotonic()
        self.started_unix_s = int(time.time())
        self.app = _make_app(self)

    def start_draining(self) -> None:
        """Admit nothing more; what runs goes on."""
        self.relay.is_draining = True

    def status(self) -> dict[str, Any]:
        """What `/status.json` says."""
        return describe_status(
            self.relay,
            model=self.parts.model.name,
            version=self.version,
            uptime_s=time.monotonic() - self.started_s,
            is_directory_connected=self.service.is_directory_connected,
        )

    def describe_served_model(self) -> dict[str, Any]:
        """OpenAI's model object."""
        return {
            "id": self.parts.model.name,
            "object": "model",
            "created": self.started_unix_s,
            "owned_by": DISTRIBUTION,
            "max_model_len": self.parts.context_tokens,
        }

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Runs the router for as long as the application is served."""
        await self.service.start()
        try:
            yield
        finally:
            await self.service.close()
            await self.grammar_checker.close()


def _make_parts(config: GatewayConfig, gateway: Gateway) -> GatewayParts:
    tokenizer = TextTokenizer(Path(config.tokenizer_dir))
    encoder = ChatEncoder(ChatTemplate(read_pinned_template()), tokenizer, control_tokens_in_text=config.control_tokens_in_text)
    return GatewayParts(
        config=config,
        model=describe_model(config.model_name, tokenizer, config.max_model_len_tokens),
        tokenizer=tokenizer,
        chat_encoder=encoder,
        grammar_checker=gateway.grammar_checker,
        relay=gateway.relay,
        metrics=gateway.metrics,
    )


def _make_app(gateway: Gateway) -> ASGIApp:
    app = FastAPI(lifespan=gateway.lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.routes.append(Route("/v1/chat/completions", ChatEndpoint(gateway.parts), methods=["POST"]))
    app.router.routes.append(Route("/v1/completions", CompletionEndpoint(gateway.parts), methods=["POST"]))
    app.router.routes.append(Route("/tokenize", TokenizeEndpoint(gateway.parts), methods=["POST"]))
    app.router.routes.append(Route("/detokenize", DetokenizeEndpoint(gateway.parts), methods=["POST"]))
    _add_cold_routes(app, gateway)
    for asset in ASSETS:
        _add_asset(app, asset)
    app.add_exception_handler(ServingError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    routes = frozenset(route.path for route in app.routes if isinstance(route, Route)) | {"/v1/models/{id}"}
    return Edge(app, gateway.metrics, routes)


def _add_cold_routes(app: FastAPI, gateway: Gateway) -> None:
    get = functools.partial(app.api_route, methods=READ_METHODS)

    @get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @get("/live")
    async def live() -> Response:
        return _json({"status": "ok"})

    @get("/ready")
    async def ready() -> Response:
        if gateway.relay.is_draining:
            return _json({"status": "unready", "reason": "the gateway is shutting down"}, 503)
        if not gateway.relay.registry.has_usable_pair():
            return _json({"status": "unready", "reason": "no usable pair of a prefill and a decode worker yet"}, 503)
        return _json({"status": "ready"})

    @get("/version")
    async def version() -> Response:
        return _json({"version": gateway.version})

    @get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type=PROMETHEUS_TEXT)

    @get("/status.json")
    async def status() -> Response:
        return _json(gateway.status())

    @get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [gateway.describe_served_model()]})

    @get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        gateway.parts.model.check_name(model_id)
        return _json(gateway.describe_served_model())


def _add_asset(app: FastAPI, asset: Asset) -> None:
    async def serve() -> Response:
        return Response(asset.content, media_type=asset.media_type, headers=dict(asset.headers))

    app.add_api_route(asset.path, serve, methods=READ_METHODS)


def _json(tree: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(tree), status, media_type="application/json", headers={"cache-control": "no-store"})


async def _answer_error(request: Request, error: Exception) -> Response:
    """The one place where an error becomes a reply."""
    extra: dict[str, str] = {}
    if isinstance(error, HTTPException):
        extra = dict(error.headers or {})
        error = _translate(error, request)
    reply = error_reply(error)
    return Response(reply.body, reply.status, media_type="application/json", headers={**dict(reply.headers), **extra})


def _translate(error: HTTPException, request: Request) -> ServingError:
    """The framework's own refusals in our tree."""
    if error.status_code == 404:
        return NotFound(f"there is nothing at {request.url.path[:128]!r}")
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.method[:16]} is not possible at {request.url.path[:128]!r}")
    return InvalidRequest(str(error.detail))
