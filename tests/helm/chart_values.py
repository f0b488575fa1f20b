"""The chart's values as models: `values.schema.json` is generated from these and from `Config`.

Nothing has a default here: defaults stand in values.yaml, which Helm has merged before it checks.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

RULES = Path(__file__).resolve().parents[2] / "helm" / "rules"

Object = dict[str, Any]
"""A part of a Kubernetes object, which Kubernetes checks itself."""
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTP]i?)?$")]
QuantityOrNone = Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?(m|k|[KMGTP]i?)?)?$")]
Labels = dict[str, str]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=0)]
NAMED_IMAGE = r"^[^:@]+(:[0-9]+/[^:@]+)?(:[\w.-]+|@sha256:[0-9a-f]{64})$"
NOT_LATEST: dict[str, Any] = {"not": {"pattern": "(^|:)latest$"}}
"""A rollout must be of the image that was tested."""
SecretKey = Annotated[str, Field(pattern=r"^[\w.-]+$")]
"""A key in a Secret."""
AlertName = str
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
KNOWN_ALERTS: dict[str, Any] = {"propertyNames": {"enum": ALERTS}}
TierName = Literal["interactive", "standard", "batch"]


class _Values(BaseModel):
    """Names are those of Kubernetes in values, and Python's here."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class Image(_Values):
    repository: Annotated[str, Field(min_length=1)]
    tag: Annotated[str, Field(pattern=r"^[\w.-]*$", json_schema_extra=NOT_LATEST)]
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
    pull_policy: Literal["Always", "IfNotPresent", "Never"]


class OwnImage(_Values):
    """What a component has in place of `image`; empty values are those of `image`."""

    repository: str
    tag: Annotated[str, Field(pattern=r"^[\w.-]*$", json_schema_extra=NOT_LATEST)]
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
    pull_policy: Literal["", "Always", "IfNotPresent", "Never"]


class Resources(_Values):
    requests: dict[str, Quantity | int]
    limits: dict[str, Quantity | int]


class Timing(_Values):
    """Timings of a probe; the chart has its own for what is left out."""

    initial_delay_seconds: Seconds = 0
    period_seconds: Count = 1
    timeout_seconds: Count = 1
    success_threshold: Count = 1
    failure_threshold: Count = 1


class ReadyProbes(_Values):
    readiness: Timing
    liveness: Timing


class Probes(ReadyProbes):
    startup: Timing


class _Pods(_Values):
    """Where pods run, and what users add to them."""

    runtime_class_name: str
    priority_class_name: str
    pod_labels: Labels
    pod_annotations: Labels
    node_selector: Labels
    tolerations: list[Object]
    affinity: Object
    topology_spread_constraints: list[Object]
    pod_spec: Object


class _Workload(_Pods):
    """Pods that stay."""

    init_containers: list[Object]
    sidecars: list[Object]
    extra_volumes: list[Object]
    update_strategy: Object
    termination_grace_period_seconds: Seconds


class _Container(_Values):
    """What users add to a container."""

    extra_env: list[Object]
    extra_volume_mounts: list[Object]


class _Process(_Container):
    extra_env_from: list[Object]
    probes: Probes


class GatewayScaling(_Values):
    enabled: bool
    min_replicas: Count
    max_replicas: Count
    cpu_percent: Annotated[int, Field(ge=1, le=100)]


class Gateway(_Workload, _Process):
    image: OwnImage
    placement: Literal["deployment", "cell"]
    replicas: Count
    pod_interface: Annotated[str, Field(pattern=r"^[\w.-]{1,15}$")]
    pre_stop_seconds: Seconds
    startup_seconds: Count
    resources: Resources
    autoscaling: GatewayScaling


class CellScaling(_Values):
    type: Literal["none", "hpa", "keda"]
    min_cells: Count
    max_cells: Count
    queue_depth: Annotated[dict[TierName, Count], Field(min_length=1)]
    requests_per_second: Annotated[float, Field(ge=0)]
    best_layout_use: Annotated[float, Field(ge=0, le=1)]
    scale_down_seconds: Annotated[int, Field(ge=0, le=3600)]
    prometheus_address: Annotated[str, Field(pattern="^https?://")]


class Coordinator(_Process):
    resources: Resources


class Ranks(_Process):
    resources: Resources


class Retention(_Values):
    when_deleted: Literal["Retain", "Delete"]
    when_scaled: Literal["Retain", "Delete"]


class Cell(_Workload):
    image: OwnImage
    startup_seconds: Count
    shm_size: QuantityOrNone
    gpu_resource: Annotated[str, Field(pattern=r"^([\w.-]+/[\w.-]+)?$")]
    claim_retention: Retention
    coordinator: Coordinator
    ranks: Ranks
    autoscaling: CellScaling


AccessModes = list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]]


class Download(_Values):
    enabled: bool
    revision: Annotated[str, Field(min_length=1)]
    storage: Literal["cell", "shared"]
    size: Quantity
    storage_class: str
    access_modes: AccessModes
    existing_claim: str
    timeout_seconds: Count


class Models(_Values):
    volume: Object
    mount_path: Annotated[str, Field(pattern="^/.*[^/]$")]
    download: Download


class Claim(_Values):
    size: QuantityOrNone
    storage_class: str


class Cache(_Values):
    size_limit: Quantity
    volume: Object
    claim: Claim


class HuggingFace(_Values):
    offline: bool
    existing_secret: str
    token_key: SecretKey


class Secrets(_Values):
    generate: bool


class KeyEntry(_Values):
    """One entry of a file of API keys; see `aileron key`."""

    model_config = ConfigDict(extra="forbid", alias_generator=None)

    hash: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")] = ""
    prefix: Annotated[str, Field(max_length=32)] = ""
    created: str = ""
    expires: str = ""
    revoked: str = ""
    max_tier: TierName = "interactive"
    default_tier: TierName = "standard"
    requests_per_minute: Annotated[int, Field(ge=1)] = 0
    tokens_per_minute: Annotated[int, Field(ge=1)] = 0
    tokens_per_day: Annotated[int, Field(ge=1)] = 0
    max_parallel: Annotated[int, Field(ge=1)] = 0


class ApiKeys(_Values):
    existing_secret: str
    key: SecretKey
    keys: list[KeyEntry]


class Auth(_Values):
    existing_secret: str
    token_key: SecretKey
    admin_key_key: SecretKey
    viewer_key_key: SecretKey
    metrics_key_key: SecretKey
    api_keys: ApiKeys


class Tls(_Values):
    serving_secret: str
    admin_secret: str
    cell_secret: str


class ExternalRedis(_Values):
    existing_secret: str
    url_key: SecretKey


class Redis(_Workload, _Container):
    external: ExternalRedis
    enabled: bool
    existing_secret: str
    password_key: SecretKey
    probes: ReadyProbes
    image: Annotated[str, Field(pattern=NAMED_IMAGE, json_schema_extra=NOT_LATEST)]
    resources: Resources
    storage: Annotated[str, Field(pattern=r"^([0-9]+[KMGT]i)?$")]
    storage_class: str


class Batches(_Values):
    enabled: bool
    existing_claim: str
    storage: Quantity
    storage_class: str
    access_modes: AccessModes
    same_node: bool


class Jobs(_Pods):
    image: OwnImage
    resources: Resources


class ServiceAccount(_Values):
    create: bool
    name: str
    annotations: Labels


class Service(_Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    port: Annotated[int, Field(ge=1, le=65535)]
    annotations: Labels
    session_affinity: Literal["None", "ClientIP"]


class Ingress(_Values):
    enabled: bool
    class_name: str
    controller: Literal["nginx", "haproxy", "none"]
    hosts: list[str]
    tls_secret: str
    annotations: Labels
    timeout_seconds: Count


class HttpRoute(_Values):
    enabled: bool
    parent_refs: list[Object]
    hostnames: list[str]
    annotations: Labels
    timeout_seconds: Count


class Switch(_Values):
    enabled: bool


class ServiceMonitor(_Values):
    enabled: bool
    interval: Annotated[str, Field(pattern="^[0-9]+(s|m)$")]
    labels: Labels


class Labelled(_Values):
    enabled: bool
    labels: Labels


class Rules(Labelled):
    runbook_url: str
    objective: Annotated[float, Field(ge=0.5, lt=1)]
    thresholds: Annotated[dict[AlertName, float], Field(json_schema_extra=KNOWN_ALERTS)]
    alerts: Annotated[dict[AlertName, Object], Field(json_schema_extra=KNOWN_ALERTS)]


class Metrics(_Values):
    service_monitor: ServiceMonitor
    pod_monitor: ServiceMonitor
    prometheus_rule: Rules
    dashboards: Labelled


class NetworkPolicy(_Values):
    enabled: bool
    clients: list[Object]
    monitoring: list[Object]
    extra_egress: list[Object]


class ChartValues(_Values):
    """Everything but `config`, whose schema is the product's own."""

    image: Image
    image_pull_secrets: list[Object]
    name_override: str
    fullname_override: str
    service_account: ServiceAccount
    pod_security_context: Object
    extra_env: list[Object]
    extra_objects: list[Object]
    cells: Annotated[int, Field(ge=1, le=1000)]
    gateway: Gateway
    cell: Cell
    models: Models
    cache: Cache
    hugging_face: HuggingFace
    secrets: Secrets
    auth: Auth
    tls: Tls
    redis: Redis
    batches: Batches
    jobs: Jobs
    service: Service
    ingress: Ingress
    http_route: HttpRoute
    pod_disruption_budget: Switch
    metrics: Metrics
    network_policy: NetworkPolicy
