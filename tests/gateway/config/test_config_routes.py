"""The section `routes`: virtual models with their policies, and what is refused with its place."""

from __future__ import annotations

import pytest

from gateway.config.explain import explain
from gateway.config.file import ConfigError
from gateway.config.routes import virtual_names
from gateway.config.whole import Config, load_config
from gateway.virtual_models.acceptance import Acceptance, Verifier
from gateway.virtual_models.by_lane import ByLane
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from gateway.virtual_models.policy import Shadow
from gateway.virtual_models.split import Split

MODELS = """
models:
  large: {source: /models/large, adapters: {preload: {support: /a}}}
  small: {source: /models/small}
routes:
"""
ALL = (
    MODELS
    + """
  canary: {policy: split, weights: {large: 95, "large:next": 5}, sticky: tenant, shadow: {member: small, share: 0.1}}
  safe: {policy: fallback, members: [small, large], max_wait_s: 2}
  tiers: {policy: lane, interactive: large, batch: support}
  auto:
    policy: cascade
    members: [small, large]
    accept: {logprob: -0.3, agreement: true, verifier: {member: large, prompt: "{question} {answer}"}}
    patience: 2
"""
)


@pytest.fixture
def load(tmp_path):
    def load_text(text: str) -> Config:
        (tmp_path / "loralane.yaml").write_text(text)
        return load_config(tmp_path / "loralane.yaml", {})

    return load_text


def test_each_policy_has_its_own_settings(load):
    config = load(ALL)
    shadow = Shadow("small", 0.1)
    assert config.routes == {
        "canary": Split({"large": 95, "large:next": 5}, sticky="tenant", shadow=shadow),
        "safe": Fallback(("small", "large"), 2),
        "tiers": ByLane("large", "support"),
        "auto": Cascade(
            ("small", "large"),
            Acceptance(-0.3, agreement=True, verifier=Verifier("large", "{question} {answer}")),
            2,
        ),
    }
    assert virtual_names(config.routes, config.served, "large") == {"canary", "tiers"}
    assert virtual_names(config.routes, config.served, "small") == {"safe", "auto"}


def test_check_explains_virtual_models(load, tmp_path):
    found = dict(explain(load(ALL), tmp_path, {name: {"device": "cuda", "dtype": "x"} for name in ("large", "small")}))
    assert found["virtual model canary"] == "split: share of each tenant: large 0.95, large:next 0.05"
    assert found["virtual model tiers"] == "lane: interactive requests: large; batch requests: support"
    assert "small, large; passed over if away or for waits of 2 s" in found["virtual model safe"]
    tests = "valid, two samples agree, mean log probability of at least -0.3, large says yes"
    assert found["virtual model auto"] == f"cascade: small then large; accepted if: {tests}"


CASCADE = "{policy: cascade, members: [small, large], accept: {%s}}"
WRONG = {
    "no policy": ("{members: [small]}", "routes.a.policy: must be one of split, fallback, lane, cascade"),
    "unknown policy": ("{policy: best}", "routes.a.policy: must be one of"),
    "key of another policy": (
        "{policy: lane, interactive: small, batch: large, weights: {}}",
        "routes.a.weights: unknown",
    ),
    "no members": ("{policy: fallback}", "routes.a.members: is required"),
    "one member": ("{policy: cascade, members: [small]}", "routes.a: members must name at least 2"),
    "member twice": ("{policy: cascade, members: [small, small]}", "routes.a: members names one twice"),
    "unknown member": ("{policy: split, weights: {smal: 1}}", "routes.a.members: 'smal' is no base model"),
    "unknown shadow": (
        "{policy: split, weights: {small: 1}, shadow: {member: b}}",
        "routes.a.shadow.member: 'b' is no",
    ),
    "itself": ("{policy: split, weights: {a: 1}}", "routes.a.members: 'a' is no base model"),
    "weights": ("{policy: split, weights: {small: -1}}", "routes.a: weights must be at least 0"),
    "share": (
        "{policy: split, weights: {small: 1}, shadow: {member: small, share: 2}}",
        "a.shadow.share must be",
    ),
    "log probability": (
        "{policy: cascade, members: [small, large], accept: {logprob: 1}}",
        "routes.a.accept.logprob must",
    ),
    "no test": (
        "{policy: cascade, members: [small, large], accept: {valid: false}}",
        "routes.a.accept: accept names no test",
    ),
    "verifier": (
        CASCADE % "verifier: {member: small, prompt: x}",
        "routes.a.accept.verifier.prompt must contain {answer}",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named_with_their_place(name, load):
    text, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        load(f"{MODELS}  a: {text}\n")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["small", "support"])
def test_a_virtual_model_has_a_name_of_its_own(name, load):
    with pytest.raises(ConfigError, match=f"routes.{name}: is also the name of a base model, an adapter"):
        load(f"{MODELS}  {name}: {{policy: fallback, members: [small, large]}}\n")


CLOUD = """
models: {large: {source: /models/large}, small: {source: /models/small}}
tenants: {acme: {upstreams: [cl*]}, globex: {}}
routes: {auto: {policy: cascade, members: [small, cloud]}}
billing: {prices: [{prompt: 1, completion: 2}]}
upstreams: {cloud: %s}
"""
GOOD = '{url: "https://api.example.com/v1", model: big, key: "${CLOUD_KEY}", price: {prompt: 3, completion: 15}}'


def test_an_upstream_has_a_price_and_a_key_from_the_environment(tmp_path):
    (tmp_path / "loralane.yaml").write_text(CLOUD % GOOD)
    config = load_config(tmp_path / "loralane.yaml", {"CLOUD_KEY": "sk-secret"})
    cloud = config.upstreams["cloud"]
    assert (cloud.key, cloud.endpoint("chat/completions")) == (
        "sk-secret",
        "https://api.example.com/v1/chat/completions",
    )
    assert "sk-secret" not in repr(config)
    assert [(price.adapter, price.completion) for price in config.pricing.prices] == [("cloud", 15), ("*", 2)]
    found = dict(explain(config, tmp_path, {name: {"device": "cuda", "dtype": "x"} for name in ("large", "small")}))
    assert found["upstream cloud"] == "big at https://api.example.com/v1; may get data of: acme"
    assert virtual_names(config.routes, config.served, "small") == {"auto"}


WRONG_UPSTREAMS = {
    "key in the file": (
        "{url: 'https://a.example', model: b, key: sk-secret}",
        "upstreams.cloud.key: write ${VARIABLE}",
    ),
    "no TLS": ("{url: 'http://a.example', model: b}", "upstreams.cloud: url must begin with https://"),
    "credentials": ("{url: 'https://me:sk-secret@a.example', model: b}", "upstreams.cloud: url must be like"),
    "no model": ("{url: 'https://a.example'}", "upstreams.cloud.model: is required"),
    "lane": ("{url: 'https://a.example', model: b, lanes: [slow]}", "upstreams.cloud.lanes"),
    "retries": ("{url: 'https://a.example', model: b, retries: -1}", "upstreams.cloud: retries must be at least 0"),
    "timeout": ("{url: 'https://a.example', model: b, pause_s: 0}", "upstreams.cloud: pause_s must be positive"),
}


@pytest.mark.parametrize("name", WRONG_UPSTREAMS)
def test_mistakes_in_upstreams_are_named_with_their_place(name, load):
    text, message = WRONG_UPSTREAMS[name]
    with pytest.raises(ConfigError) as caught:
        load(CLOUD % text)
    assert message in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_log_probabilities_of_an_upstream_cannot_be_tested(load):
    text = (CLOUD % "{url: 'https://a.example', model: b}").replace(
        "[small, cloud]", "[cloud, small], accept: {logprob: -1}"
    )
    with pytest.raises(ConfigError, match=r"routes\.auto\.accept\.logprob: 'cloud' is an upstream"):
        load(text)


def test_upstreams_need_names_and_a_price_list_of_their_own(load):
    good = "{url: 'https://a.example', model: b, price: {prompt: 1, completion: 1}}"
    with pytest.raises(ConfigError, match=r"upstreams\.cloud\.price: needs billing\.prices"):
        load(CLOUD.replace("billing: {prices: [{prompt: 1, completion: 2}]}", "") % good)
    with pytest.raises(ConfigError, match=r"upstreams\.small: is also the name of a base model or an adapter"):
        load((CLOUD % good).replace("cloud: {url", "small: {url"))
