"""compose.yaml and the files it mounts agree: paths, ports, names, keys and certificates."""

import re
import ssl
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID

from engine.rpc.target import EngineTls
from engine.rpc.transport import read_tls
from gateway.config.sections import HttpConfig
from gateway.config.whole import load_config
from gateway.core.tenants import hash_key

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::\?[^}]*)?\}")
KEYS = {"ACME_KEY": "sk-acme-0123456789", "ADMIN_KEY": "sk-admin-0123456789", "METRICS_KEY": "sk-metrics-0123456789"}
NOT_MADE_YET = ("./certificates/",)
"""Beginnings of mounted paths that deploy/certificates.sh makes."""


def compose(name="compose.yaml"):
    return yaml.safe_load((DEPLOY / name).read_text())


def mounts(service) -> dict[str, str]:
    """Return the host's path or the volume's name for each mounted path of a service."""
    parts = (volume.split(":") for volume in service.get("volumes", ()))
    return {target: source for source, target, *_ in parts}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "certificates"
    subprocess.run([DEPLOY / "certificates.sh", folder], check=True, capture_output=True)
    return folder


def gateway_config():
    return load_config(DEPLOY / "compose" / "gateway.yaml", KEYS)


def engines():
    return {name: service for name, service in compose()["services"].items() if name.startswith("engine-")}


def test_containers_have_the_time_in_which_they_drain():
    services = compose()["services"]
    for name, drain in {"gateway": gateway_config().http.drain, "engine-1": HttpConfig().drain}.items():
        minutes, seconds = re.fullmatch(r"(\d+)m(\d+)s", services[name]["stop_grace_period"]).groups()
        assert 60 * int(minutes) + int(seconds) >= drain + 20


def test_every_mounted_file_exists_and_every_volume_and_network_is_declared():
    document = compose()
    for name, service in document["services"].items():
        for source in mounts(service).values():
            if source.startswith(NOT_MADE_YET):
                continue
            exists = (DEPLOY / source).is_file() if source.startswith(".") else source in document["volumes"]
            assert exists, (name, source)
        assert set(service["networks"]) <= document["networks"].keys()
        build = service.get("build")
        assert build is None or (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_images_are_pinned_and_processes_have_no_privileges():
    for name, service in compose()["services"].items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_the_gateway_listens_where_ports_are_published_and_prometheus_asks():
    config, service = gateway_config(), compose()["services"]["gateway"]
    listening = {config.http.port, config.grpc.port, config.admin.port, config.admin.grpc_port}
    assert {int(port.rpartition(":")[2]) for port in service["ports"]} == listening
    scrape = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": [f"gateway:{config.admin.port}"]}]
    assert scrape["job_name"] == "loralane"  # as the alerts have it
    assert hash_key(KEYS["METRICS_KEY"]) in config.admin.metrics_keys


def test_prometheus_and_the_gateway_get_the_same_key():
    document = compose()
    [secret] = document["services"]["prometheus"]["secrets"]
    scrape = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    variable = document["secrets"][secret]["environment"]
    assert VARIABLE.fullmatch(document["services"]["gateway"]["environment"][variable])[1] == variable


def test_every_address_of_an_engine_is_a_service_that_listens_there():
    [served] = gateway_config().served.values()
    assert set(served.engines.addresses) == {service["command"][-1] for service in engines().values()}
    for name, service in engines().items():
        assert service["command"][:2] == ["engine", "--config"]
        assert service["command"][-1] == f"{service['hostname']}:7001" == f"{name}:7001"
        assert set(service["networks"]) & set(compose()["services"]["gateway"]["networks"])


def test_gateway_and_engines_serve_the_same_model():
    [served] = gateway_config().served.values()
    [own] = load_config(DEPLOY / "compose" / "engine.yaml", {}).served.values()
    assert (own.model.source, own.lanes) == (served.model.source, served.lanes)
    assert own.engines.tls == served.engines.tls


def test_keys_come_from_the_environment_that_compose_demands():
    service = compose()["services"]["gateway"]
    needed = set(VARIABLE.findall((DEPLOY / "compose" / "gateway.yaml").read_text()))
    assert needed == service["environment"].keys() == KEYS.keys()
    assert all(":?" in value for value in service["environment"].values())
    assert ".env" in (DEPLOY / ".gitignore").read_text().split()


def test_what_the_configuration_names_is_mounted():
    config, mounted = gateway_config(), mounts(compose()["services"]["gateway"])
    [served] = config.served.values()
    assert str(served.engines.tls.key.parent) in mounted
    assert all(str(root).startswith("/srv/loralane") for root in (*config.adapters.roots, config.adapters.cache))
    for service in (compose()["services"]["gateway"], *engines().values()):
        assert mounts(service)["/srv/loralane"] == "shared"
    python = re.search(r"^ARG PYTHON=(3\.\d+)", (DEPLOY / "Dockerfile").read_text(), re.M)[1]
    for folder in served.preload.values():
        inside = folder.relative_to(f"/opt/loralane/lib/python{python}/site-packages")
        assert (DEPLOY.parent / inside).is_dir()


def test_certificates_are_read_good_for_the_engines_names_and_no_one_elses(certificates):
    for part in ("gateway", "engine"):
        folder = certificates / part
        read_tls(EngineTls(folder / "ca.crt", folder / "tls.crt", folder / "tls.key"))
        for name, service in compose()["services"].items():
            if name == "gateway" or name.startswith("engine-"):
                assert mounts(service)["/run/loralane"] == f"./certificates/{name.partition('-')[0]}"
    engine, gateway = (
        x509.load_pem_x509_certificate((certificates / part / "tls.crt").read_bytes()) for part in ("engine", "gateway")
    )
    names = engine.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"localhost", *engines()}
    usage = gateway.extensions.get_extension_for_oid(ExtensionOID.EXTENDED_KEY_USAGE).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_a_second_run_keeps_the_authority_and_the_keys_are_out_of_others_reach(certificates):
    authority = (certificates / "authority" / "ca.crt").read_bytes()
    before = (certificates / "engine" / "tls.crt").read_bytes()
    subprocess.run([DEPLOY / "certificates.sh", certificates, "engine-1", "engine-2"], check=True, capture_output=True)
    assert (certificates / "engine" / "ca.crt").read_bytes() == authority
    assert (certificates / "engine" / "tls.crt").read_bytes() != before
    assert certificates.stat().st_mode & 0o077 == 0
    assert (certificates / "authority" / "ca.key").stat().st_mode & 0o077 == 0
    context = ssl.create_default_context(cafile=certificates / "engine" / "ca.crt")
    context.load_cert_chain(certificates / "engine" / "tls.crt", certificates / "engine" / "tls.key")


def test_the_gpu_file_changes_engines_that_exist():
    assert compose("compose.gpu.yaml")["services"].keys() == engines().keys()


def test_grafana_is_given_the_data_source_and_both_dashboards():
    service = compose()["services"]["grafana"]
    provider = yaml.safe_load((DEPLOY / "compose" / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    shown = [target for target in mounts(service) if target.startswith(provider["options"]["path"])]
    assert len(shown) == 2
    [source] = yaml.safe_load((DEPLOY / "compose" / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
