"""The routes of files and batches, in OpenAI's shapes.

The edge passes the client's tenant in the ASGI scope; `tenant_of` reads it. A tenant sees only its
own files and batches; those of others do not exist for it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.batches.content import Content, new_id
from gateway.batches.service import BatchService
from gateway.batches.store import (
    FileInUseError,
    PageWanted,
    StorageError,
    StorageFullError,
    StoreCalls,
    TooManyError,
    UnknownFileError,
)
from gateway.batches.terms import (
    COMPLETION_WINDOW,
    ENDPOINTS,
    EXPIRES_AFTER_S_MAX,
    EXPIRES_AFTER_S_MIN,
    METADATA_KEY_CHARS_MAX,
    METADATA_MAX,
    METADATA_VALUE_CHARS_MAX,
    RETENTION_S,
    WINDOW_S,
    BatchRecord,
    FileRecord,
    NotAllowedError,
)
from gateway.batches.upload import FORM_BYTES_MAX, UPLOAD_WAIT_S, Upload, receive_file
from gateway.errors import ApiError, api_error
from gateway.http.intake import BodyReader
from gateway.http.line_call import KEY_ID, TENANT_KEY

UPLOADS_MAX = 16
"""Most uploads at once."""
FILES_PAGE = (10_000, 10_000)
"""Files in one answer: default and limit."""
BATCHES_PAGE = (20, 100)
"""Batches in one answer: default and limit."""
UPLOAD_PURPOSE: Final = "batch"

Answer = Callable[[Request], Awaitable[Response]]

log = structlog.get_logger(__name__)


class _RefusedError(Exception):
    """Ends a call with an error."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class BatchParts:
    """The parts that the routes use."""

    store: StoreCalls
    content: Content
    desk: BatchService


class _ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRES_AFTER_S_MIN, le=EXPIRES_AFTER_S_MAX)


class _BatchWanted(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    input_file_id: str = Field(max_length=64)
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = Field(default=None, max_length=METADATA_MAX)
    output_expires_after: _ExpiresAfter | None = None


def batch_routes(parts: BatchParts | None) -> list[Route]:
    """Return the routes; without parts all of them answer that batches are switched off."""
    api = _Api(parts) if parts else None

    def route(path: str, method: str, name: str) -> Route:
        answer = _off if api is None else _guarded(getattr(api, name))
        return Route(path, answer, methods=[method])

    return [
        route("/v1/files", "POST", "upload"),
        route("/v1/files", "GET", "list_files"),
        route("/v1/files/{file}", "GET", "file"),
        route("/v1/files/{file}", "DELETE", "delete_file"),
        route("/v1/files/{file}/content", "GET", "file_content"),
        route("/v1/batches", "POST", "create"),
        route("/v1/batches", "GET", "list_batches"),
        route("/v1/batches/{batch}", "GET", "batch"),
        route("/v1/batches/{batch}/cancel", "POST", "cancel"),
    ]


class _Api:
    def __init__(self, parts: BatchParts) -> None:
        self._store = parts.store
        self._content = parts.content
        self._desk = parts.desk
        self._uploads = 0

    async def upload(self, request: Request) -> Response:
        if self._uploads >= UPLOADS_MAX:
            text = f"{UPLOADS_MAX} files are being uploaded: try again when one is done."
            raise _RefusedError(api_error("queue_full", text, retry_after_s=5))
        self._uploads += 1
        try:
            headers = dict(request.headers)
            reader = BodyReader(request.receive, headers, FORM_BYTES_MAX, UPLOAD_WAIT_S)
            kind = headers.get("content-type", "")
            upload = await receive_file(reader, kind, self._content)
            if isinstance(upload, ApiError):
                raise _RefusedError(upload)
            try:
                return JSONResponse(await self._keep(upload, tenant_of(request)))
            finally:
                upload.part.drop()
        finally:
            self._uploads -= 1

    async def _keep(self, upload: Upload, tenant: str) -> dict[str, Any]:
        if not upload.has_file or not upload.part.bytes:
            raise _invalid("file", "must be a file that is not empty")
        if upload.fields.get("purpose") != UPLOAD_PURPOSE:
            raise _invalid(
                "purpose", f"must be {UPLOAD_PURPOSE}: only files of batches are accepted"
            )
        now_s = int(time.time())
        record = FileRecord(
            id=new_id("file-"),
            tenant=tenant,
            filename=upload.filename or "upload.jsonl",
            purpose=UPLOAD_PURPOSE,
            bytes=upload.part.bytes,
            created_at=now_s,
            expires_at=now_s + _expires_after_s(upload.fields),
        )
        await asyncio.to_thread(upload.part.keep, record.id)
        try:
            await self._store.call(lambda store: store.add_file(record))
        except (StorageError, TooManyError):
            await asyncio.to_thread(self._content.delete, record.id)
            raise
        return record.view()

    async def list_files(self, request: Request) -> Response:
        tenant, wanted = tenant_of(request), _page_wanted(request.query_params, FILES_PAGE)
        page = await self._store.call(lambda store: store.files(tenant, wanted))
        return _list([record.view() for record in page.records], has_more=page.has_more)

    async def file(self, request: Request) -> Response:
        return JSONResponse((await self._file(request)).view())

    async def file_content(self, request: Request) -> Response:
        record = await self._file(request)
        pieces = self._content.read(record.id)
        # Read before the answer begins, so that a missing file is an error, not a truncated answer.
        first = await anext(pieces, b"")

        async def rest() -> Any:
            yield first
            async for piece in pieces:
                yield piece

        headers = {"content-length": str(record.bytes)}
        return StreamingResponse(rest(), media_type="application/octet-stream", headers=headers)

    async def delete_file(self, request: Request) -> Response:
        tenant, file_id = tenant_of(request), request.path_params["file"]
        try:
            is_there = await self._store.call(lambda store: store.delete_file(tenant, file_id))
        except StorageFullError:
            # Only the full disk prevents it, and deleting the file's bytes makes room.
            await asyncio.to_thread(self._content.delete, file_id)
            is_there = await self._store.call(lambda store: store.delete_file(tenant, file_id))
        if not is_there:
            raise _missing("file")
        await asyncio.to_thread(self._content.delete, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        wanted = _read_wanted(await request.body())
        now_s = int(time.time())
        after = wanted.output_expires_after
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=tenant_of(request),
            key=request.scope.get(KEY_ID, ""),
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
            metadata=wanted.metadata,
            files_expire_after_s=after.seconds if after else RETENTION_S,
        )
        await self._store.call(lambda store: store.add_batch(record))
        self._desk.poke()
        return JSONResponse(record.view())

    async def list_batches(self, request: Request) -> Response:
        tenant, wanted = tenant_of(request), _page_wanted(request.query_params, BATCHES_PAGE)
        page = await self._store.call(lambda store: store.batches(tenant, wanted))
        return _list([record.view() for record in page.records], has_more=page.has_more)

    async def batch(self, request: Request) -> Response:
        tenant, batch_id = tenant_of(request), request.path_params["batch"]
        record = await self._store.call(lambda store: store.batch(tenant, batch_id))
        if record is None:
            raise _missing("batch")
        return JSONResponse(record.view())

    async def cancel(self, request: Request) -> Response:
        tenant, batch_id, now_s = (
            tenant_of(request),
            request.path_params["batch"],
            int(time.time()),
        )
        record = await self._store.call(lambda store: store.cancel(tenant, batch_id, now_s))
        if record is None:
            raise _missing("batch")
        self._desk.poke()
        return JSONResponse(record.view())

    async def _file(self, request: Request) -> FileRecord:
        tenant, file_id = tenant_of(request), request.path_params["file"]
        record = await self._store.call(lambda store: store.file(tenant, file_id))
        if record is None:
            raise _missing("file")
        return record


def tenant_of(request: Request) -> str:
    """Return the request's tenant; empty for anonymous ones."""
    tenant: str = request.scope.get(TENANT_KEY, "")
    return tenant


def respond(error: ApiError) -> Response:
    """Return an error as an answer."""
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), status_code=error.status, headers=headers)


def _guarded(answer: Answer) -> Answer:
    """Turn expected exceptions into errors of the API."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except _RefusedError as refused:
            error = refused.error
        except UnknownFileError:
            error = api_error("not_found", "There is no such file.", "input_file_id")
        except FileInUseError:
            error = api_error("conflict", "A batch needs the file: cancel it first, or wait.")
        except NotAllowedError as refused:
            error = api_error("conflict", f"The batch's status does not allow this: {refused}")
        except TooManyError as refused:
            text = f"A tenant may have {refused}: delete some, or wait until they have ended."
            error = api_error("quota_exceeded", text)
        except StorageFullError:
            text = "The server has no room for more files and batches: try again later."
            error = api_error("storage_full", text, retry_after_s=5)
        except StorageError as failure:
            log.warning("storage_failed", reason=str(failure))
            text = "The storage of files and batches is not available: try again later."
            error = api_error("storage_unavailable", text, retry_after_s=5)
        return respond(error)

    return guarded


async def _off(_: Request) -> Response:
    text = "Files and batches are off on this server: its operator must set batches.data_dir."
    return respond(api_error("not_implemented", text))


def _read_wanted(body: bytes) -> _BatchWanted:
    try:
        wanted = _BatchWanted.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"][:1])
        raise _invalid(name or "body", _RULES.get(name, "is not a parameter of batches")) from None
    if wanted.endpoint == "/v1/embeddings":
        raise _invalid("endpoint", "must not be /v1/embeddings: this server's model makes none")
    if wanted.endpoint not in ENDPOINTS:
        raise _invalid("endpoint", _RULES["endpoint"])
    for key, value in (wanted.metadata or {}).items():
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            raise _invalid("metadata", _RULES["metadata"])
    return wanted


_RULES: Final[Mapping[str, str]] = {
    "": "must be an object",
    "input_file_id": "must be the id of an uploaded file",
    "endpoint": f"must be one of: {', '.join(ENDPOINTS)}",
    "completion_window": f"must be {COMPLETION_WINDOW}",
    "metadata": (
        f"may have {METADATA_MAX} texts of {METADATA_VALUE_CHARS_MAX} characters at most, with "
        f"keys of {METADATA_KEY_CHARS_MAX}"
    ),
    "output_expires_after": (
        f"must have the anchor created_at and {EXPIRES_AFTER_S_MIN} to {EXPIRES_AFTER_S_MAX} "
        "seconds"
    ),
}


def _expires_after_s(fields: Mapping[str, str]) -> int:
    given = {
        name: fields[key]
        for name in ("anchor", "seconds")
        if (key := f"expires_after[{name}]") in fields
    }
    if not given:
        return RETENTION_S
    try:
        return _ExpiresAfter.model_validate(given).seconds
    except ValidationError:
        raise _invalid("expires_after", _RULES["output_expires_after"]) from None


def _page_wanted(query: Mapping[str, str], bounds: tuple[int, int]) -> PageWanted:
    usual, most = bounds
    limit = query.get("limit", str(usual))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 7 and 1 <= int(limit) <= most):
        raise _invalid("limit", f"must be a number from 1 to {most}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _invalid("order", "must be asc or desc")
    after, purpose = query.get("after") or None, query.get("purpose") or None
    return PageWanted(int(limit), after, order == "asc", purpose)


def _list(data: list[dict[str, Any]], *, has_more: bool) -> Response:
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": ends[0],
            "last_id": ends[1],
            "has_more": has_more,
        }
    )


def _invalid(param: str, rule: str) -> _RefusedError:
    return _RefusedError(api_error("invalid_value", f"{param} {rule}.", param))


def _missing(what: str) -> _RefusedError:
    return _RefusedError(api_error("not_found", f"There is no such {what}."))
