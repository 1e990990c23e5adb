"""HTTP: routes, middleware, errors, metrics and the OpenAPI document."""
