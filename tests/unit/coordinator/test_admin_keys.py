"""The keys of the admin port: who may do what, and when an address may open."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from coordinator.admin.key import ADMIN_KEY_ENV, FILE_ENDING, AdminKeyError, AdminKeys, Role
from tests.harness.coordinator.admin_cell import Cell, admin_cell, client, error_of

KEY = "an-admin-key-of-the-test"
READS = ("layout", "ranks", "switches", "decisions", "status", "live")


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    async with admin_cell() as running:
        yield running


async def test_with_a_key_everything_but_health_needs_it(cell: Cell) -> None:
    async with client(cell.context, KEY) as http:
        assert (await http.get("/health")).status_code == 200
        for path in ("/admin/layout", "/metrics", "/nowhere"):
            refused = await http.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert error_of(refused)["type"] == "authentication_error"
        wrong = await http.get("/admin/layout", headers={"Authorization": "Bearer " + KEY[:-1]})
        assert wrong.status_code == 401
        right = await http.get("/admin/layout", headers={"Authorization": f"Bearer {KEY}"})
        assert right.status_code == 200


async def test_each_role_may_do_what_it_is_for(cell: Cell) -> None:
    more = {role.variable: KEY + role.name for role in (Role.VIEWER, Role.METRICS)}
    calls = (
        ("GET", "/metrics", Role.METRICS),
        *(("GET", f"/admin/{name}", Role.VIEWER) for name in READS),
        ("HEAD", "/admin/layout", Role.VIEWER),
        ("GET", "/nowhere", Role.VIEWER),
        ("POST", "/admin/layout", Role.OPERATOR),
        ("POST", "/admin/renew", Role.OPERATOR),
        ("POST", "/admin/put-back", Role.OPERATOR),
        ("POST", "/metrics", Role.OPERATOR),
    )
    keys = {Role.OPERATOR: KEY, Role.VIEWER: KEY + "VIEWER", Role.METRICS: KEY + "METRICS"}
    async with client(cell.context, KEY, **more) as http:
        for (method, path, needed), (role, key) in itertools.product(calls, keys.items()):
            # A body that no route takes: who may call gets as far as that, and nothing happens.
            answer = await http.request(
                method, path, headers={"Authorization": f"Bearer {key}"}, json={"no": 1}
            )
            assert (answer.status_code == 403) == (role < needed), (method, path, role)
            assert answer.status_code != 401
            if role < needed and method != "HEAD":
                error = error_of(answer)
                assert error["code"] == "role_needed"
                assert f"needs the role {needed.name.lower()}" in error["message"]
                assert f"has the role {role.name.lower()}" in error["message"]
                assert needed.variable in error["message"]
        for wrong in ("", KEY[:-1], KEY + "OTHER"):
            answer = await http.get("/metrics", headers={"Authorization": f"Bearer {wrong}"})
            assert answer.status_code == 401
            assert "AILERON_METRICS_KEY" in error_of(answer)["message"]
            assert KEY not in answer.text


async def test_refusals_name_the_keys_that_this_server_has(cell: Cell) -> None:
    metrics = {Role.METRICS.variable: KEY + "METRICS"}
    async with client(cell.context, KEY, **metrics) as http:
        for answer, fault in (
            (await http.get("/admin/layout"), "is missing: set AILERON_ADMIN_KEY to"),
            (await http.post("/admin/layout", json={}), "is missing: set AILERON_ADMIN_KEY to"),
            (
                await http.get("/metrics", headers={"Authorization": "Bearer wrong"}),
                "is wrong: set AILERON_METRICS_KEY or AILERON_ADMIN_KEY to",
            ),
            (
                await http.get("/admin/status", headers={"Authorization": f"Bearer {KEY}METRICS"}),
                "has the role metrics: set AILERON_ADMIN_KEY to",
            ),
        ):
            assert fault in error_of(answer)["message"]
            assert "AILERON_VIEWER_KEY" not in answer.text


async def test_two_keys_are_valid_while_they_rotate(cell: Cell, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}-file-old\n")
    more = {Role.VIEWER.variable + FILE_ENDING: str(file)}

    async def statuses(http: httpx.AsyncClient, *keys: str) -> list[int]:
        return [
            (await http.get("/admin/ranks", headers={"Authorization": f"Bearer {key}"})).status_code
            for key in keys
        ]

    async with client(cell.context, f"{KEY}-old {KEY}-new", **more) as http:
        assert await statuses(http, f"{KEY}-old", f"{KEY}-new", KEY) == [200, 200, 401]
        assert await statuses(http, f"{KEY}-file-old", f"{KEY}-file-new") == [200, 401]
        file.write_text(f"{KEY}-file-old\n{KEY}-file-new\n")
        assert await statuses(http, f"{KEY}-file-old", f"{KEY}-file-new") == [200, 200]
        for useless in ("short", "", f"{KEY}-old"):
            file.write_text(useless)
            assert await statuses(http, f"{KEY}-file-old", f"{KEY}-file-new") == [200, 200]
        file.unlink()
        assert await statuses(http, f"{KEY}-file-old", f"{KEY}-file-new") == [200, 200]
        file.write_text(f"{KEY}-file-new")
        assert await statuses(http, f"{KEY}-file-old", f"{KEY}-file-new") == [401, 200]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"AILERON_VIEWER_KEY": KEY}, "AILERON_ADMIN_KEY is not set"),
        ({"AILERON_ADMIN_KEY": KEY, "AILERON_VIEWER_KEY": KEY}, "hold the same key"),
        ({"AILERON_ADMIN_KEY": f"{KEY} short"}, "at least 16 characters"),
        ({"AILERON_ADMIN_KEY_FILE": "/none"}, "AILERON_ADMIN_KEY_FILE: cannot read /none"),
        ({"AILERON_ADMIN_KEY_FILE": "/dev/null"}, "AILERON_ADMIN_KEY_FILE: /dev/null holds no key"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(AdminKeyError, match=sentence):
        AdminKeys(environment).require("127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_key(host: str) -> None:
    keys = AdminKeys({})
    keys.require(host)
    assert keys.is_open


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_elsewhere_a_key_is_needed(host: str) -> None:
    with pytest.raises(AdminKeyError, match="AILERON_ADMIN_KEY"):
        AdminKeys({}).require(host)
    with pytest.raises(AdminKeyError, match="at least 16"):
        AdminKeys({ADMIN_KEY_ENV: "short"})
    AdminKeys({ADMIN_KEY_ENV: KEY}).require(host)
