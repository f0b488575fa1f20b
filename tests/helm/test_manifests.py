"""Every manifest of every variation: what the API server takes, policy, and names that agree."""

import copy
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.helm.charts import (
    CHART,
    NEWEST_KUBERNETES,
    OLDEST_KUBERNETES,
    Object,
    Release,
    containers_of,
    releases,
)
from tests.helm.checks import CUSTOM, amount, policy_errors, schema_error

LINT_WARNING = 2


@pytest.mark.parametrize("kubernetes", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
def test_api_server_would_take_everything(release: Release, kubernetes: str) -> None:
    if "image" in release.values["models"]["volume"] and kubernetes == OLDEST_KUBERNETES:
        pytest.skip("Image volumes are newer than the oldest Kubernetes.")
    errors = {
        f"{each['kind']} {each['metadata']['name']}": error
        for each in release.objects
        if (error := schema_error(each, kubernetes)) is not None
    }
    assert not errors


def test_oldest_kubernetes_is_the_one_that_the_chart_names() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST_KUBERNETES}.0-0"


def test_every_custom_kind_is_rendered_by_some_variation() -> None:
    kinds = {each["kind"] for release in releases().values() for each in release.objects}
    assert kinds.issuperset({*CUSTOM, "HorizontalPodAutoscaler", "PersistentVolumeClaim"})


@pytest.mark.parametrize("kind", ["StatefulSet", "NetworkPolicy", *CUSTOM])
def test_schemas_refuse_a_field_that_does_not_exist(kind: str) -> None:
    variations = {"ScaledObject": "many-cells", "HTTPRoute": "everything that clusters add"}
    variation = variations.get(kind, "8xgpu")
    broken = copy.deepcopy(releases()[variation].of_kind(kind)[0])
    assert schema_error(broken, NEWEST_KUBERNETES) is None
    broken["spec"]["selectors"] = {}
    assert "selectors" in (schema_error(broken, NEWEST_KUBERNETES) or "")


def test_lint_finds_nothing(release: Release) -> None:
    assert not [
        each for each in release.lint if isinstance(each, str) or each["severity"] >= LINT_WARNING
    ]


def test_pods_keep_the_rules(release: Release) -> None:
    errors = {name: found for name, pod in release.pods() if (found := policy_errors(pod))}
    assert not errors


def test_rules_find_what_breaks_them() -> None:
    pod = copy.deepcopy(releases()["kind"].get("StatefulSet", "chat-aileron-cell"))["spec"][
        "template"
    ]
    coordinator, ranks = containers_of(pod)
    pod["spec"]["hostNetwork"] = True
    pod["spec"]["securityContext"]["runAsUser"] = 0
    coordinator["image"] = "registry.example.com:5000/aileron"
    coordinator["securityContext"]["readOnlyRootFilesystem"] = False
    del coordinator["livenessProbe"]
    ranks["resources"]["limits"]["memory"] = "1Gi"
    ranks["securityContext"]["capabilities"]["add"] = ["SYS_PTRACE"]
    assert policy_errors(pod) == [
        "hostNetwork is set",
        "the pod may run as root",
        "coordinator: securityContext.readOnlyRootFilesystem",
        "coordinator: the image registry.example.com:5000/aileron may change",
        "coordinator: no livenessProbe",
        "ranks: securityContext.capabilities",
        "ranks: asks for more memory than its limit",
    ]


def test_names_are_unique_and_short_enough(release: Release) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in release.objects]
    assert len(set(names)) == len(names)
    for _, name in names:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", name), name


def test_objects_say_whose_they_are(release: Release) -> None:
    for each in release.objects:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "aileron"
        assert labels["app.kubernetes.io/instance"] == "chat"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


def selected(release: Release, labels: Object) -> list[tuple[str, Object]]:
    """The pods that a selector finds."""
    return [
        (name, pod)
        for name, pod in release.pods()
        if labels.items() <= pod["metadata"]["labels"].items()
    ]


def test_selectors_find_the_pods_that_they_are_for(release: Release) -> None:
    for each in release.of_kind("Deployment", "StatefulSet"):
        found = selected(release, each["spec"]["selector"]["matchLabels"])
        assert [name for name, _ in found] == [each["metadata"]["name"]]
    for each in release.of_kind("Service"):
        found = selected(release, each["spec"]["selector"])
        assert found
        for port in each["spec"]["ports"]:
            for name, pod in found:
                assert port["targetPort"] in ports_of(pod), (each["metadata"]["name"], name)
    for each in release.of_kind("PodDisruptionBudget", "NetworkPolicy"):
        key = "selector" if each["kind"] == "PodDisruptionBudget" else "podSelector"
        assert selected(release, each["spec"][key]["matchLabels"])


def ports_of(pod: Object) -> set[str | int]:
    """The ports of a pod by number, and by name those that are no sidecar's."""
    sidecars = pod["spec"].get("initContainers", [])
    ports = [(each, port) for each in containers_of(pod) for port in each.get("ports", [])]
    numbers: set[str | int] = {port["containerPort"] for _, port in ports}
    return numbers | {port["name"] for each, port in ports if each not in sidecars}


def test_serving_port_is_that_of_the_pods_with_gateways_alone(release: Release) -> None:
    service = release.get("Service", "serving" if "three" in release.name else "chat-aileron")
    found = selected(release, service["spec"]["selector"])
    assert len(found) == 1
    for _, pod in found:
        assert "gateway" in [each["name"] for each in containers_of(pod)]


def test_scaled_objects_exist(release: Release) -> None:
    for each in release.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        workload = release.get(target["kind"], target["name"])
        assert "replicas" not in workload["spec"], "an upgrade would undo what was scaled"


def policy_ports(policy: Object) -> Iterator[tuple[str, Object, str | int]]:
    """The direction, peer and port of each rule."""
    for direction, key in (("ingress", "from"), ("egress", "to")):
        for rule in policy["spec"].get(direction, []):
            for peer in rule.get(key, [{}]):
                for port in rule.get("ports", []):
                    yield direction, peer, port["port"]


def test_network_policies_open_ports_and_pods_that_exist(release: Release) -> None:
    for policy in release.of_kind("NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        own = selected(release, policy["spec"]["podSelector"]["matchLabels"])
        for direction, peer, port in policy_ports(policy):
            labels = peer.get("podSelector", {}).get("matchLabels")
            others = selected(release, labels) if labels else []
            assert bool(others) == bool(labels)
            for _, pod in own if direction == "ingress" else others:
                assert port in ports_of(pod)


def test_what_gateways_and_cells_say_to_each_other_is_allowed(release: Release) -> None:
    if not release.of_kind("NetworkPolicy") or release.together:
        return
    gateway = release.one("NetworkPolicy", "-gateway")
    cell = release.one("NetworkPolicy", "-cell")
    grpc = [(way, port) for way, _, port in policy_ports(gateway) if port == 8002]
    assert grpc == [("egress", 8002)]
    assert ("ingress", 8002) in [(way, port) for way, _, port in policy_ports(cell)]
    several = release.values["config"].get("gateway", {}).get("processes", 1) > 1
    pushes = [
        rule.get("ports")
        for rule in [*gateway["spec"]["ingress"], *cell["spec"]["egress"]]
        for peer in rule.get("from", rule.get("to", []))
        if peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
        in ("cell", "gateway")
        and "8002" not in str(rule)
    ]
    # Each of several processes listens on a port of its own, which no policy can name.
    assert pushes == 2 * ([None] if several else [[{"port": 8003, "protocol": "TCP"}]])


def test_volumes_secrets_and_claims_exist_or_are_the_users(release: Release) -> None:
    own = {(each["kind"], each["metadata"]["name"]): each for each in release.objects}
    auth, batches = release.values["auth"], release.values["batches"]
    users = {auth["existingSecret"], auth["apiKeys"]["existingSecret"], batches["existingClaim"]}
    users |= set(release.values["tls"].values())
    users |= {"models", "cache", release.values["huggingFace"]["existingSecret"]}
    for workload, pod in release.pods():
        volumes = release.volumes(workload, pod)
        for container in containers_of(pod):
            for mount in container.get("volumeMounts", []):
                assert mount["name"] in volumes
        mounted = {
            mount["name"] for each in containers_of(pod) for mount in each.get("volumeMounts", [])
        }
        assert set(volumes) <= mounted
        for volume in volumes.values():
            for key, kind, field in (
                ("secret", "Secret", "secretName"),
                ("configMap", "ConfigMap", "name"),
                ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
            ):
                if key in volume:
                    name = volume[key][field]
                    assert (kind, name) in own or name in users, name


def test_environment_comes_from_secrets_that_have_it(release: Release) -> None:
    own = {each["metadata"]["name"]: each for each in release.of_kind("Secret")}
    values = release.values
    users: Object = {
        values["auth"]["existingSecret"]: (
            "tokenKey",
            "adminKeyKey",
            "viewerKeyKey",
            "metricsKeyKey",
            values["auth"],
        ),
        values["huggingFace"]["existingSecret"]: ("tokenKey", values["huggingFace"]),
        values["redis"]["existingSecret"]: ("passwordKey", values["redis"]),
        values["redis"]["external"]["existingSecret"]: ("urlKey", values["redis"]["external"]),
    }
    users.pop("", None)
    made: Object = {}
    for job in release.of_kind("Job"):
        if job["metadata"]["name"].endswith("-make-secrets"):
            _, _, _, _, name, *keys = containers_of(job["spec"]["template"])[0]["command"]
            made[name] = keys
    for _, pod in release.pods():
        for container in containers_of(pod):
            for variable in container.get("env", []):
                if "valueFrom" in variable:
                    wanted = variable["valueFrom"]["secretKeyRef"]
                    secret = own.get(wanted["name"])
                    if wanted["name"] in made:
                        assert wanted["key"] in made[wanted["name"]]
                    elif secret is None:
                        *names, section = users[wanted["name"]]
                        assert wanted["key"] in [section[name] for name in names]
                    else:
                        held = {**secret.get("data", {}), **secret.get("stringData", {})}
                        assert wanted["key"] in held


def test_shared_memory_fits_into_the_ranks_memory(release: Release) -> None:
    pod = release.one("StatefulSet", "-cell")["spec"]["template"]
    ranks = next(each for each in containers_of(pod) if each["name"] == "ranks")
    (mount,) = [each for each in ranks["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    volume = next(each for each in pod["spec"]["volumes"] if each["name"] == mount["name"])
    assert volume["emptyDir"]["medium"] == "Memory"
    limit = amount(ranks["resources"]["limits"]["memory"])
    assert amount(volume["emptyDir"]["sizeLimit"]) <= limit / 2


def test_a_rank_has_a_gpu_unless_several_share_one(release: Release) -> None:
    cell = release.values["config"]["cell"]
    pod = release.one("StatefulSet", "-cell")["spec"]["template"]
    for container in pod["spec"]["containers"]:
        resources = container["resources"]
        name = release.values["cell"]["gpuResource"]
        gpus = [resources[key].get(name) for key in ("requests", "limits")]
        has = container["name"] == "ranks" and cell.get("device") == "cuda"
        needed = -(-cell["ranks"] // cell.get("ranks_per_device", 1))
        assert gpus == [str(needed) if has else None] * 2
    for workload, template in release.pods():
        for container in containers_of(template):
            tag = container["image"].rpartition(":")[2]
            if container["name"] in ("coordinator", "ranks"):
                assert tag.endswith("-cuda") == (cell.get("device") == "cuda"), workload
            elif container["name"] == "gateway" and not release.together:
                own = release.values["gateway"]["image"]["tag"]
                assert own or tag.endswith("-gateway") == (cell.get("device") == "cuda"), workload
