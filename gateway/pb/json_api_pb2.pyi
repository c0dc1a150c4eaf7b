from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JsonRequest(_message.Message):
    __slots__ = ("create_response", "create_message", "count_message_tokens", "get_response", "cancel_response", "delete_response", "list_input_items")
    CREATE_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CREATE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNT_MESSAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GET_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    DELETE_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    LIST_INPUT_ITEMS_FIELD_NUMBER: _ClassVar[int]
    create_response: str
    create_message: str
    count_message_tokens: str
    get_response: GetResponseRequest
    cancel_response: str
    delete_response: str
    list_input_items: ListInputItemsRequest
    def __init__(self, create_response: _Optional[str] = ..., create_message: _Optional[str] = ..., count_message_tokens: _Optional[str] = ..., get_response: _Optional[_Union[GetResponseRequest, _Mapping]] = ..., cancel_response: _Optional[str] = ..., delete_response: _Optional[str] = ..., list_input_items: _Optional[_Union[ListInputItemsRequest, _Mapping]] = ...) -> None: ...

class ListInputItemsRequest(_message.Message):
    __slots__ = ("response_id", "after", "limit", "oldest_first")
    RESPONSE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    response_id: str
    after: str
    limit: int
    oldest_first: bool
    def __init__(self, response_id: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., oldest_first: _Optional[bool] = ...) -> None: ...

class GetResponseRequest(_message.Message):
    __slots__ = ("response_id", "starting_after")
    RESPONSE_ID_FIELD_NUMBER: _ClassVar[int]
    STARTING_AFTER_FIELD_NUMBER: _ClassVar[int]
    response_id: str
    starting_after: int
    def __init__(self, response_id: _Optional[str] = ..., starting_after: _Optional[int] = ...) -> None: ...

class JsonResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
