"""Regular expressions that llguidance would read otherwise than their author."""

from __future__ import annotations

import re

from minisgl.errors import InvalidRequest


def check_regex(pattern: str) -> None:
    """Refuse a pattern with the flag x, which ignores white space, and tabs or line breaks.

    llguidance would take them for text, and what follows a comment for a part of it.

    Raises:
        InvalidRequest: it is such a pattern.
    """
    if re.search(r"[\t\n\r]", pattern) is None:
        return
    without_escapes = re.sub(r"\\.", "", pattern, flags=re.DOTALL)
    without_classes = re.sub(r"\[\^?\]?[^\]]*\]", "", without_escapes)
    if re.search(r"\(\?[a-zA-Z]*x", without_classes):
        raise InvalidRequest(
            "a regular expression with the flag x must have no tabs and no line breaks",
            param="grammar",
        )
