"""HTTP around the endpoints.

    application.py   `create_app`: the application, made of what follows
    routes.py        from a request to an answer, one function per route
    streaming.py     answers as responses: server-sent events, whole, or in pieces
    client_watch.py  ends the work for clients that go away
    errors.py        from an error to a response
    middleware.py    the layers before the routes: keys, HEAD, limits
    access_log.py    a line in the log and an id for each request
    tracing.py       spans of requests for OpenTelemetry
    paths.py         paths that more modules than their routes know
    key_salts.py     prefix namespaces by API key
    openapi.py       the OpenAPI document

The bodies of requests, each at a bounded cost:

    body.py            reads them from the connection
    body_parser.py     parses and validates them
    body_worker.py     a process that does this for large ones, and the queue for it
    body_process.py    the loop of that process
    ignored_fields.py  the log of fields that no model declares

Below the application:

    listener.py          uvicorn's server, with the connections below
    handover.py          which API process serves a connection
    connection_table.py  which connections are served, and in which order
    connection.py        one connection, and its deadlines
    request_head.py      checks the head of a request
    loop_turns.py        bounds the work in each turn of the event loop
    body_writer.py       writes the parts of a streamed body without ASGI

Read `application.py`, then `routes.py`.
"""

__all__: list[str] = []
