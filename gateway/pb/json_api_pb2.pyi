from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JsonRequest(_message.Message):
    __slots__ = ("create_response", "create_message", "count_message_tokens", "get_response", "cancel_response", "delete_response")
    CREATE_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CREATE_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNT_MESSAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GET_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    DELETE_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    create_response: str
    create_message: str
    count_message_tokens: str
    get_response: GetResponseRequest
    cancel_response: str
    delete_response: str
    def __init__(self, create_response: _Optional[str] = ..., create_message: _Optional[str] = ..., count_message_tokens: _Optional[str] = ..., get_response: _Optional[_Union[GetResponseRequest, _Mapping]] = ..., cancel_response: _Optional[str] = ..., delete_response: _Optional[str] = ...) -> None: ...

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
