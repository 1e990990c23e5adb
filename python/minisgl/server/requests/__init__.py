"""What the requests of all APIs are made of.

    generation_request.py  the fields of every request that generates text
    prompts.py             a large request in two parts: its prompts, and the rest
    tools.py               the tools of a request, and which may be called
    structured_output.py   what an answer has to match: formats and their grammars
    closed_schemas.py      objects of schemas without other properties
    ebnf.py                grammars in EBNF become Lark
    unsupported.py         fields of other servers that are refused by name
    validation.py          types of fields
    validation_errors.py   what is wrong with a request, in one sentence

Each API has subclasses with its own fields. A request is a `RequestModel`. Nothing here knows HTTP,
or how a model writes. Read `generation_request.py` first.
"""

__all__: list[str] = []
