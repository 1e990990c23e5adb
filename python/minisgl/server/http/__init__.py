"""HTTP around the endpoints.

    routes.py       from a request to an answer, a function a route
    body.py         from a body to a valid request, at a bounded cost
    streaming.py    server-sent events, and clients that go away
    listener.py     uvicorn's server, with the connections below
    connections.py  deadlines and the limit of connections
    errors.py       from an error to a response
    middleware.py   what sees a request before the routes: keys, HEAD, limits
    access_log.py   a line in the log and an id for each request
    tracing.py      spans of requests for OpenTelemetry
    tenants.py      cached prefixes are found by the key that computed them
    openapi.py      the OpenAPI document

The application is made in `api_server.py`.
"""

__all__: list[str] = []
