"""Why tests of other servers fail here: a table of classes, of which the first that fits counts.

A failure that no class explains is `unknown`: someone has to look at it. `gap` is what loralane may still want.
"""

import re
from typing import NamedTuple


class Class(NamedTuple):
    """A class of failures."""

    name: str
    why: str
    test: str = ""
    """Regular expression that the test's id must contain."""
    text: str = ""
    """Regular expression that what the failure says must contain."""


CLASSES = (
    Class(
        "slow", "the machine is too busy for the time limits of the test", text=r"ReadTimeout|timed out|TimeoutError"
    ),
    Class(
        "stream",
        "as OpenAI's, a stream begins with a chunk that has the role and no text",
        text=r"Expected non empty content delta",
    ),
    Class(
        "stream",
        "as OpenAI's, the chunk with the finish reason has no text",
        test=r"test_chat\.py::test_chat_streaming",
        text=r"^assert None$",
    ),
    Class("not installed", "the test needs a library that is not installed", text=r"ModuleNotFoundError|ImportError"),
    Class(
        "inside",
        "the test looks into the peer's own code, for which a stub stands",
        text=r"Missing|peer_stubs|MagicMock|'Stub'|VLLM_|has no attribute '__",
    ),
    Class(
        "not text",
        "images, audio, video and other files are no input of a model of text",
        test=r"(?i)vision|image|audio|video|multimodal|_mm_|speech|whisper|_vlm",
    ),
    Class("not text", "images, audio, video and other files are no input", text=r"this model reads text"),
    Class(
        "files", "the test needs files or a model that the suite downloads", text=r"fixture '\w+' not found|huggingface"
    ),
    Class(
        "other model",
        "the test needs a model that reasons, embeds, classifies, reranks or speaks in channels",
        test=r"(?i)harmony|gpt.?oss|reasoning|thinking|classif|reward|cross_encoder|late_interaction|mteb|colbert"
        r"|token_embed|token_classify|embeds|matryoshka|rerank|real_model",
    ),
    Class("other model", "the test needs a model that reasons", text=r"model\.reasoning_parser"),
    Class(
        "other start",
        "the test starts a server with options of its own: keys, templates, slots, limits, tools, metrics",
        test=r"(?i)api_?key|root_path|middleware|uds|sagemaker|sleep|profil|slot|props|ctx_shift|speculative|lora_hotload"
        r"|no_webui|router|template|mcp|parsable|collective_rpc|weight|cache_(disk|reuse|ram)|infill|tensorizer|vertex"
        r"|gcp|monitor|security|ssl|force_include|orca|routed_experts|lora_adapters|presets",
    ),
    Class(
        "other start",
        "the test starts a server that writes tokens as their ids in all answers",
        test=r"return_tokens_as_token_ids",
        text=r"invalid literal for int",
    ),
    Class(
        "refused",
        "loralane refuses the field or the value by its name",
        text=r"unsupported_parameter|is not supported|cannot be followed|exclude each other",
    ),
    Class("route", "loralane has no such route", text=r"\b404\b|NotFoundError|\b405\b|unknown route"),
    Class(
        "error",
        "the status, the type or the words of an error differ",
        text=r"DID NOT RAISE|regex pattern did not match|status_code|BadRequestError|\b4\d\d\b",
    ),
    Class(
        "field",
        "the answer lacks a field of the peer",
        text=r"KeyError|has no attribute|AttributeError|is None|not None|NoneType|assert '\w+' in \{|hasattr",
    ),
    Class(
        "model's words",
        "the test expects words, tokens, tool calls or numbers of one model",
        text=r"Expected 1 tool call|Expected something like"
        r"|assert (['\"\[{(]|-?\d|False|len|any|all|re\.|not |\S+ (==|in|>|<|!=) )|match_regex|Expecting value",
    ),
)
UNKNOWN = Class("unknown", "no class explains it: look at the test")


def class_of(test: str, text: str) -> Class:
    """Return the class of a failure, given the test's id and what the failure says."""
    fitting = (
        one
        for one in CLASSES
        if (not one.test or re.search(one.test, test)) and (not one.text or re.search(one.text, text))
    )
    return next(fitting, UNKNOWN)
