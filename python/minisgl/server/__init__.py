"""Online use: the server's processes, HTTP, and the chat in the terminal.

Processes:

    args.py         the command line, made from the config's fields
    launch.py       `launch_server`: from options to a running server
    capacity.py     how many connections and API processes there may be
    workers.py      the child processes of a server
    recovery.py     replaces a worker that fails, or starts all again
    serve.py        the first API process, and the end of the server
    api_worker.py   an API process other than the first
    api_process.py  the parts of every API process: application, HTTP server, frontend
    peers.py        the queues between API processes

Requests, without HTTP:

    frontend.py          from a prompt to a stream of replies
    generation.py        the replies to one request, until they are read
    open_requests.py     requests without their final reply
    questions.py         questions to tokenizers and the scheduler, and their answers
    tokenizer_queues.py  the queues from an API process to the tokenizers
    acceptance.py        whether requests are accepted now, and how many
    places.py            requests and connections that may be open in all API processes
    key_limits.py        rate limits of API keys
    served_model.py      what the API says about the model
    metrics.py           the numbers at /metrics
    stopwatch.py         the times and the tokens of one answer
    shell.py             the chat in the terminal

From HTTP to a prompt, and from replies to an answer:

    requests/   the parts of requests, for all APIs: fields, prompts, tools, formats
    parsing/    from a model's text to content, reasoning and tool calls
    answers/    the parts of answers, for all APIs: builders, usage, errors
    openai/     OpenAI's endpoints: the requests and the answers of each
    anthropic/  Anthropic's endpoints
    native/     /generate, /tokenize and /detokenize
    http/       the application: routes, middleware, errors, connections

Each folder imports from those above it in this list. `native/` also uses the conversations of
`openai/`. A test checks that there is no cycle.

Only light modules are imported here, because this package is imported before the workers start.
Read `launch.py`, then `http/application.py`.
"""

from minisgl.server.args import ServerConfig, parse_args
from minisgl.server.launch import launch_server

__all__ = ["ServerConfig", "launch_server", "parse_args"]
