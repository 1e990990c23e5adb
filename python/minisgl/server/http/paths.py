"""Paths that more modules than their routes know."""

from __future__ import annotations

HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
OPEN_PATHS = {HEALTH_PATH}  # their requests need no key
