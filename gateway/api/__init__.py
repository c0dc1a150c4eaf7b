"""The API as data: the structs of its requests and answers, and one row for each operation.

Routes, the OpenAPI document, the typed client and the commands are made from them, so that each field and each path is
written once. Nothing here knows how an operation is carried out.
"""
