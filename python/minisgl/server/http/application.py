"""The HTTP application: routes, middleware and error handlers over a frontend.

    routes.py       from a request to an answer
    errors.py       from an error to a response
    middleware.py   what sees a request before the routes

Knows nothing of tokens or processes. Next to read: `routes.py`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import anyio.lowlevel
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from minisgl.server.args import ServerConfig
from minisgl.server.frontend import Frontend
from minisgl.server.http.access_log import ANTHROPIC_ID_HEADER, REQUEST_ID_HEADER, AccessLog
from minisgl.server.http.body import BodyReader
from minisgl.server.http.errors import add_error_handlers, methods_of_path
from minisgl.server.http.key_salts import key_salts
from minisgl.server.http.middleware import ApiKey, BodyLimit, HeadAsGet, KeyQuota
from minisgl.server.http.openapi import REQUIRES_KEY, DocumentedApp, document_router
from minisgl.server.http.routes import open_router, router
from minisgl.server.key_limits import KeyLimits
from minisgl.server.peers import Peers
from minisgl.server.requests.validation import RequestBounds
from minisgl.server.served_model import ServedModel
from minisgl.version import __version__

if TYPE_CHECKING:
    from minisgl.server.http.tracing import Tracer  # its library is optional


class _Application(DocumentedApp):
    def build_middleware_stack(self) -> ASGIApp:
        """Put the access log outside of FastAPI's outermost layer, which answers bugs."""
        app = AccessLog(super().build_middleware_stack(), self.state.frontend.metrics)
        tracer: Tracer | None = self.state.tracer
        return tracer.wrap(app) if tracer else app


def create_app(
    frontend: Frontend,
    model: ServedModel,
    config: ServerConfig,
    *,
    salt_secret: bytes | None = None,
    key_limits: KeyLimits | None = None,
    peers: Peers | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The application, over a frontend that runs in the same event loop.

    The caller closes `state.body_reader` at the end.

    Args:
        salt_secret: the secret that the salts of keys are made with, equal in all API processes.
            None makes one for this application.
        key_limits: the limits of each key, from the file that the config names; None for no limits.
        peers: the other API processes, if there are any.
        tracer: makes traces of requests; the caller shuts it down.
    """
    # FastAPI would redirect to the scheme and the host that this server sees, not its client.
    app = _Application(title="Mini-SGLang", version=__version__, redirect_slashes=False)
    app.state.strict_fields = config.strict_fields
    app.state.frontend = frontend
    app.state.model = model
    app.state.peers = peers
    app.state.tracer = tracer
    bounds = RequestBounds(
        model.max_seq_len,
        frontend.max_open,
        config.strict_fields,
        model.has_reasoning_switch,
        model.always_reasons,
    )
    max_body_bytes = config.max_body_mb << 20
    app.state.body_reader = BodyReader(bounds, max_body_bytes)
    salt_of_key: dict[bytes, bytes] = {}
    if len(set(config.api_key)) > 1 and not config.share_prefixes_between_keys:
        salt_of_key = key_salts(config.api_key, salt_secret or secrets.token_bytes(32))
    app.state.methods_of_path = methods_of_path(
        [*document_router.routes, *open_router.routes, *router.routes]
    )
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, timeout_s=config.body_timeout_s)
    if key_limits:
        app.add_middleware(KeyQuota, limits=key_limits, metrics=frontend.metrics)
    _add_middleware(app, frontend, config, salt_of_key)
    add_error_handlers(app)
    app.include_router(document_router)
    app.include_router(open_router)
    if config.api_key:
        app.include_router(router, **REQUIRES_KEY)
    else:
        app.include_router(router)
    return app


async def warm_up(app: FastAPI) -> None:
    """Do the work that the first requests would wait for, a tenth of a second each.

    FastAPI builds a route when it first matches a request, and anyio loads its part for asyncio
    when it is first used. The process for large bodies takes half a second to start.
    """
    app.state.body_reader.start(router.routes)
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "", "root_path": ""})
    await anyio.lowlevel.checkpoint()


def _add_middleware(
    app: FastAPI,
    frontend: Frontend,
    config: ServerConfig,
    salt_of_key: dict[bytes, bytes],
) -> None:
    """Middleware that is added last sees a request first."""
    if config.api_key:
        app.add_middleware(
            ApiKey, keys=config.api_key, metrics=frontend.metrics, salt_of_key=salt_of_key
        )
    if config.cors_origins:  # before the keys, because a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["Retry-After", REQUEST_ID_HEADER, ANTHROPIC_ID_HEADER],
        )
