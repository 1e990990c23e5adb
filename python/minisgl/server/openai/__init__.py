"""OpenAI's API, a file an endpoint: its request, the objects of its answer, and their builder.

    chat.py               /v1/chat/completions
    completions.py        /v1/completions
    responses.py          /v1/responses: the response and its events
    responses_request.py  its request
    responses_items.py    its items
    responses_tools.py    its tools, alone and in namespaces
    embeddings.py         /v1/embeddings
    models.py             /v1/models

What they share:

    generation_request.py  fields of every request that generates text
    prompts.py             a large request in two parts: its prompts, and the rest
    builder.py             builders: from replies to a whole answer or to stream events
    common.py              ids, usage, errors, logprobs
    messages.py            the turns of a conversation
    tools.py               the tools of a request, and which may be called
    structured_output.py   what an answer has to match: formats, and their grammars
    closed_schemas.py      objects of schemas without other properties
    ebnf.py                grammars in EBNF become Lark
    unsupported.py         fields of other servers that are refused by name
    validation.py          types of fields
    validation_errors.py   what is wrong with a request, in one sentence

A request is a `RequestModel`, an object of an answer a `ResponseModel`. Nothing here knows HTTP.
"""

__all__: list[str] = []
