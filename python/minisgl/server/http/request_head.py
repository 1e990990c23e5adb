"""The head of a request: how it is passed to the application, and which heads are refused.

Uvicorn and h11 accept more than a server should: versions other than 1.x, and a body that two
headers frame. Knows no connection. Reference: RFC 9112, sections 2.3, 3.2.2 and 6.3.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

from minisgl.errors import InvalidRequest, RequestError, UnknownHttpVersion

_ABSOLUTE_FORM = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE)  # of a request's target


def with_origin_form(scope: Scope) -> Scope:
    """Copy a scope, with a path as its target.

    If the target is a URL, its host takes the place of the Host header.
    """
    absolute = _ABSOLUTE_FORM.fullmatch(scope["raw_path"])
    if absolute is None:
        return {**scope}
    host, path = absolute.groups()
    others = [header for header in scope["headers"] if header[0] != b"host"]
    raw_path = path or b"/"
    return {
        **scope,
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "headers": [(b"host", host), *others],
    }


def refusal_of_head(scope: Scope) -> RequestError | None:
    """The error of a request whose version or framing is refused; None if both are right."""
    version = scope["http_version"]
    if not version.startswith("1."):  # h11 reads those of others as if they were 1.1
        return UnknownHttpVersion(version)
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        message = "a request has Content-Length or Transfer-Encoding, not both"
        return InvalidRequest(message, code="invalid_request")
    return None
