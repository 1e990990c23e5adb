"""The online entrance: processes, HTTP, and the chat in the terminal.

    args.py         the command line, made from the config's fields
    launch.py       `launch_server`: from options to a running server, and its end
    capacity.py     how many connections and API processes there may be
    workers.py      the child processes; recovery.py starts them again
    serve.py        the first API process, and the end of the server
    api_worker.py   the other API processes; peers.py is how they speak to each other
    api_process.py  what every API process has; served_model.py is what it says of the model
    frontend.py     from a prompt to a stream of replies; it has the tokenizers' queues
                    (tokenizer_queues.py) and the requests (open_requests.py, generation.py)
    questions.py    what a text's tokens are, and the like: questions to tokenizers
    acceptance.py   whether requests are accepted now, and how many; places.py counts them
    key_limits.py   how much each API key may ask for
    metrics.py      the numbers at /metrics
    shell.py        the chat
    openai/         OpenAI's endpoints: requests, objects and builders of answers
    anthropic/      Anthropic's endpoints, made of the same parts
    native/         /generate, /tokenize and /detokenize
    parsing/        what the text of a model means: content, reasoning, tool calls
    http/           the application: routes, middleware, errors, connections

Only light modules are imported here, because this package is imported before the workers start.
Read `launch.py`, then `http/application.py`.
"""

from minisgl.server.args import ServerConfig, parse_args
from minisgl.server.launch import launch_server

__all__ = ["ServerConfig", "launch_server", "parse_args"]
