"""The parts of requests, for all APIs.

    generation_request.py  the fields of every request that generates text
    prompts.py             a large request in two parts: its prompts, and the rest
    tools.py               the tools of a request, and which may be called
    structured_output.py   formats that an answer has to match, and their grammars
    closed_schemas.py      forbids properties that a JSON schema does not list
    ebnf.py                rewrites grammars in EBNF as Lark
    unsupported.py         fields of other servers that are refused by name
    validation.py          types of fields
    validation_errors.py   the message of an invalid request, in one sentence

Each API has subclasses with its own fields. A request is a `RequestModel`. Nothing here knows HTTP,
or how a model writes. Read `generation_request.py` first.
"""

__all__: list[str] = []
