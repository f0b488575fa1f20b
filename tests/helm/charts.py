"""The chart as Helm renders it: for each of its example values, and for variations of them."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
RELEASE, NAMESPACE = "chat", "llm"
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.29", "1.37"
RENDER_LIMIT_S = 100

REDIS_URL = "redis://:password@redis.example.com:6380"
"""What AILERON_REDIS_URL may be, for readers of the configuration."""

Object = dict[str, Any]

_PODS: Object = {
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "podLabels": {"team": "llm", "app.kubernetes.io/name": "never"},
    "podAnnotations": {"example.com/a": "b"},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "podSpec": {"schedulerName": "volcano", "dnsConfig": {"options": [{"name": "ndots"}]}},
}
_ADDED_CONTAINER: Object = {
    "name": "added",
    "image": "registry.example.com/added:1",
    "command": ["sleep", "1"],
    "resources": {
        "requests": {"cpu": "1m", "memory": "1Mi"},
        "limits": {"cpu": "1m", "memory": "1Mi"},
    },
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "readinessProbe": {"exec": {"command": ["true"]}},
    "livenessProbe": {"exec": {"command": ["true"]}},
}
_WORKLOAD: Object = {
    **_PODS,
    "initContainers": [{**_ADDED_CONTAINER, "name": "first"}],
    "sidecars": [_ADDED_CONTAINER],
    "extraVolumes": [{"name": "added", "emptyDir": {}}],
    "terminationGracePeriodSeconds": 600,
}
_CONTAINER: Object = {
    "extraEnv": [{"name": "ADDED", "value": "1"}],
    "extraVolumeMounts": [{"name": "added", "mountPath": "/added"}],
}
_TIMES: Object = {"periodSeconds": 21, "timeoutSeconds": 11}
_PROCESS: Object = {
    **_CONTAINER,
    "extraEnvFrom": [{"secretRef": {"name": "environment"}}],
    "probes": {"startup": _TIMES, "readiness": _TIMES, "liveness": _TIMES},
}
EVERYTHING: Object = {
    "serviceAccount": {"create": True, "annotations": {"example.com/role": "reader"}},
    "extraEnv": [{"name": "OTHER_URL", "value": "http://example.com"}],
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": "{{ .Release.Name }}-added",
                "labels": {
                    "app.kubernetes.io/name": "aileron",
                    "app.kubernetes.io/instance": "{{ .Release.Name }}",
                    "app.kubernetes.io/managed-by": "Helm",
                },
            },
        }
    ],
    "gateway": {
        **_WORKLOAD,
        **_PROCESS,
        "updateStrategy": {"type": "Recreate"},
    },
    "cell": {
        **_WORKLOAD,
        "updateStrategy": {"type": "OnDelete"},
        "gpuResource": "nvidia.com/mig-3g.40gb",
        "coordinator": _PROCESS,
        "ranks": {**_PROCESS, "resources": {"limits": {"nvidia.com/gpumem": 40_000}}},
    },
    "redis": {
        **_WORKLOAD,
        **_CONTAINER,
        "updateStrategy": {"type": "OnDelete"},
        "probes": {"readiness": _TIMES, "liveness": _TIMES},
    },
    "jobs": _PODS,
    "ingress": {
        "enabled": True,
        "className": "internal",
        "hosts": ["chat.example.com", "llm.example.com"],
        "tlsSecret": "chat-tls",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "7200"},
    },
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        "hostnames": ["chat.example.com"],
    },
}
"""All that a user may add to pods."""

VARIATIONS: dict[str, tuple[str, Object]] = {
    "kind": ("kind", {}),
    "8xgpu": ("8xgpu", {}),
    "many-cells": ("many-cells", {}),
    "ranks that share GPUs": ("8xgpu", {"config": {"cell": {"ranks_per_device": 3}}}),
    "three cells with gateways apart": (
        "8xgpu",
        {
            "cells": 3,
            "gateway": {"replicas": 2, "autoscaling": {"enabled": False}},
            "config": {"gateway": {"processes": 4}},
            "fullnameOverride": "serving",
        },
    ),
    "cells scaled by an HPA": (
        "many-cells",
        {
            "cell": {"autoscaling": {"type": "hpa"}},
            "gateway": {"placement": "cell"},
            "redis": {
                "external": None,
                "enabled": True,
                "storage": "",
                "resources": {"limits": {"memory": 1_500_000_000}},
            },
            "batches": {"existingClaim": "shared"},
            "huggingFace": {"offline": False, "existingSecret": "hugging-face"},
            "config": {"model": {"path": "acme/model"}},
            "models": {"volume": {"persistentVolumeClaim": None}},
        },
    ),
    "TLS everywhere": (
        "8xgpu",
        {
            "cells": 2,
            "tls": {
                "servingSecret": "serving-tls",
                "adminSecret": "admin-tls",
                "cellSecret": "cell-tls",
            },
            "ingress": {"enabled": True, "controller": "nginx"},
            "metrics": {"serviceMonitor": {"enabled": True}},
        },
    ),
    "TLS in one pod": (
        "kind",
        {
            "tls": {"servingSecret": "one", "adminSecret": "two", "cellSecret": "three"},
            "gateway": {"placement": "cell"},
        },
    ),
    "everything that clusters add": ("8xgpu", EVERYTHING),
    "a model for each cell": (
        "8xgpu",
        {
            "config": {"model": {"path": "acme/model", "served_name": None}},
            "models": {"volume": {"persistentVolumeClaim": None}, "download": {"enabled": True}},
            "cache": {"claim": {"size": "100Gi", "storageClass": "fast"}},
            "huggingFace": {"existingSecret": "hugging-face", "tokenKey": "hf"},
            "secrets": {"generate": False},
            "auth": {
                "existingSecret": "auth",
                "tokenKey": "cell",
                "adminKeyKey": "admin",
                "viewerKeyKey": "viewer",
                "metricsKeyKey": "metrics",
            },
            "redis": {"existingSecret": "redis", "passwordKey": "redis"},
        },
    ),
    "a model that pods share": (
        "many-cells",
        {
            "config": {"model": {"path": "acme/model"}},
            "gateway": {"image": {"repository": "registry.example.com/slim", "tag": "1.0"}},
            "models": {
                "volume": {"persistentVolumeClaim": None},
                "download": {"enabled": True, "storage": "shared", "revision": "v2"},
            },
        },
    ),
    "a model in an image": (
        "8xgpu",
        {
            "models": {
                "volume": {
                    "persistentVolumeClaim": None,
                    "image": {"reference": "registry.example.com/models/qwen3-32b:1"},
                }
            }
        },
    ),
    "several cells on kind": (
        "kind",
        {"cells": 2, "redis": {"enabled": False}, "batches": {"enabled": False}},
    ),
    "keys in values": (
        "kind",
        {
            "config": {"gateway": {"insecure_no_auth": False}},
            "auth": {
                "apiKeys": {
                    "keys": [
                        {"hash": "sha256:" + "0" * 64, "tenant": "acme", "max_tier": "standard"},
                        {"hash": "sha256:" + "1" * 64, "tenant": "b", "tokens_per_minute": 10},
                    ]
                }
            },
            "cache": {"volume": {"persistentVolumeClaim": {"claimName": "cache"}}},
            "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        },
    ),
    "as little as possible": (
        "kind",
        {
            "redis": {"enabled": False},
            "batches": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "podDisruptionBudget": {"enabled": False},
        },
    ),
}
"""Name -> the example that it starts from, and what is laid over it."""


def merged(base: Object, over: Object) -> Object:
    """Lay one mapping over another, as Helm does with values; null takes what was there away."""
    out = {key: value for key, value in base.items() if over.get(key, value) is not None}
    for key, value in ((key, value) for key, value in over.items() if value is not None):
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def documents(text: str) -> list[Object]:
    """The documents of a text in YAML, by libyaml: Python's own parser takes seconds for charts."""
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


def example(name: str) -> Object:
    """The values of an example file."""
    (values,) = documents((CHART / "values" / f"{name}.yaml").read_text())
    return values


def default_values() -> Object:
    """The chart's own values."""
    (values,) = documents((CHART / "values.yaml").read_text())
    return values


def variation(name: str) -> Object:
    """The values of a variation, without the chart's own."""
    base, over = VARIATIONS[name]
    return merged(example(base), over)


def ask_helm(*values: Object, name: str = RELEASE) -> list[Object]:
    """Let Helm render and lint the chart with each of these values; see `helm_process`."""
    jobs = [
        {
            "chart": str(CHART),
            "values": each,
            "name": name,
            "namespace": NAMESPACE,
            "kubernetes": f"v{NEWEST_KUBERNETES}.0",
        }
        for each in values
    ]
    process = subprocess.run(
        [sys.executable, "-m", "tests.helm.helm_process"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=RENDER_LIMIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    answers: list[Object] = json.loads(process.stdout)
    return answers


@dataclass(frozen=True)
class Release:
    """What a variation installs."""

    name: str
    values: Object
    """With the chart's own."""
    objects: tuple[Object, ...]
    notes: str
    lint: tuple[Any, ...] = field(repr=False)

    def of_kind(self, *kinds: str) -> list[Object]:
        """The objects of some kinds."""
        return [each for each in self.objects if each["kind"] in kinds]

    def get(self, kind: str, name: str) -> Object:
        """One object."""
        return next(each for each in self.of_kind(kind) if each["metadata"]["name"] == name)

    def one(self, kind: str, end: str) -> Object:
        """The only object of a kind whose name ends so."""
        (found,) = [each for each in self.of_kind(kind) if each["metadata"]["name"].endswith(end)]
        return found

    def pods(self) -> Iterator[tuple[str, Object]]:
        """The workloads' names and pod templates."""
        for each in self.of_kind("Deployment", "StatefulSet", "Job"):
            yield each["metadata"]["name"], each["spec"]["template"]
        for each in self.of_kind("Pod"):
            yield each["metadata"]["name"], each

    def configurations(self) -> dict[str, str]:
        """The configuration files by name, with variables of the environment in their places."""
        files: dict[str, str] = self.one("Secret", "-config")["stringData"]
        texts = {}
        for name, text in files.items():
            assert set(re.findall(r"\$\{(\w+)\}", text)) <= {"AILERON_REDIS_URL"}
            texts[name] = text.replace("${AILERON_REDIS_URL}", REDIS_URL)
        return texts

    def volumes(self, workload: str, pod: Object) -> dict[str, Object]:
        """A pod's volumes by name, with those of the claims that each of its pods has."""
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
        for each in self.of_kind("StatefulSet"):
            if each["metadata"]["name"] == workload:
                for claim in each["spec"].get("volumeClaimTemplates", []):
                    assert claim["metadata"]["name"] not in volumes
                    volumes[claim["metadata"]["name"]] = claim
        return volumes

    @property
    def together(self) -> bool:
        """Whether gateways are in cells' pods."""
        return bool(self.values["gateway"]["placement"] == "cell")


def containers_of(template: Object) -> list[Object]:
    """A pod's containers, sidecars first."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


@cache
def _answers() -> list[Object]:
    return ask_helm(*(variation(name) for name in VARIATIONS))


@cache
def releases() -> dict[str, Release]:
    """Every variation, rendered once for all tests."""
    out = {}
    for name, answer in zip(VARIATIONS, _answers(), strict=True):
        assert "error" not in answer, f"{name}: {answer['error']}"
        objects: list[Object] = []
        notes = ""
        for path, text in sorted(answer["rendered"].items()):
            if path.endswith("NOTES.txt"):
                notes = text
            else:
                objects += documents(text)
        values = merged(default_values(), variation(name))
        out[name] = Release(name, values, tuple(objects), notes, tuple(answer["lint"]))
    return out
