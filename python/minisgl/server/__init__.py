"""The online entrance: processes, HTTP, and the chat in the terminal.

    args.py        the command line, made from the config's fields
    launch.py      `launch_server`: from options to a running server and back to nothing
    frontend.py    open requests: from a prompt to a stream of replies
    answers.py     replies to OpenAI's answers, whole or streamed
    protocol.py    OpenAI's objects and which of their fields are honoured
    vocabulary.py  the objects of /tokenize and /detokenize
    api_server.py  the routes
    middleware.py  what stands before them: keys, limits, counts
    metrics.py     the numbers at /metrics
    shell.py       the chat

Read `launch.py`, then `api_server.py`.
"""

from minisgl.server.api_server import create_app
from minisgl.server.args import ServerConfig, parse_args
from minisgl.server.frontend import Frontend
from minisgl.server.launch import launch_server

__all__ = ["Frontend", "ServerConfig", "create_app", "launch_server", "parse_args"]
