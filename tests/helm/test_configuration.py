"""What the rendered manifests tell the processes: the product's own readers must take it."""

import ast
import copy
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
import zmq

from coordinator.cli.arguments import parse_arguments
from coordinator.cli.launch import DEMO_ENGINE_ARGS, DEMO_NAME
from coordinator.protocol.config import Config, check_config
from coordinator.protocol.keys import load_keys
from tests.harness.cells.servers import free_port
from tests.helm.charts import (
    CHART,
    NAMESPACE,
    REDIS_URL,
    ROOT,
    Object,
    Release,
    ask_helm,
    containers_of,
    example,
    merged,
    releases,
)

ROLES = {"coordinator": "coordinator", "rank": "ranks", "gateway": "gateway"}
"""Command -> what its files are called after."""
START_LIMIT_S = 30
PASSWORD = "a-password_of-Redis"


def configurations(release: Release) -> dict[str, Config]:
    """The rendered files, as the processes read them."""
    return {
        name: check_config(yaml.safe_load(text)) for name, text in release.configurations().items()
    }


def processes(release: Release) -> list[tuple[str, Object, Object]]:
    """The workload, pod and container of each of the product's processes."""
    return [
        (name, pod, container)
        for name, pod in release.pods()
        for container in containers_of(pod)
        if container["command"][0] == "aileron"
    ]


def file_of(container: Object) -> str:
    """The name of the configuration file that a container is started with."""
    return str(container["command"][-1]).rpartition("/")[2]


def test_every_process_is_started_with_a_file_that_it_takes(release: Release) -> None:
    configs = configurations(release)
    started = []
    for _, pod, container in processes(release):
        options = parse_arguments(container["command"][1:])
        assert options.name in ROLES
        name = file_of(container)
        assert name.startswith(ROLES[options.name])
        assert name in configs
        (mount,) = [
            each for each in container["volumeMounts"] if each["mountPath"] == str(options.config)
        ]
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert volumes[mount["name"]]["secret"]["secretName"].endswith("-config")
        assert mount["subPath"] == name
        started.append(name)
    assert sorted(started) == sorted(configs)


def test_processes_of_a_cell_are_told_the_same(release: Release) -> None:
    """Files differ in addresses alone, and in what only gateways read."""
    seen: list[Object] = []
    for config in configurations(release).values():
        told: Object = config.model_dump(exclude={"admin", "gateway", "batches"})
        del told["coordinator"]["listen"]
        seen.append(told)
    assert all(told == seen[0] for told in seen)


def test_what_the_user_configures_arrives(release: Release) -> None:
    wanted = copy.deepcopy(release.values["config"])
    if release.values["models"]["download"]["enabled"]:
        # Pods find a model that they download in a folder; its name stays the id.
        path = wanted["model"]["path"]
        wanted["model"] |= {"path": f"/models/{path}"}
        wanted["model"].setdefault("served_name", path)
    for name, config in configurations(release).items():
        told = config.model_dump(mode="json")
        assert_contains(told, wanted, name)


def assert_contains(told: Any, wanted: Any, where: str) -> None:
    """Every value of one tree is in the other."""
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            assert_contains(told[key], value, f"{where}.{key}")
    else:
        assert told == wanted, where


def test_addresses_lead_to_who_listens(release: Release) -> None:
    configs = configurations(release)
    cell = release.one("StatefulSet", "-cell")
    headless = release.one("Service", "-cells")
    assert cell["spec"]["serviceName"] == headless["metadata"]["name"]
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"]
    coordinator = configs["coordinator.yaml"]
    port = coordinator.coordinator.listen.rpartition(":")[2]
    assert configs["ranks.yaml"].coordinator.listen == f"127.0.0.1:{port}"
    ports = {
        container["name"]: {each["containerPort"] for each in container.get("ports", [])}
        for _, _, container in processes(release)
    }
    assert coordinator.admin.port in ports["coordinator"]
    for name, config in configs.items():
        if not name.startswith("gateway"):
            continue
        assert config.gateway.port in ports["gateway"]
        host, _, grpc = config.coordinator.listen.rpartition(":")
        assert grpc == port
        if release.together:
            assert host == "127.0.0.1"
            assert config.gateway.token_listen == "tcp://127.0.0.1:0"
        else:
            domain = f"{headless['metadata']['name']}.{NAMESPACE}.svc"
            assert host == f"{cell['metadata']['name']}-0.{domain}"
            assert coordinator.coordinator.listen == f"0.0.0.0:{port}"
            tokens = config.gateway.token_listen.rpartition(":")[2]
            assert tokens == "0" or int(tokens) in ports["gateway"]


def test_gateways_find_every_cell(release: Release) -> None:
    """By the names of its pods, or where the pods announce themselves under those names."""
    cell = release.one("StatefulSet", "-cell")
    domain = f"{release.one('Service', '-cells')['metadata']['name']}.{NAMESPACE}.svc"
    scaled = release.values["cell"]["autoscaling"]["type"] != "none"
    for config in configurations(release).values():
        fleet = config.fleet
        several = scaled or release.values["cells"] > 1
        assert fleet.is_on == (several and not release.together)
        if fleet.redis:
            assert fleet.advertise == f"{{host}}.{domain}:8002"
            assert not fleet.cells
        elif fleet.is_on:
            assert not scaled
            names = [f"{cell['metadata']['name']}-{n}" for n in range(cell["spec"]["replicas"])]
            assert fleet.cells == tuple(f"{name}.{domain}:8002" for name in names)


def test_processes_reach_the_redis_that_the_values_name(release: Release) -> None:
    """Its URL is in every process's environment, and no file holds its password."""
    wanted = release.values["redis"]
    if not (wanted["enabled"] or wanted["external"]["existingSecret"]):
        return
    for _, _, container in processes(release):
        names = [each["name"] for each in container["env"]]
        env = {each["name"]: each for each in container["env"]}
        if wanted["enabled"]:
            service = release.one("Service", "-redis")
            host, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
            url = f"redis://:$(AILERON_REDIS_PASSWORD)@{host}.{NAMESPACE}.svc:{port}"
            assert env["AILERON_REDIS_URL"]["value"] == url
            # Kubernetes replaces a variable only by one that stands before it.
            assert names.index("AILERON_REDIS_PASSWORD") < names.index("AILERON_REDIS_URL")
            server = containers_of(release.one("StatefulSet", "-redis")["spec"]["template"])
            (own,) = [each for each in server if each["name"] == "redis"]
            password = {each["name"]: each for each in own["env"]}["REDISCLI_AUTH"]
            assert env["AILERON_REDIS_PASSWORD"]["valueFrom"] == password["valueFrom"]
        else:
            assert env["AILERON_REDIS_URL"]["valueFrom"]["secretKeyRef"] == {
                "name": wanted["external"]["existingSecret"],
                "key": wanted["external"]["urlKey"],
            }
    for name, config in configurations(release).items():
        assert config.fleet.redis in ("", f"{REDIS_URL}/2")
        if name.startswith("gateway"):
            assert config.gateway.rate_limit_storage == f"{REDIS_URL}/0"
            batches = release.values["batches"]["enabled"]
            assert config.batches.storage == (f"{REDIS_URL}/1" if batches else "sqlite://")


def test_zeromq_resolves_the_interface_that_gateways_are_told(release: Release) -> None:
    """Ranks connect to what the socket says it is bound to, so that must be an address."""
    for name, config in configurations(release).items():
        if name.startswith("gateway") and not release.together:
            _, _, interface = config.gateway.token_listen.partition("//")
            assert interface.partition(":")[0] == release.values["gateway"]["podInterface"]
    with zmq.Context() as context, context.socket(zmq.PULL) as tokens:
        tokens.bind("tcp://lo:0")
        assert tokens.get_string(zmq.LAST_ENDPOINT).startswith("tcp://127.0.0.1:")


def test_keys_in_values_are_taken_by_the_product(release: Release, tmp_path: Path) -> None:
    for secret in release.of_kind("Secret"):
        if "keys.yaml" in secret.get("stringData", {}):
            file = tmp_path / "keys.yaml"
            file.write_text(secret["stringData"]["keys.yaml"])
            keys = release.values["auth"]["apiKeys"]["keys"]
            assert [key.tenant for key in load_keys(file).values()] == [
                key["tenant"] for key in keys
            ]


def test_keys_are_mounted_where_gateways_look(release: Release) -> None:
    for _, _, container in processes(release):
        if container["name"] == "gateway":
            config = configurations(release)[file_of(container)]
            folders = [each["mountPath"] for each in container["volumeMounts"]]
            keyed = bool(config.gateway.keys_file)
            assert keyed != config.gateway.insecure_no_auth
            assert (str(Path(config.gateway.keys_file).parent) in folders) == keyed
            assert bool(config.batches.data_dir) == release.values["batches"]["enabled"]
            assert not config.batches.data_dir or config.batches.data_dir in folders


def test_certificates_are_mounted_where_processes_look(release: Release) -> None:
    tls = release.values["tls"]
    for workload, pod, container in processes(release):
        config = configurations(release)[file_of(container)]
        volumes = release.volumes(workload, pod)
        secrets = {
            each["mountPath"]: volumes[each["name"]]["secret"]["secretName"]
            for each in container["volumeMounts"]
            if "secret" in volumes[each["name"]] and "subPath" not in each
        }
        cell = config.cell_tls
        files = {"cellSecret": [cell.cert_file, cell.key_file, cell.ca_file]}
        if container["name"] == "gateway":
            files["servingSecret"] = [config.gateway.tls_cert_file, config.gateway.tls_key_file]
        if container["name"] == "coordinator":
            files["adminSecret"] = [config.admin.tls_cert_file, config.admin.tls_key_file]
        for name, paths in files.items():
            assert all(map(bool, paths)) == bool(tls[name]), (container["name"], name)
            for path in filter(None, paths):
                assert secrets[str(Path(path).parent)] == tls[name]
                assert Path(path).name in ("tls.crt", "tls.key", "ca.crt")


def test_probes_and_monitors_speak_what_the_ports_speak(release: Release) -> None:
    tls = release.values["tls"]
    secrets = {"gateway": tls["servingSecret"], "coordinator": tls["adminSecret"]}
    for _, _, container in processes(release):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if container["name"] in secrets:
                scheme = probe["httpGet"].get("scheme", "HTTP")
                assert scheme == ("HTTPS" if secrets[container["name"]] else "HTTP")
        if container["name"] == "ranks":
            env = {each["name"]: each.get("value", "") for each in container["env"]}
            asked = env.get("AILERON_ADMIN_URL", "http:").partition(":")[0]
            assert asked == ("https" if tls["adminSecret"] else "http")
    for monitor in release.of_kind("ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint.get("scheme", "http") == ("https" if tls["adminSecret"] else "http")
    for ingress in release.of_kind("Ingress"):
        key = "nginx.ingress.kubernetes.io/backend-protocol"
        if release.values["ingress"]["controller"] == "nginx":
            spoken = ingress["metadata"].get("annotations", {}).get(key)
            assert spoken == ("HTTPS" if tls["servingSecret"] else None)


def test_everything_that_is_written_goes_to_a_volume(release: Release) -> None:
    for workload, pod, container in processes(release):
        volumes = release.volumes(workload, pod)
        writable = {
            each["mountPath"]
            for each in container["volumeMounts"]
            if not each.get("readOnly") and "secret" not in volumes[each["name"]]
        }
        assert "/tmp" in writable
        if container["name"] != "coordinator":
            folders = [each["value"] for each in container["env"] if each["name"].endswith("HOME")]
            assert folders
            assert all(any(folder.startswith(each) for each in writable) for folder in folders)


def constant(file: str, name: str) -> float:
    """A number that a module gives a name, without importing the module's engine."""
    for node in ast.parse((ROOT / file).read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return float(ast.literal_eval(value))
    raise AssertionError(f"{file} has no {name}")


def test_streams_are_drained_before_a_pod_is_killed(release: Release) -> None:
    drain_s = constant("gateway/process.py", "DRAIN_S")
    end_s = constant("gateway/process.py", "SHUTDOWN_S") + constant("gateway/process.py", "FLUSH_S")
    ranks_s = constant("worker/launch/launcher.py", "STOP_LIMIT_S")
    for _, pod, container in processes(release):
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        if container["name"] == "gateway":
            ((_, before),) = [container["lifecycle"]["preStop"]["exec"]["command"]]
            after_s = ranks_s if release.together else 0
            assert grace_s >= int(before) + drain_s + end_s + after_s + 10
        assert grace_s > ranks_s
    sidecars = release.one("StatefulSet", "-cell")["spec"]["template"]["spec"].get(
        "initContainers", []
    )
    # Kubernetes ends sidecars after the containers, and the last one first.
    names = [each["name"] for each in sidecars if each.get("restartPolicy") == "Always"]
    assert names == (["coordinator", "ranks"] if release.together else [])


def test_gateways_are_probed_on_the_paths_that_need_no_key(release: Release) -> None:
    routes = (ROOT / "gateway" / "http" / "routes.py").read_text()
    for _, _, container in processes(release):
        if container["name"] == "gateway":
            for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
                asked = container[probe]["httpGet"]
                assert (asked["path"], asked["port"]) == (path, "http")
            assert (
                'OPEN_PATHS: Final[frozenset[str]] = frozenset({"/health", "/ping", "/ready"})'
                in routes
            )


def test_prometheus_scrapes_cells_with_the_metrics_key(release: Release) -> None:
    for monitor in release.of_kind("ServiceMonitor"):
        service = release.one("Service", "-cells")
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= service["metadata"]["labels"].items()
        matching = [
            each
            for each in release.of_kind("Service")
            if wanted.items() <= each["metadata"]["labels"].items()
        ]
        for endpoint in monitor["spec"]["endpoints"]:
            ports = {port["name"] for port in service["spec"]["ports"]}
            assert endpoint["port"] in ports
            for other in matching:
                same = {port["name"] for port in other["spec"]["ports"]}
                assert other is service or endpoint["port"] not in same


def test_rules_are_those_of_the_repository(release: Release) -> None:
    for rule in release.of_kind("PrometheusRule"):
        groups = [
            group
            for file in sorted((CHART / "rules").glob("*.yaml"))
            for group in yaml.safe_load(file.read_text())["groups"]
        ]
        # tests/helm/test_monitoring.py looks at what they are scoped to.
        assert [each["name"] for each in rule["spec"]["groups"]] == [
            each["name"] for each in groups
        ]


def test_kind_serves_the_demo_model_as_aileron_up_does() -> None:
    model = releases()["kind"].values["config"]["model"]
    assert model["served_name"] == DEMO_NAME
    assert tuple(model["engine_args"]) == DEMO_ENGINE_ARGS


def test_notes_say_where_it_is_served(release: Release) -> None:
    service = release.get("Service", "serving" if "three" in release.name else "chat-aileron")
    scheme = "https" if release.values["tls"]["servingSecret"] else "http"
    assert f" {scheme}://{service['metadata']['name']}.{NAMESPACE}.svc:80/v1" in release.notes
    assert ("--admin-ca" in release.notes) == bool(release.values["tls"]["adminSecret"])
    assert ("There are no API keys" in release.notes) == (
        release.values["config"].get("gateway", {}).get("insecure_no_auth", False)
        and not release.values["auth"]["apiKeys"]["keys"]
    )


def test_redis_starts_with_the_rendered_file(tmp_path: Path) -> None:
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("NOT TESTED: no redis-server on PATH (Debian: apt-get install redis-server).")
    config = releases()["kind"].one("ConfigMap", "-redis")["data"]["redis.conf"]
    pod = releases()["kind"].one("StatefulSet", "-redis")["spec"]["template"]
    (shell, option, script) = pod["spec"]["containers"][0]["command"]
    file, port = tmp_path / "redis.conf", free_port()
    assert "\ndir /data\n" in config
    config = config.replace("/data", str(tmp_path)).replace("port 6379", f"port {port}")
    file.write_text(config)
    command = [shell, option, script.replace("/etc/redis/redis.conf", str(file))]
    env = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": PASSWORD}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port, process)
            # The shell is Redis by now, so that Kubernetes' signals reach it.
            arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert arguments.startswith(b"redis-server")
            assert PASSWORD.encode() not in arguments
            with redis.Redis(port=port, password=PASSWORD) as client:
                assert client.ping()
                assert client.config_get("appendonly") == {"appendonly": "yes"}
                assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
                (most,) = client.config_get("maxmemory").values()
                assert int(most) == int(0.7 * 512 * 1024**2)
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
        finally:
            process.kill()


def limiting_redis(memory: str | int | None) -> Object:
    """The values of kind with a limit for Redis; null takes the chart's own away."""
    values = merged(example("kind"), {"redis": {"resources": {"limits": {"cpu": "1"}}}})
    values["redis"]["resources"]["limits"]["memory"] = memory
    return values


def test_redis_is_full_before_its_container_is() -> None:
    """Whatever a quantity is written in; without a limit there is no bound."""
    most = {"1Gi": 751_619_276, "1.5G": 1_050_000_000, 2_000_000_000: 1_400_000_000, None: None}
    answers = ask_helm(*(limiting_redis(each) for each in most))
    for answer, expected in zip(answers, most.values(), strict=True):
        text = "".join(text for path, text in answer["rendered"].items() if "redis.yaml" in path)
        found = re.findall(r"^ *maxmemory (\d+)$", text, re.MULTILINE)
        assert found == ([] if expected is None else [str(expected)])


def wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Return when the process listens."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")
