"""The segments of a vocabulary, of which `sample.py` chooses one before it chooses a token."""

from __future__ import annotations

SEGMENT_SIZE = 256  # tokens: so few that ranks need little padding, and noise is made for few
