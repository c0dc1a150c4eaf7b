"""/openapi.json: the OpenAPI document, generated from the structs that validate requests and from the error table."""
