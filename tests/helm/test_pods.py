"""What users may add to pods, and what they may replace: each of it arrives at every pod."""

import pytest
import yaml

from tests.helm.charts import EVERYTHING, Object, Release, ask_helm, example, merged, releases

COMPONENTS = {"chat-aileron-gateway": "gateway", "chat-aileron-cell": "cell"} | {
    "chat-aileron-redis": "redis",
    "chat-aileron-test": "test",
    "chat-aileron-make-secrets": "secrets",
}


@pytest.fixture
def everything() -> Release:
    """The variation with all of it."""
    return releases()["everything that clusters add"]


def test_every_pod_gets_what_its_section_adds(everything: Release) -> None:
    pods = dict(everything.pods())
    assert set(pods) == set(COMPONENTS)
    for name, pod in pods.items():
        metadata, spec = pod["metadata"], pod["spec"]
        assert metadata["labels"]["team"] == "llm"
        # A label that selects is the chart's.
        assert metadata["labels"]["app.kubernetes.io/name"] == "aileron"
        assert metadata["labels"]["app.kubernetes.io/component"] == COMPONENTS[name]
        assert metadata["annotations"]["example.com/a"] == "b"
        assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("nvidia", "high")
        assert spec["schedulerName"] == "volcano"
        assert spec["dnsConfig"] == {"options": [{"name": "ndots"}]}
        (spread,) = spec["topologySpreadConstraints"]
        wanted = spread["labelSelector"]["matchLabels"]
        assert wanted.items() <= metadata["labels"].items()
        assert wanted["app.kubernetes.io/component"] == COMPONENTS[name]
        if name != "chat-aileron-make-secrets":
            assert spec["serviceAccountName"] == "chat-aileron"


@pytest.mark.parametrize("component", ["gateway", "cell", "redis"])
def test_workloads_get_containers_volumes_strategy_and_grace(
    everything: Release, component: str
) -> None:
    workload = next(
        each
        for each in everything.of_kind("Deployment", "StatefulSet")
        if each["metadata"]["name"].endswith(component)
    )
    key = "strategy" if component == "gateway" else "updateStrategy"
    assert workload["spec"][key] == EVERYTHING[component]["updateStrategy"]
    spec = workload["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 600
    assert [each["name"] for each in spec["initContainers"]] == ["first"]
    assert spec["containers"][-1]["name"] == "added"
    assert {"name": "added", "emptyDir": {}} in spec["volumes"]
    for container in spec["containers"][:-1]:
        assert container["env"][-1] == {"name": "ADDED", "value": "1"}
        assert container["volumeMounts"][-1] == {"name": "added", "mountPath": "/added"}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if component == "redis" and probe == "startupProbe":
                continue
            assert container[probe]["periodSeconds"] == 21
            assert container[probe]["timeoutSeconds"] == 11
            # What is asked, and a timing that is not named, stay the chart's.
            assert {"httpGet", "exec", "tcpSocket"} & set(container[probe])
        if component != "redis":
            assert container["envFrom"] == [{"secretRef": {"name": "environment"}}]
            assert {"name": "OTHER_URL", "value": "http://example.com"} in container["env"]


def test_resources_of_gpus_are_by_the_name_that_the_cluster_has(everything: Release) -> None:
    pod = everything.one("StatefulSet", "-cell")["spec"]["template"]
    (ranks,) = [each for each in pod["spec"]["containers"] if each["name"] == "ranks"]
    limits = ranks["resources"]["limits"]
    assert (limits["nvidia.com/mig-3g.40gb"], limits["nvidia.com/gpumem"]) == ("8", 40_000)
    assert "nvidia.com/gpu" not in limits


def test_objects_and_an_account_of_the_users_are_rendered(everything: Release) -> None:
    assert everything.get("ConfigMap", "chat-added")
    account = everything.get("ServiceAccount", "chat-aileron")
    assert account["metadata"]["annotations"] == {"example.com/role": "reader"}
    assert account["automountServiceAccountToken"] is False


def resources_of(values: Object) -> tuple[Object, str]:
    """The resources of the ranks, and the size of their shared memory."""
    (answer,) = ask_helm(values)
    assert "error" not in answer, answer
    text = answer["rendered"]["aileron/templates/cell.yaml"]
    workload = next(each for each in yaml.safe_load_all(text) if each["kind"] == "StatefulSet")
    spec = workload["spec"]["template"]["spec"]
    (ranks,) = [each for each in spec["containers"] if each["name"] == "ranks"]
    (shm,) = [each for each in spec["volumes"] if each["name"] == "shm"]
    return ranks["resources"], shm["emptyDir"]["sizeLimit"]


def test_memory_follows_the_ranks_and_the_device() -> None:
    bare = {"cell": {"shmSize": "", "ranks": {"resources": None}}}
    cpu, cpu_shm = resources_of(merged(example("kind"), bare))
    assert cpu["limits"] == {"cpu": "4", "memory": "8Gi"}
    assert cpu_shm == "1024Mi"
    four = {"config": {"cell": {"ranks": 4, "widths": None, "layout": None}}}
    gpu, gpu_shm = resources_of(merged(merged(example("8xgpu"), bare), four))
    assert gpu["requests"] == {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": "4"}
    assert gpu["limits"] == {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "4"}
    assert gpu_shm == "16384Mi"
    none = {"cell": {"gpuResource": "", "ranks": {"resources": {"limits": {"memory": "900Gi"}}}}}
    own, _ = resources_of(merged(merged(example("8xgpu"), bare), none))
    assert own["limits"] == {"cpu": "64", "memory": "900Gi"}


def test_gateways_on_one_node_share_its_volume() -> None:
    spec = releases()["kind"].one("Deployment", "-gateway")["spec"]["template"]["spec"]
    (rule,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


def test_images_are_those_of_each_component() -> None:
    def images(values: Object) -> dict[str, str]:
        (answer,) = ask_helm(values)
        assert "error" not in answer, answer
        found = {}
        for path, text in answer["rendered"].items():
            for each in yaml.safe_load_all(text) if path.endswith(".yaml") else ():
                if each and each["kind"] in ("Deployment", "StatefulSet"):
                    for container in each["spec"]["template"]["spec"]["containers"]:
                        found[container["name"]] = container["image"]
        return found

    repository = "registry.example.com/aileron"
    digest = "sha256:" + "0" * 64
    assert images(example("8xgpu")) == {
        "gateway": f"{repository}:0.1.0-gateway",
        "coordinator": f"{repository}:0.1.0-cuda",
        "ranks": f"{repository}:0.1.0-cuda",
        "redis": "redis:7.2-bookworm",
    }
    tagged = images(merged(example("8xgpu"), {"image": {"tag": "2-cuda", "digest": digest}}))
    assert tagged["ranks"] == f"{repository}@{digest}"
    # A digest is of one image, and gateways need another one.
    assert tagged["gateway"] == f"{repository}:2-gateway"
    own = {"gateway": {"image": {"digest": digest}}, "cell": {"image": {"repository": "own"}}}
    apart = images(merged(example("8xgpu"), own))
    assert apart["gateway"] == f"{repository}@{digest}"
    assert apart["ranks"] == "own:0.1.0-cuda"
    assert set(images(merged(example("kind"), {"image": {"tag": "3"}})).values()) == {
        "aileron:3",
        "redis:7.2-bookworm",
    }
    together = images(
        merged(example("8xgpu"), {"gateway": {"placement": "cell", "autoscaling": None}})
    )
    assert together["gateway"] == f"{repository}:0.1.0-cuda"


def test_streams_pass_the_ingress_unbuffered(everything: Release) -> None:
    ingress = everything.get("Ingress", "chat-aileron")
    of = "nginx.ingress.kubernetes.io"
    assert ingress["metadata"]["annotations"] == {
        f"{of}/proxy-buffering": "off",
        f"{of}/proxy-read-timeout": "7200",
        f"{of}/proxy-send-timeout": "3600",
        # As large as the gateway takes.
        f"{of}/proxy-body-size": "8388608",
    }
    spec = ingress["spec"]
    assert spec["ingressClassName"] == "internal"
    assert spec["tls"] == [
        {"secretName": "chat-tls", "hosts": ["chat.example.com", "llm.example.com"]}
    ]
    assert [rule["host"] for rule in spec["rules"]] == ["chat.example.com", "llm.example.com"]
    service = everything.get("Service", "chat-aileron")["spec"]["ports"][0]
    for rule in spec["rules"]:
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {
            "name": "chat-aileron",
            "port": {"name": service["name"]},
        }


def test_a_route_leads_to_the_service_for_as_long_as_answers_take(everything: Release) -> None:
    (rule,) = everything.get("HTTPRoute", "chat-aileron")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}
    assert rule["backendRefs"] == [{"name": "chat-aileron", "port": 80}]
