"""The schema of the API: the structs of request bodies and answers, and one row for each route, an `Operation`.

Routes, the OpenAPI document, the typed client and the commands are made from them, so that each field and each path is
written once. Nothing here knows how an operation is carried out.
"""
