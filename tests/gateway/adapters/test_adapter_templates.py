"""Chats of an adapter that has a chat template of its own: in every protocol, on every gateway, until it is changed."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import typer
from fakes import BASE, FakeEngine, build_gateway_app, tiny_tokenizer, write_adapter
from grpc_app import as_key, open_grpc_app, until

from gateway.adapters.record import adapter_store
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import LocalSources
from gateway.adapters.templates import MOST_CHARACTERS
from gateway.cli import adapters as cli
from gateway.core.errors import ApiError
from gateway.pb import adapters_pb2, generation_pb2
from gateway.requests import served_model
from gateway.requests.grammars import Constraints
from gateway.requests.route_runner import RouteTable
from gateway.text import tokenizer as tokenizer_module
from gateway.text.compiled_template import ChatTemplate
from gateway.virtual_models.split import Split

OWN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}<|assistant|>"
HI = {"messages": [{"role": "user", "content": "hi"}]}
PLAIN, RENDERED = "<|user|>hi<|end|><|assistant|>", "[user]hi<|assistant|>"
ADAPTERS = "/admin/v1/adapters"
BODIES = {
    "/v1/chat/completions": HI,
    "/v1/messages": {**HI, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture
async def gateway_app(tmp_path):
    return await build_gateway_app(tmp_path, routes=RouteTable({"auto": Split({"pirate": 1})}))


async def load(gateway_app, **fields):
    """Load `pirate` again, as an operator does, and return the response."""
    async with gateway_app.client("sk-admin") as client:
        return await client.post(ADAPTERS, json={"name": "pirate", "source": "pirate", "replace": True} | fields)


def text_of(ids) -> str:
    return tiny_tokenizer().decode(ids, skip_special=False)


async def prompt(gateway_app, model="pirate", path="/v1/chat/completions") -> str:
    """Return the prompt that the engine gets for a chat."""
    async with gateway_app.client() as client:
        response = await client.post(path, json={"model": model, **BODIES[path]})
    assert response.status_code == 200, response.text
    return text_of(gateway_app.engine.requests[-1].prompt_ids)


@pytest.mark.parametrize("path", BODIES)
async def test_it_renders_the_adapters_chats_and_no_others(gateway_app, path):
    loaded = await load(gateway_app, chat_template=OWN)
    assert (loaded.status_code, loaded.json()["chat_template"]) == (200, "given")
    wanted = {"pirate": RENDERED, "captain": RENDERED, "auto": RENDERED, "poet": PLAIN, BASE: PLAIN}
    for model, text in wanted.items():
        assert await prompt(gateway_app, model, path) == text


async def test_what_counts_tokens_renders_it_too(gateway_app):
    await load(gateway_app, chat_template=OWN)
    async with gateway_app.client() as client:
        tokens = (await client.post("/tokenize", json={"model": "pirate", **HI})).json()["tokens"]
        counted = await client.post("/v1/messages/count_tokens", json={"model": "pirate", **HI})
        listed = (await client.get("/v1/models")).json()["data"]
    assert (text_of(tokens), counted.json()["input_tokens"]) == (RENDERED, len(tokens))
    templates = {one["id"]: one["chat_template"] for one in listed}
    assert (templates[BASE], templates["pirate"], templates["captain"]) == ("model", "given", "given")


async def test_over_grpc(tmp_path):
    async with open_grpc_app(tmp_path) as api:
        wanted = adapters_pb2.LoadAdapterRequest(name="pirate", path="pirate", replace=True, chat_template=OWN)
        assert (await api.admin.Load(wanted, metadata=as_key("admin"))).chat_template == "given"
        chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
        asked = generation_pb2.TokenizeRequest(model="pirate", chat=chat)
        tokens = (await api.generation.Tokenize(asked, metadata=as_key())).ids
    assert text_of(tokens) == RENDERED


async def test_the_one_in_its_folder_is_read_again_with_its_content(gateway_app, tmp_path):
    file = tmp_path / "pirate" / "chat_template.jinja"
    file.write_text(OWN)
    assert (await load(gateway_app)).json()["chat_template"] == "model", "only if an operator asks for it"
    assert (await load(gateway_app, chat_template="auto")).json()["chat_template"] == "auto"
    assert await prompt(gateway_app) == RENDERED
    file.write_text(OWN.replace("[", "("))
    assert await gateway_app.adapters.reload("pirate")
    assert await prompt(gateway_app) == RENDERED.replace("[", "(")
    assert (await load(gateway_app)).json()["chat_template"] == "auto", "what a load does not say stays"
    assert (await load(gateway_app, chat_template="model")).json()["chat_template"] == "model"
    assert await prompt(gateway_app) == PLAIN


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("auto", "folder has none"),
        ("", "must have 1 to"),
        ("x" * (MOST_CHARACTERS + 1), "must have 1 to"),
        ("{% for x %}", "no valid Jinja: line 1"),
        ("{{ a }}\n{{ 9 ** 9 ** 9 }}", "line 2: the operator Pow of constants"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "no valid Jinja"),
    ],
    ids=["no file", "empty", "long", "syntax", "endless", "deep"],
)
async def test_one_that_cannot_be_used_is_refused_and_changes_nothing(gateway_app, template, why):
    await load(gateway_app, chat_template=OWN)
    refused = await load(gateway_app, chat_template=template)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    assert why in refused.json()["error"]["message"]
    assert await prompt(gateway_app) == RENDERED


async def test_answers_are_read_as_the_adapters_template_wants(gateway_app):
    """The base model's template knows tools, and this one does not."""
    await load(gateway_app, chat_template=OWN)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    async with gateway_app.client() as client:
        statuses = [
            (await client.post("/v1/chat/completions", json={"model": model, **HI, "tools": tools})).status_code
            for model in ("poet", "pirate")
        ]
    assert statuses == [200, 400]


async def test_it_is_compiled_in_a_thread(gateway_app, monkeypatch):
    threads = []

    def noted(template):
        threads.append(threading.current_thread())
        return ChatTemplate(template)

    monkeypatch.setattr(tokenizer_module, "ChatTemplate", noted)
    monkeypatch.setattr(served_model, "MOST_TEMPLATES", 1)
    await load(gateway_app, chat_template=OWN)
    await gateway_app.adapters.load("poet", "poet", replace=True, chat_template=OWN.replace("[", "("))
    for _ in range(2):  # one of the two templates is kept ready
        assert (await prompt(gateway_app), await prompt(gateway_app)) == (RENDERED, RENDERED)
        assert await prompt(gateway_app, "poet") == RENDERED.replace("[", "(")
    assert len(threads) == 4 and threading.main_thread() not in threads


@pytest.fixture
def slow_grammars(monkeypatch):
    """Return a function that sets what happens while the grammar of a request is checked."""
    checked = Constraints.with_checked_grammar

    def meanwhile(act):
        async def slow(self, *args):
            request = await checked(self, *args)
            await act()
            return request

        monkeypatch.setattr(Constraints, "with_checked_grammar", slow)

    return meanwhile


@pytest.mark.parametrize(("before", "after"), [("model", OWN), (OWN, "model"), (OWN, OWN.replace("[", "("))])
async def test_a_version_gets_prompts_of_its_own_template_if_it_changes_meanwhile(
    gateway_app, slow_grammars, before, after
):
    await load(gateway_app, chat_template=before)
    loads = [after]

    async def change():
        if loads:
            await load(gateway_app, source="poet", chat_template=loads.pop())

    slow_grammars(change)
    assert await prompt(gateway_app) == {"model": PLAIN, OWN: RENDERED}.get(after, RENDERED.replace("[", "("))
    assert gateway_app.engine.requests[-1].adapter_hash == gateway_app.adapters.records["pirate"].version


async def test_the_other_template_is_asked_whether_it_knows_tools(gateway_app, slow_grammars):
    slow_grammars(lambda: load(gateway_app, chat_template=OWN))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    async with gateway_app.client() as client:
        refused = await client.post("/v1/chat/completions", json={"model": "pirate", **HI, "tools": tools})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_a_template_that_changes_each_time_is_an_error(gateway_app, slow_grammars):
    texts = iter(OWN + "!" * count for count in range(1, 9))
    slow_grammars(lambda: load(gateway_app, chat_template=next(texts)))
    async with gateway_app.client() as client:
        response = await client.post("/v1/chat/completions", json={"model": "pirate", **HI})
    assert (response.status_code, gateway_app.engine.requests) == (503, [])
    assert "keeps changing" in response.json()["error"]["message"]


@pytest.fixture
async def opened(tmp_path, valkey):
    """Opens the registry of a gateway."""
    for name in ("pirate", "poet"):
        write_adapter(tmp_path, name)
    async with AsyncExitStack() as stack:

        async def opened() -> AdapterRegistry:
            store, sources = adapter_store(valkey, BASE), LocalSources([tmp_path])
            registry = AdapterRegistry(FakeEngine(), store, sources, base_names=(BASE,))
            stack.push_async_callback(registry.close)
            await registry.start()
            await registry.restore()
            return registry

        yield opened


async def configured(registry: AdapterRegistry, *template: Path | None) -> str:
    """Start with a configuration that lists `pirate`, with a template if that is given, and return its template."""
    registry.configure({"pirate": "pirate"}, dict.fromkeys(("pirate",)[: len(template)], *template))
    registry.seeded = await registry.seed("pirate", "pirate")
    return registry.chat_template("pirate")


async def test_the_configuration_names_a_file_or_the_one_in_the_folder(opened, tmp_path):
    file, other = tmp_path / "given.jinja", OWN.replace("[", "(")
    file.write_text(OWN)
    (tmp_path / "pirate" / "chat_template.jinja").write_text(other)
    here = await opened()
    assert await configured(here, file) == OWN
    file.write_text(OWN + "!")
    assert await configured(here, file) == OWN + "!", "another text is another configuration"
    assert await configured(here, None) == other
    assert await configured(here) == "", "the configuration names none any more"
    await here.load("pirate", "pirate", replace=True, chat_template=OWN)
    later = await opened()
    assert await configured(later) == OWN, "what an operator asks for stays until the configuration says otherwise"
    await later.seed("pirate", "poet")
    assert (later.records["pirate"].source, later.chat_template("pirate")) == ("poet", OWN), "another source does not"


async def test_a_configured_template_that_cannot_be_used_is_the_adapters_error(opened, tmp_path):
    file = tmp_path / "given.jinja"
    here = await opened()
    assert (await configured(here, file), here.records["pirate"].version) == ("", "")
    assert "given.jinja" in here.seeded and "given.jinja" in (await here.status("pirate")).error
    file.write_text(OWN)
    assert (await configured(here, file), (await here.status("pirate")).error) == (OWN, "")
    file.write_text("{{")
    assert await configured(here, file) == OWN, "the former one is used"
    assert "no valid Jinja" in (await here.status("pirate")).error
    assert await configured(here) == ""
    assert (await here.status("pirate")).error == ""


async def test_what_an_operator_loads_before_a_configured_template_is_applied_stays(opened, tmp_path):
    file = tmp_path / "given.jinja"
    file.write_text("{{")
    here = await opened()
    await configured(here, file)
    assert "no valid Jinja" in here.seeded
    await here.load("pirate", "poet", chat_template=OWN)
    later = await opened()
    assert (await configured(later, file), later.records["pirate"].source) == (OWN, "poet")
    file.write_text(OWN + "!")
    assert await configured(later, file) == OWN + "!"
    await later.unload("pirate")
    assert (await configured(await opened(), file), later.records.get("pirate")) == ("", None)


async def test_every_gateway_has_it_and_it_lasts(opened, tmp_path):
    here, there = await opened(), await opened()
    await here.load("pirate", "pirate", chat_template=OWN)
    await until(lambda: there.chat_template("pirate") == OWN)
    await there.load("pirate", "pirate", replace=True, chat_template=OWN + "!")
    await until(lambda: here.chat_template("pirate") == OWN + "!")
    assert here._versions.hold(here.records["pirate"].version), "the adapter itself is the same"
    assert (await opened()).chat_template("pirate") == OWN + "!"
    engine = there._statuses._engine
    engine.rejected = "the disk is slow"
    await here.load("pirate", "poet", replace=True, chat_template="model")
    await until(lambda: "pirate" in there._mirror.errors)
    assert there.chat_template("pirate") == OWN + "!", "the old version is served, and renders as before"
    engine.rejected = ""
    await until(lambda: not there.chat_template("pirate"))
    engine.rejected = "the disk is slow"
    write_adapter(tmp_path, "novel")
    await here.load("novel", "novel", chat_template=OWN)
    await until(lambda: "novel" in there._mirror.errors)
    assert there.chat_template("novel") == OWN, "requests may wait for its first version, and are rendered for it"
    await here.unload("pirate")
    await here.load("pirate", "pirate")
    assert not here.chat_template("pirate")
    with pytest.raises(ApiError):
        await here.load("poet", "poet", chat_template="{{")
    assert "poet" not in here.records


def test_the_command_sends_the_text_of_a_file(tmp_path):
    (tmp_path / "own.jinja").write_text(OWN)
    assert [cli._template(asked) for asked in ("", "auto", "model", str(tmp_path / "own.jinja"))] == [
        *("", "auto", "model"),
        OWN,
    ]
    with pytest.raises(typer.BadParameter):
        cli._template(str(tmp_path / "absent"))
