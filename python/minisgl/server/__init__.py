"""The online entrance: processes, HTTP, and the chat in the terminal.

    args.py        the command line, made from the config's fields
    launch.py      `launch_server`: from options to a running server and back to nothing
    serve.py       the event loop, between the two
    api_server.py  the routes
    frontend.py    open requests: from a prompt to a stream of replies
    protocol.py    requests: which fields are honoured, and the parameters and prompts that they become
    answers.py     replies to OpenAI's answers, whole or streamed
    deltas.py      what an answer says, piece by piece: the one stream behind all answers
    dialect/       how the model spells calls of tools and thoughts
    formats.py     formats that an answer can be held to
    messages.py, fields.py, objects.py                what requests and answers are made of
    responses.py, embeddings.py, native.py, vocabulary.py    the routes beside completions
    middleware.py  what stands before the routes: keys, limits, counts
    metrics.py     the numbers at /metrics
    shell.py       the chat

What is imported here is light, for it stands before the start of the workers. Read `launch.py`, then `api_server.py`.
"""

from minisgl.server.args import ServerConfig, parse_args
from minisgl.server.launch import launch_server

__all__ = ["ServerConfig", "launch_server", "parse_args"]
