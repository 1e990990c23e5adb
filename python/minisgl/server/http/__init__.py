"""HTTP around the endpoints.

    application.py   `create_app`: the application, made of what follows
    routes.py        from a request to an answer, one function per route
    streaming.py     answers as responses: server-sent events, whole, or in pieces
    client_watch.py  clients that go away before their answer
    errors.py        from an error to a response
    middleware.py    what sees a request before the routes: keys, HEAD, limits
    access_log.py    a line in the log and an id for each request
    tracing.py       spans of requests for OpenTelemetry
    paths.py         paths that more than their routes know
    key_salts.py     cached prefixes are found by the key that computed them
    openapi.py       the OpenAPI document

The bodies of requests, each at a bounded cost:

    body.py            reads them from the connection
    body_parser.py     parses and validates them
    body_worker.py     a process that does this for large ones, and who waits for it
    body_process.py    what runs in that process
    ignored_fields.py  the log of fields that nothing reads

Below the application:

    listener.py          uvicorn's server, with the connections below
    connection_table.py  which connections are served, and in whose turn
    connection.py        one connection, and its deadlines
    request_head.py      what the head of a request must be
    loop_turns.py        a bounded part of what waits, in each turn of the event loop
    body_writer.py       a short way for the parts of a streamed body

Read `application.py`, then `routes.py`.
"""

__all__: list[str] = []
