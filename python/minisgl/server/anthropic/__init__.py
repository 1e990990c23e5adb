"""Anthropic's Messages API, for clients that speak it.

    turns.py             the turns of a conversation, and what they become
    messages_request.py  the request, and the conversation that it becomes
    messages.py          the message that answers it, and the builder that makes it
    errors.py            errors in Anthropic's form

A request becomes the conversation that a chat of OpenAI's API would become, with the parameters and
the grammars of one. It is made of what is in `requests/`, its answer of what is in `answers/`.
Reference: https://docs.anthropic.com/en/api/messages
"""

from minisgl.server.anthropic.messages import MessageObject, MessagesBuilder, TokenCount
from minisgl.server.anthropic.messages_request import CountTokensRequest, MessagesRequest

__all__ = [
    "CountTokensRequest",
    "MessageObject",
    "MessagesBuilder",
    "MessagesRequest",
    "TokenCount",
]
