"""Secrets: no rendering holds one, two renderings are equal, and a hook makes each of them once."""

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from coordinator.admin.key import AdminKeys, Role
from coordinator.protocol.config import TOKEN_ENV, shared_token
from tests.harness.cells.servers import free_port
from tests.helm.charts import (
    CHART,
    VARIATIONS,
    Object,
    Release,
    ask_helm,
    containers_of,
    documents,
    example,
    merged,
    releases,
    variation,
)

LIMIT_S = 60
ACCOUNT_TOKEN = "token-of-the-account"


def rendered(values: Object) -> dict[str, str]:
    """The chart's text by file."""
    (answer,) = ask_helm(values)
    assert "error" not in answer, answer
    texts: dict[str, str] = answer["rendered"]
    return texts


def test_two_renderings_are_equal() -> None:
    """As GitOps tools need it: they render again and again, and cannot read the cluster."""
    values = [variation(name) for name in VARIATIONS]
    first, second = ask_helm(*values), ask_helm(*values)
    for name, one, other in zip(VARIATIONS, first, second, strict=True):
        assert one["rendered"] == other["rendered"], name


def test_no_rendering_holds_a_password_of_the_chart(release: Release) -> None:
    for secret in release.of_kind("Secret"):
        assert set(secret.get("stringData", {})) <= {
            *("coordinator.yaml", "ranks.yaml", "gateway.yaml", "keys.yaml")
        }
        assert "data" not in secret


def annotations(texts: dict[str, str]) -> dict[str, dict[str, str]]:
    """The annotations of each workload's pods, by the workload's name."""
    found = {}
    for path, text in texts.items():
        if not path.endswith(".yaml"):
            continue
        for each in documents(text):
            if each["kind"] in ("Deployment", "StatefulSet"):
                metadata = each["spec"]["template"]["metadata"]
                found[each["metadata"]["name"]] = metadata["annotations"]
    return found


@pytest.mark.parametrize(
    ("change", "rolled"),
    [
        ({"config": {"slo": {"interactive": {"ttft_ms": 700}}}}, {"cell", "gateway"}),
        ({"config": {"gateway": {"rate_limit_storage": "${OTHER}"}}}, {"cell", "gateway"}),
        ({"redis": {"resources": {"limits": {"memory": "1Gi"}}}}, {"redis"}),
        ({"service": {"port": 81}}, set()),
    ],
    ids=["goals", "address", "Redis", "service"],
)
def test_pods_roll_when_what_they_read_at_start_changes(change: Object, rolled: set[str]) -> None:
    before, after = (
        annotations(rendered(values))
        for values in (example("kind"), merged(example("kind"), change))
    )
    changed = {name.rpartition("-")[2] for name in before if before[name] != after[name]}
    assert changed == rolled


@dataclass
class ApiServer:
    """What is asked of it, and its answers' status."""

    status: int
    port: int = 0
    asked: list[tuple[str, str, Any]] = field(default_factory=list)


@contextmanager
def api_server(folder: Path, status: int) -> Iterator[ApiServer]:
    """An HTTPS server with a certificate of its own, as a cluster has."""
    key, certificate = folder / "key.pem", folder / "ca.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "token").write_text(ACCOUNT_TOKEN)
    state = ApiServer(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.asked.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(state.status)
            self.end_headers()
            self.wfile.write(b'{"message":"because"}')

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        state.port = server.server_address[1]
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


def run_job(folder: Path, port: int) -> "subprocess.CompletedProcess[str]":
    """Run the command of the hook's Job, as its pod does, against a server of ours."""
    job = releases()["kind"].one("Job", "-make-secrets")
    (container,) = containers_of(job["spec"]["template"])
    command = [sys.executable, *container["command"][1:]]
    env = {each["name"]: each["value"] for each in container["env"]}
    env |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    env |= {"ACCOUNT": str(folder), "PATH": os.environ["PATH"]}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_hook_makes_secrets_that_the_product_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api_server(tmp_path, 201) as server:
        runs = [run_job(tmp_path, server.port) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    (path, key, one), (_, _, other) = server.asked
    assert path == "/api/v1/namespaces/llm/secrets"
    assert key == f"Bearer {ACCOUNT_TOKEN}"
    assert one["metadata"] == {
        "name": "chat-aileron-secrets",
        "labels": {"app.kubernetes.io/name": "aileron", "app.kubernetes.io/instance": "chat"},
    }
    values = one["stringData"]
    monkeypatch.setenv(TOKEN_ENV, values["token"])
    assert shared_token() == values["token"]
    roles = {
        Role.OPERATOR: values["admin-key"],
        Role.VIEWER: values["viewer-key"],
        Role.METRICS: values["metrics-key"],
    }
    keys = AdminKeys({role.variable: key for role, key in roles.items()})
    keys.require("0.0.0.0")
    assert {keys.role_of(key.encode()): key for key in roles.values()} == roles
    assert len({*values.values(), *other["stringData"].values()}) == 10
    # Its values stand in a URL as they are.
    assert all(value.isalnum() for value in values.values())
    for run in runs:
        assert not any(value in run.stdout + run.stderr for value in values.values())


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(409, 0, "exists and stays"), (403, 1, "cannot be made: 403"), (500, 1, "because")],
)
def test_hook_leaves_an_existing_secret_and_says_what_is_refused(
    status: int, code: int, words: str, tmp_path: Path
) -> None:
    with api_server(tmp_path, status) as server:
        run = run_job(tmp_path, server.port)
    assert (run.returncode, words in run.stdout) == (code, True), run.stdout


def test_hook_says_that_nobody_answers_or_somebody_else(tmp_path: Path) -> None:
    with api_server(tmp_path, 201) as server:
        run_job(tmp_path, free_port())
        other = tmp_path / "other"
        other.mkdir()
        with api_server(other, 201):
            run = run_job(other, server.port)
    assert run.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in run.stdout
    assert not server.asked


def test_hook_may_create_secrets_and_nothing_else() -> None:
    release = releases()["kind"]
    (role,) = release.of_kind("Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}]
    job = release.one("Job", "-make-secrets")
    account = job["spec"]["template"]["spec"]["serviceAccountName"]
    (binding,) = release.of_kind("RoleBinding")
    assert [each["name"] for each in binding["subjects"]] == [account]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    for each in (job, role, binding, release.get("ServiceAccount", account)):
        hooks = each["metadata"]["annotations"]
        assert hooks["helm.sh/hook"] == "pre-install,pre-upgrade"
        # Helm keeps an account until the Job that uses it has ended.
        weight = int(hooks["helm.sh/hook-weight"])
        assert weight < 0
        assert each is job or weight < int(job["metadata"]["annotations"]["helm.sh/hook-weight"])
    for name, pod in release.pods():
        assert name == job["metadata"]["name"] or "serviceAccountName" not in pod["spec"]


def test_no_hook_where_every_secret_is_the_users() -> None:
    release = releases()["a model for each cell"]
    assert not release.of_kind("Role", "RoleBinding", "ServiceAccount")
    assert not [each for each in release.of_kind("Job") if "secrets" in each["metadata"]["name"]]


def test_example_of_many_cells_holds_no_url_with_a_password() -> None:
    """Only its comment shows what the Secret holds."""
    for file in (CHART / "values").glob("*.yaml"):
        assert "://:" not in json.dumps(yaml.safe_load(file.read_text()))
