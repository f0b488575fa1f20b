"""Checks of manifests that need no cluster: schemas, and the rules that pods here keep."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils

from tests.helm.charts import Object, containers_of

# All of a version's definitions, which it reads for each manifest.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

CRDS = Path(__file__).parent / "crds"
CUSTOM = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute")
SUFFIXES = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", 1)
}


@cache
def custom_schema(kind: str) -> Any:
    """The schema of a kind that a CRD defines."""
    return json.loads((CRDS / f"{kind.lower()}.json").read_text())


def schema_error(manifest: Object, kubernetes: str) -> str | None:
    """What a strict API server of that version would not take, or None."""
    return _schema_error(json.dumps(manifest), kubernetes)


@cache
def _schema_error(text: str, kubernetes: str) -> str | None:
    """The same: variations have many objects in common."""
    manifest = json.loads(text)
    try:
        if manifest["kind"] in CUSTOM:
            jsonschema.validate(manifest, custom_schema(manifest["kind"]))
        else:
            kubernetes_validate.validate(manifest, kubernetes, strict=True)
    except jsonschema.ValidationError as error:
        return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    return None


def amount(quantity: Any) -> float:
    """The number that a Kubernetes quantity stands for."""
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity))
    assert match is not None, quantity
    return float(match[1]) * float(SUFFIXES[match[2]])


def policy_errors(template: Object) -> list[str]:
    """The rules of Kubernetes' restricted profile, and ours, that a pod breaks."""
    spec = template["spec"]
    errors = [
        f"{key} is set"
        for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
        if spec.get(key)
    ]
    if spec.get("automountServiceAccountToken") is not False:
        errors.append("a service account's token is mounted")
    security = spec.get("securityContext", {})
    if not (security.get("runAsNonRoot") and security.get("runAsUser", 0) >= 10_000):
        errors.append("the pod may run as root")
    if any("hostPath" in volume for volume in spec.get("volumes", [])):
        errors.append("a folder of the host is mounted")
    runs_once = spec.get("restartPolicy") == "Never"
    first = [each["name"] for each in spec.get("initContainers", []) if "restartPolicy" not in each]
    for container in containers_of(template):
        has_probes = not runs_once and container["name"] not in first
        errors += [
            f"{container['name']}: {error}"
            for error in _container_errors(container, has_probes=has_probes)
        ]
    return errors


def _container_errors(container: Object, *, has_probes: bool) -> list[str]:
    errors = []
    security = container.get("securityContext", {})
    wanted = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    errors += [f"securityContext.{key}" for key in wanted if security.get(key) != wanted[key]]
    image = container["image"]
    name, _, tag = image.rpartition(":")
    if not name or tag == "latest" or "/" in tag:
        errors.append(f"the image {image} may change")
    resources = container.get("resources", {})
    for what in ("cpu", "memory"):
        asked = resources.get("requests", {}).get(what)
        limit = resources.get("limits", {}).get(what)
        if asked is None or limit is None:
            errors.append(f"no request or limit of {what}")
        elif amount(asked) > amount(limit):
            errors.append(f"asks for more {what} than its limit")
    if has_probes:
        errors += [
            f"no {probe}" for probe in ("readinessProbe", "livenessProbe") if probe not in container
        ]
    return errors
