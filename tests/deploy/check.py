"""Check the Dockerfile with hadolint and the Helm chart with Helm's own renderer: `python tests/deploy/check.py`.

Renders the chart for each case of CASES, validates the objects against the schemas of several versions of Kubernetes,
and checks what a schema cannot (objects.py). Two cases are kept in the folder `rendered`, so that tests which have no
Helm can read them; `--write` renews them. Needs requirements.txt of this folder, and no network and no cluster. Exits
with status 1 after printing every problem.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint
from objects import CHART, RENDERED, Objects, chart_digest, label, name_problems

DOCKERFILE = CHART.parents[1] / "Dockerfile"
VERSIONS = ("1.28", "1.31", "1.34")
"""Versions of Kubernetes whose schemas the objects must fit; the first is the oldest that Chart.yaml allows."""
CUSTOM = frozenset(("Certificate", "RayCluster", "ScaledObject", "ServiceMonitor"))
"""Kinds that Kubernetes itself has no schema for."""
ON = {"enabled": True}
CASES: Mapping[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "config": {"tenants": {"acme": {"keys": ["${ACME_KEY}"]}}, "limits": {"when_redis_is_away": "closed"}},
        "tls": {"certManager": ON},
        "gateway": {"autoscaling": ON, "affinity": {"podAntiAffinity": {}}, "podAnnotations": {"a": "b"}},
        "engine": {"autoscaling": ON, "drain": ON, "runtimeClassName": "nvidia", "persistence": {"enabled": False}},
        "serviceMonitor": ON,
        "imagePullSecrets": [{"name": "registry"}],
    },
    "KEDA": {"engine": {"keda": ON}, "dashboard": ON},
    "engines in gateways": {
        "engine": {"enabled": False},
        "engineConfig": {"device": "cpu", "replicas": 2},
        "gateway": {"separateAdmin": False},
        "config": {"admin": {"open_metrics": "no_tenants"}},
    },
    "Ray": {"cluster": {"ray": {"enabled": True, "rayVersion": "2.60.0"}}},
    "existing objects": {
        "shared": {"existingClaim": "mine"},
        "serviceAccount": {"create": False},
        "networkPolicy": {"enabled": False},
        "fullnameOverride": "serving",
    },
}
KEPT = ("defaults", "everything", "engines in gateways")
REFUSED: Mapping[str, dict[str, Any]] = {
    "two autoscalers": {"engine": {"keda": ON, "autoscaling": ON}},
    "a misspelt value": {"engine": {"replica": 3}},
    "too many engines": {"engine": {"replicas": 65}},
    "the tag latest": {"image": {"engine": {"tag": "latest"}}},
    "Ray without its version": {"cluster": {"ray": ON}},
}
"""Values that must not render."""


def main() -> int:
    problems = [*dockerfile_problems(), *lint_problems()]
    with Chart.load(CHART) as chart:
        for case, values in CASES.items():
            objects = render(chart, values)
            problems += [f"{case}: {problem}" for problem in [*schema_problems(objects), *name_problems(objects)]]
            if case in KEPT:
                problems += kept_problems(case, objects)
            print(f"{case}: {len(objects)} objects")
        problems += [f"{case} renders" for case, values in REFUSED.items() if not is_refused(chart, values)]
    print("\n".join(problems) or f"the Dockerfile and the chart are good for Kubernetes {', '.join(VERSIONS)}")
    return 1 if problems else 0


def kept_problems(case: str, objects: Objects) -> Iterator[str]:
    """Yield a problem if the kept file of a case is not what the chart renders; with `--write`, write it instead."""
    header = f"# What `python tests/deploy/check.py --write` renders.\n# Chart: {chart_digest()}\n"
    text = header + yaml.safe_dump_all(objects, sort_keys=False, width=120)
    file = RENDERED / f"{case.replace(' ', '-')}.yaml"
    if "--write" in sys.argv:
        file.write_text(text)
    elif not file.is_file() or file.read_text() != text:
        yield f"{file.name} in {RENDERED.name} is not what the chart renders; renew it with --write"


def dockerfile_problems() -> Iterator[str]:
    command = [Path(sys.executable).with_name("hadolint"), DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True)
    yield from done.stdout.splitlines()
    if done.returncode and not done.stdout:
        yield f"hadolint: {done.stderr.strip()}"


def lint_problems() -> Iterator[str]:
    """Yield what `helm lint --strict` says, except that a chart may have no icon."""
    for message in lint(CHART, strict=True)["messages"]:
        if message["severity"] > 1:
            yield f"helm lint: {message['path']}: {message['error']}"


def render(chart: Chart, values: dict[str, Any]) -> Objects:
    """Return the objects that an installation with these values would create."""
    texts = chart.render(values, name="loralane", namespace="serving")
    documents = (text for path, text in texts.items() if path.endswith(".yaml"))
    return [found for text in documents for found in yaml.safe_load_all(text) if found]  # None: an empty document


def is_refused(chart: Chart, values: dict[str, Any]) -> bool:
    try:
        chart.validate_schema(values)
        chart.render(values, name="loralane", namespace="serving")
    except HelmError:
        return True
    return False


def schema_problems(objects: Objects) -> Iterator[str]:
    for found in objects:
        for version in VERSIONS if found["kind"] not in CUSTOM else ():
            try:
                kubernetes_validate.validate(found, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{label(found)}, Kubernetes {version}: {error.message}"


if __name__ == "__main__":
    sys.exit(main())
