"""What a schema cannot say of the chart's objects: that names which one object gives another exist."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "loralane"
RENDERED = Path(__file__).resolve().parent / "rendered"

GIVEN = frozenset(("loralane-keys", "loralane-gateway-tls", "loralane-engine-tls", "mine"))
"""Secrets and claims that operators make, by their names in the values."""

Objects = list[dict[str, Any]]


def chart_digest() -> str:
    """Return a digest of the chart's files, as they are on disk."""
    digest = sha256()
    for file in sorted(path for path in CHART.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(CHART)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def name_problems(objects: Objects) -> Iterator[str]:
    """Yield each name in one object for which no other object exists: of pods, ports, files and claims."""
    pods = [found["spec"]["template"] for found in objects if found["kind"] in ("Deployment", "StatefulSet")]
    names = {(found["kind"], found["metadata"]["name"]) for found in objects}
    if len(names) != len(objects):
        yield "two objects have one kind and name"
    for pod in pods:
        yield from pod_problems(pod["spec"], names)
    for found in objects:
        spec = found.get("spec", {})
        target = spec.get("scaleTargetRef")
        if target and (target["kind"], target["name"]) not in names:
            yield f"{label(found)} scales {target['name']}, which is missing"
        if (wanted := selector(found)) is not None:
            chosen = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
            if len(chosen) != 1:
                yield f"{label(found)} selects {len(chosen)} kinds of pods"
            else:
                yield from port_problems(found, chosen[0]["spec"])


def selector(found: dict[str, Any]) -> dict[str, str] | None:
    """Return the labels by which an object selects pods; None if it selects none."""
    spec = found.get("spec", {})
    match found["kind"]:
        case "Service":
            return dict(spec["selector"])
        case "PodDisruptionBudget" | "Deployment" | "StatefulSet":
            return dict(spec["selector"]["matchLabels"])
        case "NetworkPolicy":
            return dict(spec["podSelector"]["matchLabels"])
    return None


def port_problems(found: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    known = {port["name"] for container in pod["containers"] for port in container["ports"]}
    wanted = [port["targetPort"] for port in found["spec"].get("ports", ())]
    wanted += [port["port"] for rule in found["spec"].get("ingress", ()) for port in rule["ports"]]
    for port in set(wanted) - known:
        yield f"{label(found)} names the port {port}, which its pods do not have"


def pod_problems(pod: dict[str, Any], names: set[tuple[str, str]]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            action = container.get(probe, {}).get("httpGet") or container.get(probe, {}).get("tcpSocket")
            if action and action["port"] not in ports:
                yield f"{container['name']}: {probe} asks the port {action['port']}"
        for mount in container["volumeMounts"]:
            if mount["name"] not in volumes and mount["name"] != "data":
                yield f"{container['name']} mounts {mount['name']}, which is no volume"
        if not container["securityContext"]["readOnlyRootFilesystem"] or not pod["securityContext"]["runAsNonRoot"]:
            yield f"{container['name']} may write to its image, or run as root"
    for volume in volumes.values():
        if (config := volume.get("configMap")) and ("ConfigMap", config["name"]) not in names:
            yield f"there is no ConfigMap {config['name']}"
        if (secret := volume.get("secret")) and secret["secretName"] not in GIVEN:
            yield f"there is no Secret {secret['secretName']}"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName", "mine")
        if ("PersistentVolumeClaim", claim) not in names and claim not in GIVEN:
            yield f"there is no claim {claim}"


def label(found: dict[str, Any]) -> str:
    return f"{found['kind']} {found['metadata']['name']}"
