"""OpenAI's API, a file an endpoint: its request, the objects of its answer, and their builder.

    chat.py               /v1/chat/completions
    messages.py           the turns of its conversation
    completions.py        /v1/completions
    responses.py          /v1/responses: the response and its events
    responses_request.py  its request
    responses_items.py    its items
    responses_tools.py    its tools, alone and in namespaces
    embeddings.py         /v1/embeddings
    models.py             /v1/models

Requests are made of what is in `requests/`, answers of what is in `answers/`. Nothing here knows
HTTP. Read `chat.py` first.
"""

__all__: list[str] = []
