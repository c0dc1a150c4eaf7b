import pytest

from engine.core.messages.requests import Lane
from gateway.core.errors import ApiError
from gateway.core.lanes import TIER_OF_LANE, lane_name, requested_lane
from gateway.core.routing import Catalog, ModelQuery, resolve
from gateway.core.tenants import Tenant

CATALOG = Catalog(("base", "org/base:v1"), {"pirate", "poet"}, {"captain": "pirate"})
ANYONE = Tenant("anyone")
POETS = Tenant("poets", adapters=("po*",))
KEPT = Catalog(("base",), {"pirate", "poet"}, {"captain": "pirate"}, {"pirate": ("acme", "poets")})


@pytest.mark.parametrize(
    ("query", "adapter"),
    [
        (ModelQuery("base"), None),
        (ModelQuery("org/base:v1"), None),
        (ModelQuery("pirate"), "pirate"),
        (ModelQuery("captain"), "pirate"),
        (ModelQuery("base:poet"), "poet"),
        (ModelQuery("base:captain"), "pirate"),
        (ModelQuery("org/base:v1:poet"), "poet"),
        (ModelQuery("base", adapter_id="poet"), "poet"),
        (ModelQuery("base", lora_path="poet"), "poet"),
        (ModelQuery("base", adapter_id=""), None),
        (ModelQuery("pirate", adapter_id="captain", lora_path="pirate"), "pirate"),
    ],
)
def test_names_lead_to_what_serves_them(query, adapter):
    assert resolve(query, [CATALOG], ANYONE) == (0, adapter)


@pytest.mark.parametrize(
    "query",
    [
        ModelQuery("gpt-4"),
        ModelQuery(""),
        ModelQuery("base:gpt-4"),
        ModelQuery("base:"),
        ModelQuery("gpt-4:poet"),
        ModelQuery("base", adapter_id="gpt-4"),
        ModelQuery("base", lora_path="/etc"),
    ],
)
def test_unknown_names_are_not_found(query):
    with pytest.raises(ApiError) as caught:
        resolve(query, [CATALOG], ANYONE)
    assert (caught.value.http_status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("query", [ModelQuery("pirate"), ModelQuery("captain"), ModelQuery("base", "pirate")])
def test_another_tenants_adapter_reads_like_an_unknown_one(query):
    with pytest.raises(ApiError, match="does not exist or you do not have access") as caught:
        resolve(query, [CATALOG], POETS)
    assert caught.value.code == "model_not_found"
    assert resolve(ModelQuery("poet"), [CATALOG], POETS) == (0, "poet")


@pytest.mark.parametrize("query", [ModelQuery("pirate"), ModelQuery("captain"), ModelQuery("base:pirate")])
def test_an_adapter_kept_for_some_tenants_is_unknown_to_others(query):
    assert resolve(query, [KEPT], Tenant("acme")) == (0, "pirate")
    assert resolve(ModelQuery("poet"), [KEPT], Tenant("globex")) == (0, "poet")
    for stranger in (Tenant("globex"), POETS):  # named for it, but its configuration does not let it
        with pytest.raises(ApiError, match="does not exist or you do not have access"):
            resolve(query, [KEPT], stranger)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (ModelQuery("pirate", adapter_id="poet"), "adapter_id"),
        (ModelQuery("pirate", lora_path="poet"), "lora_path"),
        (ModelQuery("base", adapter_id="pirate", lora_path="poet"), "lora_path"),
    ],
)
def test_contradictions_are_refused(query, param):
    with pytest.raises(ApiError) as caught:
        resolve(query, [CATALOG], ANYONE)
    assert (caught.value.http_status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("tier", "lane"),
    [("priority", Lane.INTERACTIVE), ("flex", Lane.BATCH), ("auto", None), ("default", None), (None, None)],
)
def test_service_tiers_ask_for_lanes(tier, lane):
    assert requested_lane(tier) is lane


def test_every_lane_is_some_tier_of_its_own():
    assert {requested_lane(TIER_OF_LANE[lane]) for lane in Lane} == set(Lane)
    assert lane_name(Lane.BATCH) == "batch"


def test_an_unknown_tier_is_refused_by_name():
    with pytest.raises(ApiError, match="'vip'") as caught:
        requested_lane("vip")
    assert caught.value.param == "service_tier"


LARGE = Catalog(("large",), {"pirate", "both", "small"}, {"captain": "pirate"})
SMALL = Catalog(("small",), {"poet", "both", "captain"}, {"bard": "poet", "buccaneer": "both"}, {"poet": ("acme",)})


@pytest.mark.parametrize(
    ("query", "target"),
    [
        (ModelQuery("large"), (0, None)),
        (ModelQuery("small"), (1, None)),
        (ModelQuery("pirate"), (0, "pirate")),
        (ModelQuery("poet"), (1, "poet")),
        (ModelQuery("bard"), (1, "poet")),
        (ModelQuery("small:bard"), (1, "poet")),
        (ModelQuery("small", adapter_id="poet"), (1, "poet")),
        (ModelQuery("bard", lora_path="poet"), (1, "poet")),
        (ModelQuery("both"), (0, "both")),
        (ModelQuery("large:both"), (0, "both")),
        (ModelQuery("captain"), (0, "pirate")),
    ],
)
def test_a_name_decides_the_base_model_and_the_order_of_models_decides_about_equal_names(query, target):
    assert resolve(query, [LARGE, SMALL], Tenant("acme")) == target


@pytest.mark.parametrize(
    "query",
    [
        ModelQuery("large:poet"),
        ModelQuery("small:both"),
        ModelQuery("small:captain"),
        ModelQuery("buccaneer"),
        ModelQuery("large", adapter_id="small"),
    ],
    ids=["of another model", "hidden", "hidden by an alias", "alias of a hidden one", "a base model's name"],
)
def test_an_adapter_is_not_found_under_another_base_model_or_behind_an_equal_name(query):
    with pytest.raises(ApiError) as caught:
        resolve(query, [LARGE, SMALL], Tenant("acme"))
    assert caught.value.code == "model_not_found"


def test_an_adapter_contradicts_a_base_model_that_it_is_not_for():
    with pytest.raises(ApiError, match="'poet' of the base model 'small', but the request names 'large'") as caught:
        resolve(ModelQuery("large", adapter_id="poet"), [LARGE, SMALL], Tenant("acme"))
    assert (caught.value.http_status, caught.value.param) == (400, "adapter_id")


def test_an_adapter_of_the_second_model_is_kept_for_its_tenants():
    with pytest.raises(ApiError) as caught:
        resolve(ModelQuery("poet"), [LARGE, SMALL], Tenant("globex"))
    assert caught.value.code == "model_not_found"
