"""The log of fields that no model of a request declares. Knows no request."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from minisgl.server.requests.validation import IgnoredField

logger = logging.getLogger(__name__)

MAX_LOGGED = 256


class IgnoredFieldsLog:
    """Logs each field of each model once, up to 256 fields, since a client may invent names."""

    def __init__(self) -> None:
        self._logged: set[IgnoredField] = set()

    def add(self, fields: Iterable[IgnoredField]) -> None:
        for field in fields:
            if field in self._logged or len(self._logged) == MAX_LOGGED:
                continue
            self._logged.add(field)
            logger.info(
                "the field %s of %s is ignored (see --strict-fields)", field.name, field.model
            )
            if len(self._logged) == MAX_LOGGED:
                logger.info("further ignored fields are not logged")
