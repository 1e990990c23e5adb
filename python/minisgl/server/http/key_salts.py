"""Prefix namespaces by API key, so that no tenant learns from the cache what another has sent.

`cached_tokens` and the time to the first token show whether a prompt's beginning was cached. If
prefixes were shared between keys, one tenant could guess another's prompts page by page. A
request's cache salt is therefore made of its key's salt and of the salt in the request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import replace

from fastapi import Request

from minisgl.core import SamplingParams

KEY_SALT = "key_salt"  # the name in a request's state


def key_salts(keys: Iterable[str], secret: bytes) -> dict[bytes, bytes]:
    """A salt for each key, by the key's digest.

    It is keyed with a secret, so that it says nothing about the key.
    """
    digests = [key_digest(key.encode()) for key in keys]
    return {digest: hmac.digest(secret, digest, hashlib.sha256) for digest in digests}


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def salt_by_key(request: Request, sampling: SamplingParams) -> SamplingParams:
    """The parameters, with a cache salt of the request's key; unchanged if keys share prefixes."""
    key_salt: bytes | None = getattr(request.state, KEY_SALT, None)
    if key_salt is None:
        return sampling
    own_salt = sampling.cache_salt or ""  # a request's own salt is never empty
    combined = hmac.new(key_salt, own_salt.encode(errors="surrogatepass"), hashlib.sha256)
    return replace(sampling, cache_salt=combined.hexdigest())
