"""OpenAI's API, one file per endpoint: request, objects of the answer, and their builder.

    chat.py               /v1/chat/completions
    messages.py           the turns of its conversation
    completions.py        /v1/completions
    responses.py          /v1/responses: the response and its events
    responses_request.py  its request
    responses_items.py    its items
    responses_tools.py    its tools, alone and in namespaces
    embeddings.py         /v1/embeddings
    models.py             /v1/models

Requests are built from the parts in `requests/`, answers from those in `answers/`. Nothing here
knows HTTP. Read `chat.py` first.
"""

__all__: list[str] = []
