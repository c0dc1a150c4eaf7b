"""Configuration files: what they mean, and what people are told when they are wrong."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from engine.config import EngineConfig, Speculation
from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, LaneGoals, Scheduling
from engine.core.messages.requests import Lane
from engine.rpc.target import EngineTarget, EngineTls, is_loopback
from gateway.cli.serve import _with_model
from gateway.config import engine_section
from gateway.config.file import ConfigError
from gateway.config.lanes import BatchLane, LaneConfig, LanesConfig
from gateway.config.models import EnginesConfig
from gateway.config.whole import Config, demo_config, load_config
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant, hash_key

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
ENV = {
    "STOREFRONT_KEY": "sk-storefront-0123456789",
    "STOREFRONT_NEXT_KEY": "sk-storefront-9876543210",
    "RESEARCH_KEY": "sk-research-0123456789",
    "ADMIN_KEY": "sk-admin-0123456789",
    "REDIS_URL": "redis://cache.internal:6379/0",
}


@pytest.fixture
def load(tmp_path):
    def load_text(text: str, env: dict[str, str] | None = None) -> Config:
        path = tmp_path / "loralane.yaml"
        path.write_text(text)
        return load_config(path, env or {})

    return load_text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_in_configs_loads(path):
    assert isinstance(load_config(path, ENV), Config)


def test_the_demo_file_spells_out_the_demo():
    assert load_config(CONFIGS / "demo.yaml", {}) == demo_config()
    assert load_config(None, {}) == demo_config()


def test_the_demo_file_shows_every_setting():
    document = yaml.safe_load((CONFIGS / "demo.yaml").read_text())
    assert list(document) == [field.name for field in fields(Config) if field.name not in ("engines", "models")]
    one_engine = {field.name for field in fields(EngineConfig)} - set(engine_section.ELSEWHERE)
    assert set(document["engine"]) == one_engine | {field.name for field in fields(EnginesConfig)}
    scheduling = document["engine"]["scheduling"]
    advanced = scheduling.pop("advanced")
    assert list(scheduling) == list(engine_section.PUBLISHED)
    assert list(advanced) == [field.name for field in fields(Scheduling) if field.name not in scheduling]
    assert set(document["tenants"]["acme"]) == {field.name for field in fields(Tenant)} - {"name"} | {"keys"}
    names = (
        "model",
        "adapters",
        "lanes",
        "limits",
        "redis",
        "batches",
        "http",
        "grpc",
        "admin",
        "observability",
        "cluster",
    )
    for name in names:
        assert set(document[name]) == {field.name for field in fields(type(getattr(demo_config(), name)))}
    for lane in ("interactive", "batch"):
        assert list(document["lanes"][lane]) == [field.name for field in fields(LaneConfig)]


def owners_of(config: Config) -> dict[str, Tenant]:
    """Return the tenants by the hashes of their keys."""
    return {key: entry.tenant for entry in config.tenants.values() for key in entry.keys}


def test_the_demo_is_for_this_machine_only():
    demo = demo_config()
    assert (demo.http.host, demo.http.port, demo.grpc.host, demo.grpc.port) == ("127.0.0.1", 8000, "127.0.0.1", 50051)
    owners = owners_of(demo)
    assert owners[hash_key("sk-demo-acme")].name == "acme"
    assert owners[hash_key("sk-demo-globex")].limits == Limits(600, 200_000)
    assert [key for _, key in demo.admin.seeds()] == [hash_key("sk-demo-admin")]
    assert hash_key("sk-demo-admin") not in owners


def test_production_reads_its_keys_from_the_environment():
    production = load_config(CONFIGS / "production.yaml", ENV | {"HTTP_PORT": "9000"})
    owners = owners_of(production)
    assert owners[hash_key(ENV["STOREFRONT_KEY"])] is owners[hash_key(ENV["STOREFRONT_NEXT_KEY"])]
    assert owners[hash_key(ENV["RESEARCH_KEY"])].effective_lane(Lane.INTERACTIVE) is Lane.BATCH
    assert [(who.role, key) for who, key in production.admin.seeds()] == [("owner", hash_key(ENV["ADMIN_KEY"]))]
    assert (production.http.port, production.grpc.port) == (9000, 50051)
    assert production.redis.url == ENV["REDIS_URL"]
    assert ENV["ADMIN_KEY"] not in repr(production)


def test_empty_sections_have_every_default_and_no_keys(load):
    assert load("{}") == Config()
    assert load("http:\nengine:\ntenants:\nadmin:\nadapters:\n") == Config()


def test_redis_url_fills_what_the_file_leaves_open(load):
    env = {"REDIS_URL": "redis://elsewhere:1"}
    assert load_config(None, env).redis.url == "redis://elsewhere:1"
    assert load("redis: {timeout_ms: 20}", env).redis.url == "redis://elsewhere:1"
    assert load("redis: {url: 'redis://here:2'}", env).redis.url == "redis://here:2"


def test_paths_start_from_the_files_folder(load, tmp_path):
    loaded = load("adapters: {roots: [lora, /srv/x], preload: {a: ../b}}")
    assert loaded.adapters.roots == (tmp_path / "lora", Path("/srv/x"))
    assert loaded.adapters.preload == {"a": tmp_path.parent / "b"}


def test_templates_of_adapters_are_files_or_their_own(load, tmp_path):
    preload = "preload: {a: x, b: y, c: z}"
    loaded = load(f"adapters: {{{preload}, chat_templates: {{a: t.jinja, b: null}}}}")
    assert loaded.adapters.chat_templates == {"a": tmp_path / "t.jinja", "b": None}
    assert loaded.with_served(lambda name, one: replace(one, preload={})).adapters.chat_templates == {}
    with pytest.raises(ConfigError, match=r"adapters\.chat_templates\.d: is no adapter of a preload"):
        load(f"adapters: {{{preload}, chat_templates: {{d: null}}}}")


def test_the_engine_section_is_the_engines_own_configuration(load):
    loaded = load("engine: {dtype: float32, max_seqs: 8, prefix_caching: false, memory_gb: 1, graphs: off}")
    changed = {"max_seqs": 8, "prefix_caching": False, "memory_gb": 1.0, "graphs": False}
    expected = EngineConfig(model="/models/x", dtype="float32", **changed)
    assert loaded.default_model.engine_config(Path("/models/x")) == expected


def test_the_engine_learns_what_other_sections_say_about_it(load):
    lanes = "lanes: {interactive: {ttft_s: 0.4, max_wait_s: 5}, batch: {itl_s: 2}}"
    engine = load(f"{lanes}\nengine: {{scheduling: {{preemption: swap}}}}").default_model.engine_config(
        Path("/models/x"), Path("/data/engine")
    )
    assert (engine.model, engine.state_dir) == ("/models/x", "/data/engine")
    assert engine.interactive == replace(INTERACTIVE_GOALS, ttft_s=0.4, max_wait_s=5.0)
    assert engine.batch == replace(BATCH_GOALS, itl_s=2.0)
    assert engine.scheduling == Scheduling(preemption="swap")


def test_what_a_lanes_section_leaves_out_is_that_lanes_default(load):
    assert load("lanes: {batch: {ttft_s: 7}}").lanes.batch == BatchLane(ttft_s=7.0)
    assert load("lanes: {batch: }").lanes == LanesConfig()


def test_the_demos_lanes_are_the_engines_own_goals():
    engine = demo_config().default_model.engine_config(Path("/models/x"))
    assert engine == EngineConfig(model="/models/x")
    assert (engine.interactive, engine.batch) == (INTERACTIVE_GOALS, BATCH_GOALS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_engine_reads_what_it_is_started_with(path):
    for settings in load_config(path, ENV).served.values():
        sent = settings.engine_config(Path("/models/x"), Path("/data/engine"))
        assert EngineConfig.from_json(sent.to_json()) == sent


def test_every_nested_value_survives_the_way_to_the_engine():
    config = EngineConfig(
        model="m",
        interactive=LaneGoals(1.5, 0.25, 0.5, 6.0),
        batch=LaneGoals(7.0, 8.0, 0.125, 9.0),
        scheduling=Scheduling(preemption="swap", min_chunk=7, batch_floor=0.5),
    )
    assert EngineConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ['{"model": "m", "max_seq": 1}', '{"model": "m", "scheduling": {"holds": 1}}'])
def test_the_engine_refuses_names_it_does_not_know(text):
    with pytest.raises(TypeError, match="unexpected keyword"):
        EngineConfig.from_json(text)


@pytest.mark.parametrize(("text", "expected"), [("off", "off"), ("'off'", "off"), ("auto", "auto")])
def test_speculation_is_a_word_although_yaml_reads_off_as_a_boolean(text, expected, load):
    loaded = load(f"engine: {{speculation: {text}}}")
    assert [one.engine.speculation for one in loaded.served.values()] == [expected]


def test_speculation_may_name_a_draft_model(load):
    [settings] = load("engine: {speculation: {draft_model: small}}").served.values()
    speculation = settings.engine.speculation
    assert isinstance(speculation, Speculation)
    assert speculation.draft_model.is_absolute() and speculation.draft_model.name == "small"
    assert EngineConfig.from_json(settings.engine.to_json()) == settings.engine
    draft = settings.engine.draft_config
    assert (draft.model, draft.speculation) == (str(speculation.draft_model), "off")
    for text, problem in {
        "{}": "engine.speculation.draft_model: is required",
        "{draft: small}": "engine.speculation.draft: unknown key; did you mean draft_model?",
        "{draft_model: 1}": "engine.speculation.draft_model: 1 is not a path",
        "always": "engine.speculation: must be one of off, auto",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(problem)):
            load(f"engine: {{speculation: {text}}}")


def test_references(load):
    text = "http: {port: '${PORT:-1234}', host: '${HOST}'}\nobservability: {request_log: '${LOG:-false}'}"
    loaded = load(text, {"HOST": "::1"})
    assert (loaded.http.port, loaded.http.host, loaded.observability.request_log) == (1234, "::1", False)
    assert load(text, {"HOST": "localhost", "PORT": "99"}).http.port == 99


def test_hashed_keys(load):
    hashed = hash_key("sk-secret-0123456789")
    loaded = load(
        f"tenants: {{a: {{keys: ['sha256:{hashed}']}}}}\nadmin: {{keys: ['${{H}}']}}", {"H": f"sha256:{'0' * 64}"}
    )
    assert owners_of(loaded)[hashed].name == "a"
    assert loaded.admin.keys == ("0" * 64,)


def test_administrators_by_name(load):
    loaded = load(
        "admin: {keys: ['${A}'], administrators: {ci: {key: '${B}', role: operator, tenant: acme}}}",
        {"A": "sk-first-0123456789", "B": "sk-second-0123456789"},
    )
    first, second = hash_key("sk-first-0123456789"), hash_key("sk-second-0123456789")
    assert loaded.admin.seeds() == [
        (Administrator(f"key-{first[:12]}", AdminRole.OWNER), first),
        (Administrator("ci", AdminRole.OPERATOR, "acme"), second),
    ]
    assert "sk-second" not in repr(loaded)


ADMIN = "admin: {administrators: {ci: {%s}}}"
ADMIN_KEY = "key: 'sha256:" + "1" * 64 + "'"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (f"{ADMIN_KEY}, role: root", "ci: role must be one of viewer, operator, accounts, owner, not 'root'"),
        (ADMIN_KEY, "ci.role: is missing"),
        ("role: viewer", "ci.key: is missing"),
        (f"{ADMIN_KEY}, role: viewer, rol: x", "ci.rol: unknown key; did you mean role"),
        ("key: sk-plain-in-a-file, role: viewer", "ci.key: write ${VARIABLE} or sha256"),
    ],
)
def test_administrators_that_are_refused(load, fields, problem):
    with pytest.raises(ConfigError, match=re.escape(f"admin.administrators.{problem}")):
        load(ADMIN % fields)


def test_a_key_opens_one_door(load):
    with pytest.raises(ConfigError, match=r"admin and admin\.administrators\.ci share a key"):
        load(f"admin: {{keys: ['sha256:{'1' * 64}'], administrators: {{ci: {{{ADMIN_KEY}, role: viewer}}}}}}")
    with pytest.raises(ConfigError, match=r"admin\.administrators\.configuration: the administrator name"):
        load(f"admin: {{administrators: {{configuration: {{{ADMIN_KEY}, role: viewer}}}}}}")
    for wrong, problem in (("days: 0", "days must be"), ("entries: 0", "entries must be"), ("day: 1", "day: unknown")):
        with pytest.raises(ConfigError, match=problem):
            load(f"audit: {{{wrong}}}")


TENANT = "tenants: {a: {%s}}"
WRONG = {
    "unknown section": ("htp: {port: 1}", "htp: unknown key; did you mean http?"),
    "unknown key": ("http: {prot: 1}", "http.prot: unknown key; did you mean port?"),
    "unknown, nothing near": ("grpc: {zzz: 1}", "grpc.zzz: unknown key; known are: host, port"),
    "unknown engine key": ("engine: {max_seq: 1}", "engine.max_seq: unknown key; did you mean max_seqs?"),
    "removed engine key": (
        "engine: {attention: flashinfer}",
        "engine.attention: this setting was removed: .*delete the line",
    ),
    "removed scheduling key": (
        "engine: {scheduling: {advanced: {quantum_s: 1}}}",
        "engine.scheduling.advanced.quantum_s: this setting was removed: .*delete the line",
    ),
    "removed policy": (
        "engine: {scheduling: {policy: fcfs}}",
        "engine.scheduling.policy: this setting was removed: engines serve by lanes",
    ),
    "engine.model": ("engine: {model: x}", "engine.model: unknown key"),
    "engine.state_dir": ("engine: {state_dir: x}", "engine.state_dir: unknown key"),
    "engine.interactive": ("engine: {interactive: {ttft_s: 1}}", "engine.interactive: unknown key"),
    "engine.batch": ("engine: {batch: {ttft_s: 1}}", "engine.batch: unknown key"),
    "unknown scheduling key": (
        "engine: {scheduling: {batch_flor: 0.1}}",
        "engine.scheduling.batch_flor: unknown key; did you mean batch_floor?",
    ),
    "scheduling choice": ("engine: {scheduling: {preemption: x}}", "engine.scheduling: preemption must be one of"),
    "scheduling range": ("engine: {scheduling: {batch_floor: 2}}", "engine.scheduling: batch_floor is a share"),
    "scheduling type": (
        "engine: {scheduling: {advanced: {min_chunk: x}}}",
        "engine.scheduling.advanced.min_chunk: Expected int, got str",
    ),
    "advanced scheduling": (
        "engine: {scheduling: {hold_s: 1}}",
        "engine.scheduling.hold_s: belongs into engine.scheduling.advanced",
    ),
    "published among the advanced": (
        "engine: {scheduling: {advanced: {preemption: swap}}}",
        "engine.scheduling.advanced.preemption: belongs into engine.scheduling",
    ),
    "swap_gb": ("engine: {swap_gb: -1}", "engine.swap_gb must be finite and not negative"),
    "pages of ranks": (
        "engine: {kv_listen: auto, tensor_parallel: 2}",
        "engine.kv_listen does not work with tensor_parallel or pipeline_parallel",
    ),
    "pages without a host tier": (
        "engine: {kv_listen: auto, swap_gb: 0}",
        "engine.kv_listen does not work with swap_gb",
    ),
    "one place for two": (
        "engine: {kv_listen: 'unix:/run/kv', replicas: 2}",
        "engine.kv_listen: several engines cannot listen at unix:/run/kv; write auto",
    ),
    "unknown lane key": ("lanes: {batch: {ttft: 1}}", "lanes.batch.ttft: unknown key; did you mean ttft_s?"),
    "lane range": ("lanes: {interactive: {itl_s: 0}}", "lanes.interactive: ttft_s and itl_s must be positive"),
    "lane attainment": ("lanes: {batch: {attainment: 1.1}}", "lanes.batch: attainment must be between 0 and 1"),
    "lane requests": ("lanes: {batch: {max_requests: 0}}", "lanes.batch: max_requests must be at least 1"),
    "load timeout": ("adapters: {load_timeout_s: 0}", "adapters: load_timeout_s must be positive"),
    "fetch timeout": ("adapters: {fetch_timeout_s: 0}", "adapters: fetch_timeout_s must be positive"),
    "fetch size": ("adapters: {max_fetch_gb: 0}", "adapters: max_fetch_gb must be positive"),
    "url without a slash": ("adapters: {urls: ['s3://bucket']}", "adapters: urls must be like s3://bucket/folder/"),
    "url with a way out": ("adapters: {urls: ['zip::s3://b/']}", "adapters: urls must be like s3://bucket/folder/"),
    "url of this machine": ("adapters: {urls: ['file://tmp/']}", "adapters: urls cannot hold 'file://tmp/'.*roots"),
    "url of the web": ("adapters: {urls: ['https://a.example/']}", "adapters: urls cannot hold .*redirect"),
    "unknown tenant key": (TENANT % "key: []", "tenants.a.key: unknown key; did you mean keys?"),
    "unknown limit": (TENANT % "limits: {token_per_minute: 1}", "tenants.a.limits.token_per_minute: unknown key"),
    "unknown lane section": ("lanes: {interactiv: {}}", "did you mean interactive?"),
    "unknown admin key": ("admin: {key: []}", "admin.key: unknown key; did you mean keys?"),
    "wrong type": ("http: {port: high}", "http.port: Expected int, got str"),
    "wrong type in list": ("adapters: {roots: [1]}", r"adapters.roots: 1 is not a path"),
    "section not a mapping": ("http: 8000", "http: must be a mapping"),
    "file not a mapping": ("- http", "must be a mapping"),
    "not YAML": ("http: [", "is not YAML"),
    "too deep": ("http: " + "[" * 50_000, "is nested too deep"),
    "twice": ("http: {port: 1}\nhttp: {port: 2}", "line 2: http is given twice"),
    "range": ("http: {port: 70000}", "http: port must be between 0 and 65535, not 70000"),
    "not positive": ("http: {request_timeout_s: 0}", "http: request_timeout_s must be positive"),
    "nan": ("http: {request_timeout_s: .nan}", "http: request_timeout_s must be positive"),
    "engine range": ("engine: {dtype: int8}", "engine.dtype must be one of auto, float32"),
    "policy": (
        "limits: {when_redis_is_away: panic}",
        "limits.when_redis_is_away: must be one of degraded, closed, open",
    ),
    "lane": (TENANT % "default_lane: slow", "tenants.a.default_lane: must be one of interactive, batch, not 'slow'"),
    "limit": (TENANT % "limits: {tokens_per_minute: 0}", "tenants.a.limits: tokens_per_minute must be between"),
    "unknown policy": (TENANT % "unknown_fields: pass", "tenants.a.unknown_fields: must be one of ignore, refuse"),
    "class": (TENANT % "classes: {gold: {speed: 2}}", "tenants.a.classes.gold"),
    "class weight": (TENANT % "classes: {gold: {weight: 0}}", "tenants.a.classes.gold: weight must be from"),
    "lanes contradict": (TENANT % "highest_lane: batch", "tenants.a: default_lane interactive is above highest_lane"),
    "tenant name": ("tenants: {'a b': {}}", "tenants.a b: tenant name"),
    "reserved name": ("tenants: {admin: {}}", "tenants.admin: this name belongs to administrators"),
    "name of copies": ("tenants: {virtual-model-copy: {}}", "this name belongs to copies of requests"),
    "missing variable": ("http: {host: '${HOST}'}", "http.host: the environment variable HOST is not set"),
    "missing key": (TENANT % "keys: ['${KEY}']", r"tenants.a.keys\[0\]: the environment variable KEY is not set"),
    "key in the file": (
        TENANT % "keys: [sk-secret-0123456789]",
        r"tenants.a.keys\[0\]: write \$\{VARIABLE\} or sha256",
    ),
    "key not text": (TENANT % "keys: [12345678901234]", r"tenants.a.keys\[0\]: write"),
    "keys not a list": (TENANT % "keys: sk-demo-acme", "tenants.a.keys: must be a list"),
    "short key": (TENANT % "keys: ['${SHORT}']", r"tenants.a.keys\[0\]: a key must be at least 12"),
    "shared key": ("tenants: {a: {keys: [sk-demo-acme]}, b: {keys: [sk-demo-acme]}}", "a and b share a key"),
    "open demo": ("http: {host: 0.0.0.0}\n" + TENANT % "keys: [sk-demo-acme]", "http.host: 0.0.0.0 would offer demo"),
    "open demo over grpc": ("grpc: {host: '::'}\nadmin: {keys: [sk-demo-admin]}", "grpc.host: :: would offer demo"),
    "lease too short": ("limits: {lease_seconds: 0.5}", "limits: lease_seconds must be at least 1"),
    "shadow": (TENANT % "limits: {shadow: [tokens]}", "shadow: 'tokens' is none of requests_per_minute"),
    "redis": ("redis: {url: localhost}", "redis: url must begin with one of redis://"),
    "secret in the scheme": ("redis: {url: 'redi://:sk-secret@here'}", "redis: url must begin with one of redis://"),
    "hosts of no cluster": ("redis: {url: 'redis://a,b:1'}", "redis: url has several hosts: set cluster: true"),
    "Sentinel without a name": ("redis: {url: 'redis+sentinel://a:1'}", "redis: url must name the primary"),
    "cluster with Sentinel": ("redis: {cluster: true, url: 'redis+sentinel://a/b'}", "redis: cluster needs a url that"),
    "secret in the port": ("redis: {url: 'redis://:sk-secret/x@here:1'}", "redis: url has @ behind its hosts"),
    "secret in the path": ("redis: {url: 'redis://:12/x@here:1'}", "redis: url has @ behind its hosts"),
    "secret in a store": (
        "adapters: {urls: ['s3://me:sk-secret@bucket/x']}",
        r"adapters: .* not 's3://\*\*\*@bucket/x'",
    ),
    "secret behind a store": ("adapters: {urls: ['s3://bucket/x?token=sk-secret']}", "adapters: urls must be like"),
    "secret beside a slip": (
        "redis: {url: 'redis://:sk-secret@here'\nhttp: }",
        "is not YAML: line 2, column 1",
    ),
    "policy of nothing": (TENANT % "limits: {when_redis_is_away: {fame: open}}", "away: Invalid enum value 'fame'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named_with_their_place(name, load):
    text, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as caught:
        load(text, {"SHORT": "sk-short"})
    assert "sk-secret" not in str(caught.value)
    assert "sk-short" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        load_config(tmp_path / "none.yaml", {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty; write {}"),
        ("# nothing yet\n", "is empty"),
        ("[" * 50_000, "is nested too deeply"),
        ("{a: " * 50_000, "is nested too deeply"),
        ("x" * (4 * 2**20 + 1), "it has more than 4 MiB"),
    ],
)
def test_a_file_that_says_nothing_or_too_much_is_refused(load, text, problem):
    """An editor may just be writing it."""
    with pytest.raises(ConfigError, match=problem):
        load(text)


def test_a_device_is_no_configuration():
    with pytest.raises(ConfigError, match="cannot read /dev/zero: it is no regular file"):
        load_config(Path("/dev/zero"), {})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_is_loopback(host, expected):
    assert is_loopback(host) is expected


def test_another_model_is_served_without_the_demos_template_and_adapters(load):
    other = _with_model(demo_config(), "./llama", demo=True)
    assert (other.model.source, other.model.chat_template, other.adapters.preload) == ("./llama", None, {})
    own = load("model: {chat_template: chat.jinja, name: mine}")
    assert own.model.chat_template is not None
    assert _with_model(own, "./llama", demo=False).model == replace(own.model, source="./llama")


def test_engines_elsewhere_are_part_of_the_section_engine(load, tmp_path):
    loaded = load(
        "engine: {max_seqs: 8, addresses: ['gpu1.internal:7001', '[fd00::2]:7001'],"
        " tls: {ca: ca.pem, certificate: me.pem, key: me.key}}"
    )
    tls = EngineTls(tmp_path / "ca.pem", tmp_path / "me.pem", tmp_path / "me.key")
    assert loaded.engine.max_seqs == 8
    assert loaded.engines == EnginesConfig(addresses=("gpu1.internal:7001", "[fd00::2]:7001"), tls=tls)
    assert loaded.engines.targets()[1] == EngineTarget("[fd00::2]:7001", tls)
    assert load("engine: {addresses: ['127.0.0.1:7001', 'localhost:7002']}").engines.tls is None
    assert load("engine: {replicas: 4}").engines == EnginesConfig(replicas=4)
    assert load("engine: {addresses: ['${ENGINE}']}", {"ENGINE": "[::1]:1"}).engines.addresses == ("[::1]:1",)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{replicas: 0}", "engine: replicas must be from 1 to 64"),
        ("{replicas: 65}", "engine: replicas must be from 1 to 64"),
        ("{replicas: 2, addresses: ['127.0.0.1:1']}", "with addresses it starts none"),
        ("{addresses: ['127.0.0.1:1', '127.0.0.1:1']}", "has an engine twice"),
        ("{addresses: ['gpu1:7001']}", "gpu1:7001 is not on this machine, so it needs tls"),
        ("{addresses: [gpu1]}", "like host:7001"),
        ("{addresses: ['unix:/run/engine']}", "like host:7001"),
        ("{addresses: ['127.0.0.1:0']}", "must be from 1 to 65535"),
        ("{addresses: ['127.0.0.1:70000']}", "must be from 1 to 65535"),
        ("{addresses: ['${ENGINE}']}", "the environment variable ENGINE is not set"),
        ("{addresses: 127.0.0.1}", "engine.addresses"),
        ("{tls: {ca: a, certificate: b}}", "engine.tls.key: is required"),
        ("{adresses: []}", "engine.adresses: unknown key; did you mean addresses?"),
    ],
)
def test_wrong_engines_are_refused(load, section, problem):
    with pytest.raises(ConfigError) as caught:
        load(f"engine: {section}")
    assert problem in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
