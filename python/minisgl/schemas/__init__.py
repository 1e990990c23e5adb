"""Rewrites JSON schemas and regular expressions so that llguidance reads them as their author does.

    json_schemas.py  `readable_schema`: a schema without keywords that change nothing, or a refusal
    numbers.py       its numbers: rewritten or refused
    names.py         the names that a pattern matches, if these are few
    subschemas.py    where in a schema there are schemas, and the targets of references
    regexes.py       `readable_regex`: character classes as Python and ECMA-262 read them

Texts in, texts out: nothing is compiled here, and llguidance is not imported. `grammar` compiles.
"""

from minisgl.schemas.json_schemas import readable_schema
from minisgl.schemas.regexes import check_regex, readable_regex
from minisgl.schemas.subschemas import (
    Schema,
    find_referred,
    with_definitions,
    with_subschemas,
)

__all__ = [
    "Schema",
    "check_regex",
    "find_referred",
    "readable_regex",
    "readable_schema",
    "with_definitions",
    "with_subschemas",
]
