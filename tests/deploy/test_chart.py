"""The Helm chart's objects, as Helm has rendered them (check.py), and its values."""

import re
from fnmatch import fnmatch

import jsonschema
import pytest
import yaml
from objects import CHART, RENDERED, chart_digest, name_problems

from gateway.config.whole import load_config
from gateway.core.part import COMMON

CASES = ("defaults", "everything", "engines-in-gateways")
KEYS = {"ACME_KEY": "sk-acme-0123456789", "ADMIN_KEY": "sk-admin-0123456789", "METRICS_KEY": "sk-metrics-0123456789"}
STOP_SECONDS = 20
"""What docs/upgrading.md says that a process needs after its drain."""
NAMED_KEY = re.compile(r"\$\{([A-Z_]+)\}")


def rendered(case):
    return list(yaml.safe_load_all((RENDERED / f"{case}.yaml").read_text()))


def one(objects, kind, name):
    [found] = [item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def config_of(objects, part, tmp_path):
    """Read the configuration file that gateways or engines of the chart mount."""
    file = tmp_path / f"{part}.yaml"
    file.write_text(one(objects, "ConfigMap", f"loralane-{part}")["data"]["loralane.yaml"])
    return load_config(file, KEYS)


def container(objects, kind, name):
    [found] = one(objects, kind, name)["spec"]["template"]["spec"]["containers"]
    return found


def schema():
    return yaml.safe_load((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_kept_objects_are_those_of_the_chart_as_it_is(case):
    header = (RENDERED / f"{case}.yaml").read_text().splitlines()[1]
    assert header == f"# Chart: {chart_digest()}", "run tests/deploy/check.py --write"


@pytest.mark.parametrize("case", CASES)
def test_names_that_objects_give_each_other_exist(case):
    assert list(name_problems(rendered(case))) == []


def test_a_name_of_nothing_is_found():
    objects = rendered("defaults")
    one(objects, "Service", "loralane-engine")["spec"]["selector"]["app.kubernetes.io/component"] = "motor"
    one(objects, "Service", "loralane")["spec"]["ports"][0]["targetPort"] = "htttp"
    one(objects, "Deployment", "loralane-gateway")["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] = "x"
    assert len(list(name_problems(objects))) == 3


@pytest.mark.parametrize("case", CASES)
def test_gateways_read_their_file_and_listen_where_the_pod_says(case, tmp_path):
    objects = rendered(case)
    config, pod = config_of(objects, "gateway", tmp_path), container(objects, "Deployment", "loralane-gateway")
    ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
    listening = {
        "http": config.http.port,
        "grpc": config.grpc.port,
        "admin": config.admin.port,
        "admin-grpc": config.admin.grpc_port,
    }
    assert ports == {name: port for name, port in listening.items() if port is not None}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert pod[probe]["httpGet"]["path"] in COMMON
    assert pod["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert pod["livenessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("case", CASES)
def test_pods_have_the_time_in_which_they_drain(case, tmp_path):
    objects = rendered(case)
    parts = [("gateway", "Deployment"), ("engine", "StatefulSet")]
    for part, kind in parts if case != "engines-in-gateways" else parts[:1]:
        pod = one(objects, kind, f"loralane-{part}")["spec"]["template"]["spec"]
        hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["0"])
        asleep = int(hook[-1].split()[-1])
        drain = config_of(objects, part, tmp_path).http.drain
        assert 60 <= drain <= pod["terminationGracePeriodSeconds"] - asleep - STOP_SECONDS


@pytest.mark.parametrize("case", ["defaults", "everything"])
def test_gateways_name_engines_that_the_certificates_are_good_for(case, tmp_path):
    objects = rendered(case)
    [served] = config_of(objects, "gateway", tmp_path).served.values()
    domain = "loralane-engine.serving.svc.cluster.local"
    count = len(served.engines.addresses)
    assert served.engines.addresses == tuple(f"loralane-engine-{number}.{domain}:7001" for number in range(count))
    engine = container(objects, "StatefulSet", "loralane-engine")
    assert engine["args"][-2:] == ["--listen", f"$(POD_NAME).{domain}:7001"]
    if case == "defaults":
        assert one(objects, "StatefulSet", "loralane-engine")["spec"]["replicas"] == count
        return
    assert one(objects, "HorizontalPodAutoscaler", "loralane-engine")["spec"]["maxReplicas"] == count
    [pattern] = one(objects, "Certificate", "loralane-engine")["spec"]["dnsNames"]
    assert all(fnmatch(address.partition(":")[0], pattern) for address in served.engines.addresses)


@pytest.mark.parametrize("case", ["defaults", "everything"])
def test_gateways_and_engines_agree_on_model_lanes_and_mounted_certificates(case, tmp_path):
    objects = rendered(case)
    [served] = config_of(objects, "gateway", tmp_path).served.values()
    [own] = config_of(objects, "engine", tmp_path).served.values()
    assert (own.model, own.lanes) == (served.model, served.lanes)
    for kind, name, tls in (
        ("Deployment", "loralane-gateway", served.engines.tls),
        ("StatefulSet", "loralane-engine", own.engines.tls),
    ):
        mounted = {mount["mountPath"] for mount in container(objects, kind, name)["volumeMounts"]}
        assert {str(file.parent) for file in (tls.ca, tls.certificate, tls.key)} <= mounted


def test_gateways_that_start_their_engines_name_no_others(tmp_path):
    [served] = config_of(rendered("engines-in-gateways"), "gateway", tmp_path).served.values()
    assert (served.engines.addresses, served.engines.replicas, served.engine.device) == ((), 2, "cpu")


def test_only_gateways_reach_engines():
    objects = rendered("defaults")
    policy = one(objects, "NetworkPolicy", "loralane-engine")["spec"]
    pods = one(objects, "StatefulSet", "loralane-engine")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    [rule] = policy["ingress"]
    [source] = rule["from"]
    gateways = one(objects, "Deployment", "loralane-gateway")["spec"]["template"]["metadata"]["labels"]
    assert source.keys() == {"podSelector"}
    assert source["podSelector"]["matchLabels"].items() <= gateways.items()
    assert not source["podSelector"]["matchLabels"].items() <= pods.items()


def test_prometheus_shows_a_key_that_gateways_have():
    objects = rendered("everything")
    [endpoint] = one(objects, "ServiceMonitor", "loralane")["spec"]["endpoints"]
    [source] = container(objects, "Deployment", "loralane-gateway")["envFrom"]
    key = endpoint["authorization"]["credentials"]
    assert key["name"] == source["secretRef"]["name"]
    config = one(objects, "ConfigMap", "loralane-gateway")["data"]["loralane.yaml"]
    assert key["key"] in NAMED_KEY.findall(config)
    admin = one(objects, "Service", "loralane-admin")
    assert endpoint["port"] in {port["name"] for port in admin["spec"]["ports"]}
    wanted = one(objects, "ServiceMonitor", "loralane")["spec"]["selector"]["matchLabels"]
    chosen = [item for item in objects if wanted.items() <= item["metadata"]["labels"].items()]
    assert [item["metadata"]["name"] for item in chosen if item["kind"] == "Service"] == ["loralane-admin"]


@pytest.mark.parametrize("case", CASES)
def test_objects_hold_no_keys_and_no_image_is_the_latest(case):
    text = (RENDERED / f"{case}.yaml").read_text()
    assert "kind: Secret\n" not in text
    assert not re.search(r"sk-\w|:latest", text)


def test_default_values_keep_their_schema_and_wrong_ones_do_not():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values, schema())
    for path, wrong in (
        (("engine", "replica"), 3),
        (("engine", "replicas"), 65),
        (("gateway", "processes"), 0),
        (("image", "engine", "tag"), "latest"),
        (("model",), {}),
    ):
        changed = yaml.safe_load((CHART / "values.yaml").read_text())
        place = changed
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed, schema())


def test_every_value_that_a_template_reads_has_a_default():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for file in (CHART / "templates").iterdir():
        for path in re.findall(r"\.Values((?:\.\w+)+)", file.read_text()):
            place = values
            for part in path[1:].split("."):
                assert isinstance(place, dict) and part in place, (file.name, path)
                place = place[part]


def test_endpoint_pickers_find_the_gateways_with_engines_of_their_own():
    documents = list(yaml.safe_load_all((CHART.parents[1] / "inference-pool.yaml").read_text()))
    pool = next(item for item in documents if item["kind"] == "InferencePool")["spec"]
    objects = rendered("engines-in-gateways")
    pods = one(objects, "Deployment", "loralane-gateway")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= pods.items()
    ports = container(objects, "Deployment", "loralane-gateway")["ports"]
    assert [port["number"] for port in pool["targetPorts"]] == [ports[0]["containerPort"]]
    picker = yaml.safe_load(next(item for item in documents if item["kind"] == "ConfigMap")["data"]["config.yaml"])
    known = {plugin["type"] for plugin in picker["plugins"]}
    used = {plugin["pluginRef"] for profile in picker["schedulingProfiles"] for plugin in profile["plugins"]}
    assert used == known
