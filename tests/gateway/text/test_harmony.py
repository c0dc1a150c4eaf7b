"""Answers of gpt-oss in Harmony: channels and tool calls, however they come, and grammars and templates for them."""

import json

import pytest
from fakes import FakeEngine, build_gateway_app, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.core.messages.grammar import Grammar, GrammarKind
from gateway.text.chat_template import with_thinking
from gateway.text.reasoning.grammar import after_reasoning
from gateway.text.reasoning.harmony import CALL, CALL_OPENING, END, MARKS, MESSAGE, MOST_HEADER, HarmonyParser
from gateway.text.reasoning.parser import MARKS as FORMATS
from gateway.text.reasoning.parser import Thinking, choose_marks
from gateway.text.tools.calls import ToolCallPart
from gateway.text.tools.grammar import tool_grammar
from gateway.text.tools.harmony import Harmony
from gateway.text.tools.parser import ToolParser
from gateway.text.tools.rule import ToolRule
from tests.gateway.text.test_special_marks import CALLS, CHAT, TEMPLATES, TOOLS, USER
from tests.grammar_walk import follows

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
LOOK = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
TEMPLATE = f"{TEMPLATES['harmony']}{{# {ANALYSIS} {FINAL} #}}"
SPECIAL = [mark for mark in MARKS if mark != END]  # which is a special token of every fake tokenizer


def split(answer, size=1, *, begun=False, calls=False):
    """The reasoning and the text of an answer that comes in pieces of a size, and the number of reasoning tokens."""
    parser = HarmonyParser(begun=begun, calls=calls)
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
    shown = [parser.push(piece, len(piece)) for piece in pieces] + [parser.flush()]
    return "".join(one.reasoning for one in shown), "".join(one.text for one in shown), parser.num_tokens


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("answer", "reasoning", "text"),
    [
        (f"{ANALYSIS}Is a < b?\n\n{NEXT}{FINAL} Yes. ", "Is a < b?\n\n", " Yes. "),
        (
            f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}<|channel|>commentary<|message|>c{NEXT}{FINAL}d<|return|>",
            "a\nb",
            "c\nd",
        ),
        (f"{FINAL}{{}}", "", "{}"),
        ("plain <|text", "", "plain <|text"),
        ("to", "", "to"),
        (f"assistants help{END}", "", "assistants help"),
        (f"{ANALYSIS}cut <|en", "cut <|en", ""),
        (f"{ANALYSIS}cut{NEXT}<|channel|>fin", "cut", ""),
        (f"{ANALYSIS}no end<|channel|>final<|message|>x", "no end", "x"),
        (f"{FINAL}the mark <|end|> ends it", "", "the mark ends it"),
        (f"{FINAL}it is <|start|>{'y' * MOST_HEADER}", "", f"it is {'y' * MOST_HEADER}"),
        (f"<|start|>assistant{FINAL}a", "", "a"),
        (f"{ANALYSIS}{NEXT}{FINAL}", "", ""),
        (f"{ANALYSIS}a{NEXT}{LOOK}{{}}<|call|>", "a", "{}"),
        (f"{ANALYSIS}a{END}\nIt is 4.", "a", "It is 4."),
        (f"{ANALYSIS}a{NEXT} that is 4.", "a", "that is 4."),
        (f"{ANALYSIS}a{NEXT} to=fun", "a", ""),
        (f"{ANALYSIS}a{END}<|start|>us", "a", ""),
        (" Hi", "", " Hi"),
        (f"{FINAL}an <|e<|message|>nd|>", "", "an <|e\nnd|>"),
        (f"{FINAL}<|chan{END}nel|>commentary to=f", "", "<|chan\nnel|>commentary to=f"),
    ],
)
def test_channels_are_told_apart_however_they_come(answer, reasoning, text, size):
    assert split(answer, size)[:2] == (reasoning, text)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (f"{ANALYSIS}a{NEXT}{LOOK}\n{{}}<|call|>", f"{CALL_OPENING}functions.look{MESSAGE}{{}}{CALL}"),
        (
            ' to=functions.a.b<|channel|>commentary json<|message|>{"c": 1',
            f'{CALL_OPENING}functions.a.b{MESSAGE}{{"c": 1',
        ),
        (f"{LOOK}", f"{CALL_OPENING}functions.look{MESSAGE}{{}}"),
        (f"{LOOK}not JSON<|call|>", "not JSON"),
    ],
)
def test_calls_are_written_in_one_form(answer, text, size):
    assert split(answer, size, calls=True)[1] == text


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_whose_object_is_not_complete_ends_with_its_message(size):
    text, calls = split(f'{LOOK}{{"a": "b <{NEXT}{FINAL}Hi', calls=True)[1], ToolParser(Harmony(), {})
    parts = [part for i in range(0, len(text), size) for part in calls.push(text[i : i + size])] + calls.flush()
    called = [part for part in parts if isinstance(part, ToolCallPart)]
    assert "".join(part.name for part in called) == "look"
    assert "".join(part.arguments for part in called) == '{"a": "b <'
    assert "".join(part for part in parts if isinstance(part, str)) == "Hi"


@given(
    st.lists(
        st.sampled_from([*MARKS, "<|", "en", "d|>", "analysis", "final", "to=functions.f", "assistant", " ", "{}", "x"])
    )
)
def test_no_mark_is_shown_and_the_split_does_not_depend_on_the_pieces(parts):
    answer = "".join(parts)
    whole = split(answer, max(1, len(answer)))[:2]
    assert not any(mark in shown for mark in MARKS for shown in whole)
    assert whole == split(answer, 1)[:2] == split(answer, 5)[:2]
    assert split(answer, 1, calls=True)[:2] == split(answer, 5, calls=True)[:2]


def test_tokens_of_reasoning_are_counted_with_their_headers():
    assert split(f"{ANALYSIS}abc{END}<|start|>assistant{FINAL}de")[2] == len(f"{ANALYSIS}abc{END}")
    assert split(f"{FINAL}abc")[2] == split("abc")[2] == split("abc", begun=True)[2] == 0


def test_the_template_says_that_answers_have_channels():
    assert choose_marks("auto", TEMPLATE) is choose_marks("harmony", "") is FORMATS["harmony"]


@pytest.fixture
async def gateway_app(tmp_path):
    engine = FakeEngine(byte_tokenizer(TEMPLATE, SPECIAL))
    engine.info.model, engine.info.max_model_len = "other", 8192
    gateway_app = await build_gateway_app(tmp_path, others={"other": engine})
    gateway_app.other = engine
    yield gateway_app
    await gateway_app.assert_empty()


@pytest.mark.parametrize("tokens_per_event", [1, 5, 1000])
async def test_clients_get_reasoning_text_and_calls_apart(gateway_app, tokens_per_event):
    engine, opening = gateway_app.other, f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
    engine.reply, engine.tokens_per_event = lambda sent: opening + LOOK + '{"at": "sea"}', tokens_per_event
    async with gateway_app.openai() as client:
        whole = await client.chat.completions.create(**CHAT)
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
        [plain] = (await client.chat.completions.create(**CHAT | {"tools": []})).choices
        engine.reply = lambda sent: f"{ANALYSIS}Hm.{NEXT}{FINAL}<b>Hi"
        [final] = (await client.chat.completions.create(**CHAT)).choices
    [choice] = whole.choices
    [call] = choice.message.tool_calls
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "I look.")
    assert (choice.finish_reason, call.function.name, call.function.arguments) == (
        "tool_calls",
        "look",
        '{"at": "sea"}',
    )
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("analysis") + 2 + len("Hm.") + 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    pieces = [piece.function for delta in deltas for piece in delta.tool_calls or []]
    assert "".join(piece.arguments for piece in pieces) == '{"at": "sea"}' and pieces[0].name == "look"
    assert (plain.message.content, plain.finish_reason) == ('I look.\n{"at": "sea"}', "stop")
    assert (final.message.reasoning_content, final.message.content, final.message.tool_calls) == ("Hm.", "<b>Hi", None)


@pytest.mark.parametrize("tokens_per_event", [1, 5, 1000])
async def test_stop_strings_end_the_text_that_the_caller_gets(gateway_app, tokens_per_event):
    engine = gateway_app.other
    engine.tokens_per_event = tokens_per_event
    call = LOOK + '{"at": "sea of final"}<|call|>'
    engine.reply = lambda sent: f"{ANALYSIS}A final thought.{NEXT}{FINAL}All is final now"

    async def ask(**fields):
        async with gateway_app.client() as client:
            answer = (await client.post("/v1/chat/completions", json={**CHAT, **fields})).json()
        [choice] = answer["choices"]
        return choice, choice["message"], answer["usage"]["completion_tokens"]

    for tools in ([], CHAT["tools"]):
        choice, message, tokens = await ask(stop=["final", "assistant"], tools=tools)
        assert (message["reasoning_content"], message["content"]) == ("A final thought.", "All is ")
        assert choice["finish_reason"] == "stop"
        # Every mark is one token, and so is every other character.
        assert tokens == 3 + len("analysis") + len("A final thought.") + 3 + len("assistantfinal") + len("All is final")
    engine.reply = lambda sent: f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{call}"
    choice, message, _ = await ask(stop=["final", "functions", "sea"])
    [called] = message["tool_calls"]
    assert (message["content"], called["function"]["arguments"]) == ("I look.", '{"at": "sea of final"}')
    assert choice["finish_reason"] == "tool_calls"
    choice, message, _ = await ask(stop=["look"])
    assert (message["content"], message.get("tool_calls"), choice["finish_reason"]) == ("I ", None, "stop")
    _, message, _ = await ask(stop=["look"], include_stop_str_in_output=True)
    assert message["content"] == "I look"


async def test_a_continued_message_is_text_and_a_budget_ends_the_reasoning(gateway_app):
    engine, said = gateway_app.other, {"role": "assistant", "content": "It is"}
    engine.reply = lambda sent: " so."
    body = {**CHAT, "messages": [USER, said], "continue_final_message": True}

    def reason(sent):
        written = engine.tokenizer.decode(sent.produced, skip_special=False)
        return written + (f"{FINAL}Hi" if NEXT in written else ANALYSIS + "a" * 80)

    async with gateway_app.client() as client:
        continued = (await client.post("/v1/chat/completions", json=body)).json()
        engine.reply = reason
        ended = (await client.post("/v1/chat/completions", json={**CHAT, "thinking_token_budget": 20})).json()
    assert continued["choices"][0]["message"]["content"] == " so."
    message = ended["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a" * (20 - len("analysis") - 2), "Hi")


def backend(marks):
    """A tokenizer of bytes, whose EOS is none of the marks, which are special tokens if `marks`."""
    words = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(MARKS if marks else ())]
    made = Backend(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in ("<eos>", *(MARKS if marks else ()))])
    return made


@pytest.mark.parametrize("marks", [False, True])
def test_grammars_leave_room_for_channels(marks):
    tokens, thinking = backend(marks), Thinking(FORMATS["harmony"], begun=False)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tool, frame = {"function": {"name": "look", "parameters": schema}}, Harmony().frame
    formatted = after_reasoning(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), thinking, tokens.token_to_id)
    required, free, either = (
        tool_grammar(frame, [tool], rule, tokens.token_to_id, answer, thinking)
        for rule, answer in ((ToolRule(required=True), None), (ToolRule(), None), (ToolRule(), schema))
    )
    call, answer, text = f'{LOOK}{{"a": 1}}', f'{FINAL}{{"a": 1}}', f"{FINAL}Hi"
    wanted = {call: (required, free, either), answer: (formatted, free, either), text: (free,)}
    for reply, grammars in wanted.items():
        for begin in ("", f"{ANALYSIS}Is it <1>?{NEXT}", f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>b{NEXT}"):
            for grammar in (formatted, required, free, either):
                assert follows(grammar, tokens, begin + reply) is (grammar in grammars), (begin + reply, grammar)


def test_the_template_gets_the_reasoning_before_a_call():
    calls = {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "Hm."}
    assert with_thinking(calls)["thinking"] == "Hm."
    for message in (USER, {**calls, "content": "I look."}, {**calls, "thinking": "a"}):
        assert with_thinking(message) == message
    shown = TEMPLATE.replace("{{ message.content }}", "{{ message.thinking }}{{ message.content }}")
    text = byte_tokenizer(shown, SPECIAL).render_chat([USER, {**calls, "tool_calls": []}], TOOLS)
    assert "<|assistant|>Hm.<|end|>" in text
