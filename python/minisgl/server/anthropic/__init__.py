"""Anthropic's Messages API, for clients that speak it.

    turns.py             the turns of a conversation, and what they become
    messages_request.py  the request, and the conversation that it becomes
    messages.py          the message that answers it, and the builder that makes it
    errors.py            errors in Anthropic's form

A request becomes the same conversation as a chat of OpenAI's API, with the same parameters and
grammars. It is built from the parts in `requests/`, its answer from those in `answers/`.
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
