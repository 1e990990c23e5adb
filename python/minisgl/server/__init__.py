"""The online entrance: processes, HTTP, and the chat in the terminal.

From the command line to running processes:

    args.py              the command line, made from the config's fields
    launch.py            `launch_server`: from options to a running server, and its end
    capacity.py          how many connections and API processes there may be
    workers.py           the child processes
    recovery.py          replaces a child that fails, or starts all again
    serve.py             the first API process, and the end of the server
    api_worker.py        the other API processes
    api_process.py       what every API process has
    peers.py             how API processes speak to each other
    served_model.py      what they say of the model
    shell.py             the chat

From a prompt to a stream of replies:

    frontend.py          the way of a prompt, and of its replies
    open_requests.py     requests without their final reply
    generation.py        the replies to one API request, until they are read
    tokenizer_queues.py  the queues of the tokenizers
    questions.py         questions to tokenizers and the scheduler: a text's tokens, and the like
    acceptance.py        whether requests are accepted now, and how many
    places.py            how many are open in all API processes
    key_limits.py        how much each API key may ask for
    metrics.py           the numbers at /metrics

From HTTP to a prompt, and from replies to an answer:

    requests/            what requests of all APIs are made of: fields, prompts, tools, formats
    parsing/             what the text of a model means: content, reasoning, tool calls
    answers/             what answers of all APIs are made of: builders, usage, errors
    openai/              OpenAI's endpoints: the requests and the answers of each
    anthropic/           Anthropic's endpoints
    native/              /generate, /tokenize and /detokenize
    http/                the application: routes, middleware, errors, connections

Each folder imports from those above it, in this order, and `native/` has the conversations of
`openai/`. A test holds that they have no cycle.

Only light modules are imported here, because this package is imported before the workers start.
Read `launch.py`, then `http/application.py`.
"""

from minisgl.server.args import ServerConfig, parse_args
from minisgl.server.launch import launch_server

__all__ = ["ServerConfig", "launch_server", "parse_args"]
