"""Files and batches over HTTP: shapes, bounds, and whose they are."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette

from coordinator.protocol.config import BatchesConfig
from coordinator.protocol.keys import hash_of
from gateway.batches import terms, upload
from gateway.batches.api import batch_routes
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.store import StorageFullError
from gateway.http.edge import Edge
from tests.harness.cells.batch_process import FOREVER_S, Served

URL = "/v1/completions"
LIMIT_S = 60.0
ERROR_FIELDS = {"message", "type", "param", "code"}


@pytest.fixture
def served(tmp_path: Path) -> Served:
    keys = [{"hash": hash_of(f"key-{name}"), "tenant": name} for name in ("acme", "other")]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    config = BatchesConfig(data_dir=str(tmp_path / "data"))
    return Served(config, FOREVER_S, str(tmp_path / "keys.yaml"))


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    work = asyncio.create_task(served.parts.desk.run(lambda: True, served.tell))
    async with of_tenant(served, "acme") as made:
        yield made
    work.cancel()
    await served.close()


def of_tenant(served: Served, tenant: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(served.edge),
        base_url="http://gateway",
        headers={"authorization": f"Bearer key-{tenant}"},
    )


def some_lines(count: int, prompt: str = "p") -> bytes:
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": URL,
            "body": {"model": "m", "prompt": prompt},
        }
        for number in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def send(client: httpx.AsyncClient, data: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await client.post("/v1/files", data=form, files={"file": ("in.jsonl", data)})


async def file_of(client: httpx.AsyncClient, data: bytes) -> str:
    answer = await send(client, data)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def begin(client: httpx.AsyncClient, file_id: str, **changes: Any) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h", **changes}
    return await client.post("/v1/batches", json=body)


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == ERROR_FIELDS
    assert answer.headers["x-request-id"]
    return answer.status_code, error["code"]


async def test_files(client: httpx.AsyncClient) -> None:
    data = some_lines(3)
    answer = await send(
        client, data, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    )
    file = answer.json()
    assert file["bytes"] == len(data)
    assert file["expires_at"] - file["created_at"] == 7_200
    assert (await client.get(f"/v1/files/{file['id']}")).json() == file
    content = await client.get(f"/v1/files/{file['id']}/content")
    assert content.content == data
    listed = (await client.get("/v1/files", params={"purpose": "batch", "limit": 1})).json()
    assert listed["data"] == [file]
    assert listed["has_more"] is False
    gone = await client.delete(f"/v1/files/{file['id']}")
    assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
    for path in ("", "/content"):
        assert code_of(await client.get(f"/v1/files/{file['id']}{path}")) == (404, "not_found")
    assert code_of(await client.delete(f"/v1/files/{file['id']}")) == (404, "not_found")


async def test_a_tenant_has_its_own(served: Served, client: httpx.AsyncClient) -> None:
    file_id = await file_of(client, some_lines(1, "slow"))
    batch_id = (await begin(client, file_id)).json()["id"]
    async with of_tenant(served, "other") as other:
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            assert code_of(await other.get(path)) == (404, "not_found")
        assert code_of(await other.delete(f"/v1/files/{file_id}")) == (404, "not_found")
        assert code_of(await other.get(f"/v1/batches/{batch_id}")) == (404, "not_found")
        assert code_of(await other.post(f"/v1/batches/{batch_id}/cancel")) == (404, "not_found")
        assert code_of(await begin(other, file_id)) == (404, "not_found")
        assert (await other.get("/v1/files")).json()["data"] == []
        assert (await other.get("/v1/batches")).json()["data"] == []
    async with of_tenant(served, "nobody") as nobody:
        assert code_of(await nobody.get("/v1/files")) == (401, "invalid_api_key")


async def test_a_batch_ends_with_the_key_that_made_it(
    served: Served, client: httpx.AsyncClient
) -> None:
    file_id = await file_of(client, some_lines(50))
    # The key still opens the API here, so that the test can look on.
    served.edge._keys._by_id = {}
    path = f"/v1/batches/{(await begin(client, file_id)).json()['id']}"

    async def has_ended() -> bool:
        return bool((await client.get(path)).json()["status"] == "completed")

    await until(has_ended)
    batch = (await client.get(path)).json()
    assert batch["request_counts"] == {"total": 50, "completed": 0, "failed": 50}
    errors = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines()
    codes = {json.loads(line)["response"]["body"]["error"]["code"] for line in errors}
    assert codes == {"api_key_revoked"}


async def test_a_batch_and_its_progress(served: Served, client: httpx.AsyncClient) -> None:
    file_id = await file_of(client, some_lines(2, "slow"))
    batch = (await begin(client, file_id, metadata={"a": "b"})).json()
    assert batch["status"] == "validating"
    assert batch["metadata"] == {"a": "b"}
    path = f"/v1/batches/{batch['id']}"

    async def runs() -> bool:
        return bool((await client.get(path)).json()["status"] == "in_progress")

    await until(runs)
    assert (await client.get(path)).json()["request_counts"]["total"] == 2

    async def is_told() -> bool:
        return any(each.batch == batch["id"] and each.total == 2 for each in served.told)

    await until(is_told)
    assert code_of(await client.delete(f"/v1/files/{file_id}")) == (409, "conflict")
    assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelling"

    async def is_over() -> bool:
        return bool((await client.get(path)).json()["status"] == "cancelled")

    await until(is_over)
    end = (await client.get(path)).json()
    assert end["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    errors = (await client.get(f"/v1/files/{end['error_file_id']}/content")).text.splitlines()
    assert [json.loads(line)["error"]["code"] for line in errors] == ["batch_cancelled"] * 2
    listed = (await client.get("/v1/batches", params={"limit": 1})).json()
    assert [each["id"] for each in listed["data"]] == [batch["id"]]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "7d"}, "completion_window"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {f"k{number}": "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": {"b": "c"}}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_wrong_batches(
    client: httpx.AsyncClient, changes: dict[str, Any], param: str
) -> None:
    answer = await begin(client, "file-none", **changes)
    assert code_of(answer) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == param


async def test_wrong_uploads(client: httpx.AsyncClient) -> None:
    assert code_of(await send(client, b"")) == (400, "invalid_value")
    assert code_of(await send(client, b"x", purpose="user_data")) == (400, "invalid_value")
    seconds = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
    assert code_of(await send(client, b"x", **seconds)) == (400, "invalid_value")
    no_file = await client.post("/v1/files", files={"purpose": (None, "batch")})
    assert code_of(no_file) == (400, "invalid_value")
    two = [("file", ("a", b"x")), ("file", ("b", b"y"))]
    assert code_of(await client.post("/v1/files", files=two)) == (400, "invalid_value")
    assert code_of(await client.post("/v1/files", json={})) == (415, "unsupported_media_type")
    form = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"", b"--b\r\n", b"nonsense", b"--b\r\n" + b"x" * 9_000):
        answer = await client.post("/v1/files", content=body, headers=form)
        assert code_of(answer) == (400, "invalid_value")
    many = {f"f{number}": (None, "") for number in range(40)}
    assert code_of(await client.post("/v1/files", files=many)) == (400, "invalid_value")
    long = {"purpose": (None, "x" * 2_000)}
    assert code_of(await client.post("/v1/files", files=long)) == (400, "invalid_value")
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}):
        assert code_of(await client.get("/v1/files", params=query)) == (400, "invalid_value")
    assert code_of(await client.put("/v1/files")) == (405, "method_not_allowed")
    assert code_of(await client.get("/v1/files/a/b")) == (404, "unknown_url")


async def test_a_file_has_a_bound_and_is_not_held_in_memory(
    served: Served, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upload, "FILE_BYTES_MAX", 3 * 1024**2)
    fine = await send(client, b"x" * (3 * 1024**2))
    assert fine.status_code == 200
    assert code_of(await send(client, b"x" * (3 * 1024**2 + 1))) == (413, "request_too_large")
    form = {"content-type": "multipart/form-data; boundary=b", "content-length": str(2**40)}
    told = await client.post("/v1/files", content=b"", headers=form)
    assert code_of(told) == (413, "request_too_large")
    files = list((tmp_path / "data" / "files").iterdir())
    assert len(files) == 1, "nothing is left of what was refused"
    largest = 0

    def note(self: Any, data: bytes) -> None:
        nonlocal largest
        largest = max(largest, len(data))
        self.bytes += len(data)

    monkeypatch.setattr("gateway.batches.content.Part.write", note)

    async def pieces() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 65_536
        yield b"\r\n--b--\r\n"

    await client.post("/v1/files", content=pieces(), headers={"content-type": form["content-type"]})
    assert 0 < largest <= upload.WRITE_BYTES + 65_536


async def test_a_tenant_may_have_so_much(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(terms, "FILES_PER_TENANT_MAX", 1)
    monkeypatch.setattr(terms, "BATCHES_UNFINISHED_MAX", 1)
    file_id = await file_of(client, some_lines(1, "slow"))
    refused = await send(client, b"x")
    assert code_of(refused) == (429, "quota_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    assert len(list((tmp_path / "data" / "files").iterdir())) == 1
    assert (await begin(client, file_id)).status_code == 200
    assert code_of(await begin(client, file_id)) == (429, "quota_exceeded")


async def test_a_full_disk(
    served: Served, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Uploads are refused, chat is not, and a file can be deleted to make room."""
    file_id = await file_of(client, some_lines(1))
    is_full = True

    def check(*_: Any) -> None:
        if is_full:
            raise StorageFullError("full.")

    with monkeypatch.context() as patched:
        patched.setattr("gateway.batches.content.Part.keep", check)
        refused = await send(client, b"x")
        assert code_of(refused) == (503, "storage_full")
        assert refused.headers["retry-after"]
        chat = await client.post(URL, json={"model": "m", "prompt": "p"})
        assert chat.status_code == 200
    assert [path.name for path in (tmp_path / "data" / "files").iterdir()] == [file_id]
    really = SqliteStore.delete_file

    def delete_if_room(self: SqliteStore, tenant: str, name: str) -> bool:
        if (tmp_path / "data" / "files" / name).exists():
            raise StorageFullError("full.")
        return really(self, tenant, name)

    monkeypatch.setattr(SqliteStore, "delete_file", delete_if_room)
    assert (await client.delete(f"/v1/files/{file_id}")).json()["deleted"] is True


async def test_without_a_folder_batches_are_off() -> None:
    edge = Edge(Starlette(routes=batch_routes(None)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(edge), base_url="http://gateway"
    ) as client:
        for answer in (await client.get("/v1/files"), await begin(client, "file-1")):
            assert code_of(answer) == (501, "not_implemented")
            assert "batches.data_dir" in answer.json()["error"]["message"]
