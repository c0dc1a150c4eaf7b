"""What clients of OpenAI and vLLM send beside the common fields, over HTTP."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
from fakes import ACME, BASE, GatewayApp, build_gateway_app, ids_of, key_ring, tiny_tokenizer
from httpx import Response

from engine.core.messages.requests import FinishReason, TokenEvent
from gateway.openai.parse import KNOWN
from gateway.openai.unknown import MOST_NAMES, suggestion
from gateway.text.chat_template import TemplateOptions, render
from gateway.text.compiled_template import ChatTemplate

USER = {"role": "user", "content": "hi"}
CHAT = {"model": BASE, "messages": [USER]}
COMPLETION = {"model": BASE, "prompt": "Say hello", "max_tokens": 50}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

OTHERS = """
spaces_between_special_tokens kv_transfer_params mm_processor_kwargs request_id
guided_decoding_backend media_io_kwargs rid stream_reasoning bootstrap_host bootstrap_port bootstrap_room
data_parallel_rank output_ids extra_key return_cached_tokens_details n_keep num_ctx num_keep penalize_nl rep_pen_range
mirostat_tau mirostat_eta dynatemp_exponent smoothing_curve xtc_threshold dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers cache_prompt id_slot keep_alive citation_options compound_custom
disable_tool_validation reasoning_history context_length_exceeded_behavior perf_metrics_in_response raw_output
safety_model models provider route usage preset debug session_id trace api_base api_key api_version base_url
num_retries max_retries fallbacks guardrails tags mock_response drop_params additional_drop_params
allowed_openai_params extra_headers extra_body extra_query cache caching ttl litellm_metadata litellm_session_id
litellm_trace_id model_list deployment_id custom_llm_provider prompt_id prompt_variables input_cost_per_token
output_cost_per_token max_budget chat_id files features variables model_item background_tasks tool_ids tool_servers
skill_ids params filter_ids parent_id folder_id title_generation endpoint endpointType modelLabel promptPrefix
callbacks run_name configurable conversation_id user metadata store safety_identifier prompt_cache_key
prompt_cache_retention verbosity moderation id title task name input inputs output text headers config
"""
"""Fields of vLLM, SGLang, TGI, llama.cpp, Ollama, KoboldCpp, Mistral, Together, OpenRouter, LiteLLM, LangChain, Open
WebUI and LibreChat that change no answer of this model."""


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.engine.info.max_model_len = 4096
    return gateway_app


async def post(gateway_app, path, body, method="POST", key="sk-acme") -> Response:
    async with gateway_app.client(key) as client:
        return await client.request(method, path, json=body)


async def ask(gateway_app, **fields) -> Response:
    return await post(gateway_app, "/v1/chat/completions", CHAT | fields)


async def complete(gateway_app, **fields) -> dict:
    response = await post(gateway_app, "/v1/completions", COMPLETION | fields)
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(gateway_app) -> str:
    return tiny_tokenizer().decode(gateway_app.engine.requests[-1].prompt_ids, skip_special=False).replace("&#34;", '"')


@pytest.mark.parametrize(
    ("fields", "param", "meant"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"topP": 0.5}, "topP", "top_p"),
        ({"max-tokens": 5}, "max-tokens", "max_tokens"),
        ({"max_token": 5}, "max_token", "max_tokens"),
        ({"frequence_penalty": 1}, "frequence_penalty", "frequency_penalty"),
        ({"steam": True}, "steam", "stream"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "include_usage"),
        ({"response_format": {"type": "text", "json_shema": {}}}, "response_format.json_shema", "json_schema"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "f", "paramaters": {}}}]},
         "tools[1].function.paramaters", "parameters"),
        ({"tools": [{"type": "function", "funtion": {"name": "f"}}]}, "tools[0].funtion", "function"),
    ],
)  # fmt: skip
async def test_misspelled_fields_are_refused_with_what_was_meant(gateway_app, fields, param, meant):
    response = await ask(gateway_app, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert f"did you mean {meant!r}?" in error["message"]
    assert not gateway_app.engine.requests


async def test_misspelled_required_fields_are_named_too(gateway_app):
    response = await post(gateway_app, "/v1/completions", {"modle": BASE, "prompt": "hi"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "modle")


async def test_fields_of_other_servers_and_frontends_pass(gateway_app):
    response = await ask(
        gateway_app, **dict.fromkeys(OTHERS.split(), 1), stream=True, stream_options={"include_obfuscation": False}
    )
    assert response.status_code == 200, response.text
    assert (await complete(gateway_app, **dict.fromkeys(OTHERS.split(), 1)))["choices"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
    ],
)
async def test_a_nucleus_of_nothing_is_greedy(gateway_app, path, fields):
    response = await post(gateway_app, path, {"model": BASE, "top_p": 0, **fields})
    assert response.status_code == 200, response.text
    assert response.json().get("top_p", 0) == 0
    [sent] = gateway_app.engine.requests
    assert (sent.params.temperature, sent.params.top_p) == (0, 1)


async def test_unknown_fields_without_end_cost_little(gateway_app, monkeypatch):
    compared = []
    monkeypatch.setattr("gateway.openai.unknown.suggestion", lambda name, known: compared.append(name))
    response = await ask(gateway_app, **{f"field_number_{number}": 1 for number in range(5000)})
    assert (response.status_code, len(compared)) == (400, MOST_NAMES)
    assert response.json()["error"]["param"] == f"field_number_{MOST_NAMES}"


async def test_a_misspelling_behind_many_unknown_fields_is_refused(gateway_app):
    others = {f"field_number_{number}": 1 for number in range(MOST_NAMES - 1)}
    response = await ask(gateway_app, **others, temprature=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temprature")


async def test_one_unknown_name_in_many_objects_counts_once(gateway_app):
    gateway_app.engine.info.max_model_len = 2**20
    others = {"cache_control": {"type": "ephemeral"}, "origin": 1, "rank": 2}
    tools = [{"type": "function", "function": {"name": f"look{number}"}, **others} for number in range(100)]
    assert len(tools) * 3 > MOST_NAMES
    assert (await ask(gateway_app, tools=tools)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_strict_tenant_is_refused_every_unknown_field(gateway_app, path):
    strict = replace(ACME, name="strict", unknown_fields="refuse")
    gateway_app.open_again(key_ring({"sk-acme": ACME, "sk-strict": strict}))
    body = {"model": BASE, "prompt": "hi"} if path == "/v1/completions" else {"model": BASE, "messages": [USER]}
    refused = await post(gateway_app, path, {**body, "chat_id": 1}, key="sk-strict")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_id")
    assert refused.json()["error"]["message"] == "there is no field 'chat_id'"
    assert (await post(gateway_app, path, {**body, "user": "u", "metadata": {}}, key="sk-strict")).status_code == 200
    assert (await post(gateway_app, path, {**body, "chat_id": 1})).status_code == 200


def test_a_long_unknown_name_is_not_remembered():
    name = "x" * 1_000_000
    held = sys.getrefcount(name)
    assert suggestion(name, KNOWN[""]) is None
    assert sys.getrefcount(name) == held


def test_no_known_field_is_near_another_by_mistake():
    assert suggestion("x" * 1_000_000, KNOWN[""]) is None
    assert [name for name in ("seed_", "tip", "nn", "slow") if suggestion(name, KNOWN[""])] == ["seed_"]


@pytest.mark.parametrize(
    "arguments", ['{"place": "se', "", "[]", "null", "no JSON at all", '{"a":' + "[" * 500, "9" * 9000, '"x"']
)
async def test_calls_in_a_history_may_have_any_text_for_arguments(gateway_app, arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "that was no JSON"}
    gateway_app.engine.info.max_model_len = 65_536
    response = await ask(
        gateway_app, messages=[USER, {"role": "assistant", "tool_calls": [call]}, answer], tools=[TOOL]
    )
    assert response.status_code == 200, response.text
    assert json.dumps(arguments)[1:-1].replace("\\", "") in prompt_of(gateway_app).replace("\\", "")


async def test_a_template_that_reads_objects_only_gets_one(gateway_app, monkeypatch):
    template = tiny_tokenizer()._template
    read = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}"
    monkeypatch.setattr(template, "chat_template", read + "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}")
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ('{"a": "b"}', '{"a": "b')]
    response = await ask(gateway_app, messages=[USER, {"role": "assistant", "tool_calls": calls}])
    assert response.status_code == 400  # this template names no tools at all
    messages = [{"role": "assistant", "tool_calls": [{"function": {"arguments": each}} for each in ({"a": "b"}, '{"')]}]
    compiled = partial(ChatTemplate(template.chat_template).render, {})
    assert render(compiled, messages) == 'a=b;arguments={";'


@pytest.mark.parametrize("asked", [None, "auto", "default", "scale"])
async def test_answers_name_the_default_tier_where_no_lane_was_asked_for(gateway_app, asked):
    response = await ask(gateway_app, **({"service_tier": asked} if asked else {}))
    assert (response.json()["service_tier"], response.headers["x-loralane-lane"]) == ("default", "interactive")


@pytest.mark.parametrize(("asked", "lane"), [("priority", "interactive"), ("flex", "batch")])
async def test_answers_name_the_tier_that_was_asked_for(gateway_app, asked, lane):
    response = await ask(gateway_app, service_tier=asked, stream=True)
    first = json.loads(response.text.partition("\n")[0].removeprefix("data: "))
    assert (first["service_tier"], response.headers["x-loralane-lane"]) == (asked, lane)


async def test_an_assistants_refusal_is_part_of_the_history(gateway_app):
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I would rather not."}]}
    assert (await ask(gateway_app, messages=[USER, refused, USER])).status_code == 200
    assert "<|assistant|>I would rather not.<|end|>" in prompt_of(gateway_app)


async def test_whole_numbers_may_be_spelled_as_floats(gateway_app):
    answer = await complete(gateway_app, max_tokens=3.0, n=2.0, seed=7.0)
    assert (answer["usage"]["completion_tokens"], len(answer["choices"])) == (6, 2)
    for value in (3.5, True, "3", 1e300):
        response = await post(gateway_app, "/v1/completions", COMPLETION | {"max_tokens": value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", f"/v1/models/{BASE}/", "/ping", "/ping/"])
async def test_a_trailing_slash_makes_no_difference(gateway_app, path):
    assert (await post(gateway_app, path, None, "GET")).status_code == 200


async def test_a_post_to_a_path_with_a_slash_is_answered_at_once(gateway_app):
    for path, body in (("/v1/chat/completions/", CHAT), ("/v1/completions/", COMPLETION), ("/ping/", None)):
        assert (await post(gateway_app, path, body)).status_code == 200
    assert (await post(gateway_app, "/v1/moderations/", CHAT)).status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_says_whether_requests_can_be_served(gateway_app, method):
    gateway_app.engine.ready = False
    async with gateway_app.client(None) as client:
        assert (await client.request(method, "/ping")).status_code == 503


async def test_stop_strings_are_shown_where_that_is_asked_for(gateway_app):
    for streamed in (False, True):
        answer = await ask(gateway_app, stop=["lo, w"], include_stop_str_in_output=True, stream=streamed)
        assert told(answer) == "Hello, w"
        assert told(await ask(gateway_app, stop=["lo, w"], stream=streamed)) == "Hel"


async def test_stop_tokens_are_shown_too(gateway_app):
    ids = ids_of("Hey!")
    gateway_app.engine.last_words = TokenEvent("", ids, finish_reason=FinishReason.STOP)
    fields = {"stop_token_ids": [ids[-1]], "max_tokens": 50}
    assert told(await ask(gateway_app, **fields, include_stop_str_in_output=True)) == "Hey!"
    assert told(await ask(gateway_app, **fields)) == "Hey"


def told(response: Response) -> str:
    if response.headers["content-type"] == "application/json":
        return response.json()["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_an_answer_may_go_on_from_the_last_message(gateway_app):
    begun = [USER, {"role": "assistant", "content": "Once upon"}]
    assert (await ask(gateway_app, messages=begun, continue_final_message=True)).status_code == 200
    assert prompt_of(gateway_app).endswith("<|assistant|>Once upon")
    await ask(gateway_app, messages=begun, add_generation_prompt=False)
    assert prompt_of(gateway_app).endswith("Once upon<|end|>")
    both = await ask(gateway_app, messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")


async def test_callers_may_set_a_templates_variables(gateway_app, monkeypatch):
    template = tiny_tokenizer()._template
    monkeypatch.setattr(template, "chat_template", "{{ messages[0].content }}{% if thinking %} <think>{% endif %}")
    await ask(gateway_app, chat_template_kwargs={"thinking": True})
    assert prompt_of(gateway_app) == "hi <think>"
    body = CHAT | {"chat_template_kwargs": {"thinking": True}}
    tokens = (await post(gateway_app, "/tokenize", body)).json()["tokens"]
    assert tuple(tokens) == gateway_app.engine.requests[-1].prompt_ids


@pytest.mark.parametrize(
    "variables",
    [{"raise_exception": 5}, {"messages_": [1] * 900}, {"range": "no"}, {"namespace": None}, {"loop": []}],
)
async def test_hostile_variables_do_no_more_than_be_refused(gateway_app, variables, monkeypatch):
    template = tiny_tokenizer()._template
    text = "{% set ns = namespace(x=1) %}{% for i in range(2) %}{{ messages[0].content }}{% endfor %}"
    monkeypatch.setattr(template, "chat_template", text)
    assert (await ask(gateway_app, chat_template_kwargs=variables)).status_code in (200, 400)
    await gateway_app.assert_empty()


def test_what_a_template_raises_is_told_to_the_caller():
    def fail(*args):
        raise ZeroDivisionError("division by zero")

    with pytest.raises(Exception, match=r"refuses these messages or chat_template_kwargs: division by zero") as caught:
        render(fail, [USER], options=TemplateOptions(variables={"x": 0}))
    assert caught.value.http_status == 400
