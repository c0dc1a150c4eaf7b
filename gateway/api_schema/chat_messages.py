"""Parts of OpenAI chat bodies: messages, and the tools that a model may call."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

ROLES = ("system", "developer", "user", "assistant", "tool")

Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
Choice = Annotated[str, Meta(extra_json_schema={"enum": ["none", "auto", "required"]})]


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    """The text of a part of type `refusal`, which an assistant's message may have."""


class CalledFunction(Struct):
    name: str
    arguments: str
    """The arguments as the model wrote them: a JSON object, unless the model was cut off or made a mistake."""


class AssistantCall(Struct):
    """A tool call that an earlier answer of the model made and that the caller sends back in a message."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(Struct):
    role: Role
    content: str | list[ContentPart] | None = None
    tool_calls: list[AssistantCall] | None = None
    reasoning_content: str | None = None
    """Reasoning of an earlier answer, which chat templates may show to the model."""
    reasoning: str | None = None
    """As `reasoning_content`, in vLLM's API."""
    tool_call_id: str | None = None
    """Id of the tool call that a message of the role `tool` answers."""
    name: str | None = None
    function_call: Any = None


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the function's arguments. None means that it takes none."""
    strict: bool | None = None


class Tool(Struct):
    type: str
    function: Function | None = None


class WrittenTool(Tool):
    """A tool with the object that it was decoded from, which chat templates read as the caller wrote it."""

    written: dict[str, Any] = {}


class FunctionName(Struct):
    name: str


class ToolChoice(Struct):
    """Form of `tool_choice` that names the one tool that the model must call."""

    type: str
    function: FunctionName | None = None
