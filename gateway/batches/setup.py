"""Creates the parts of files and batches from the configuration. Called by the process."""

from pathlib import Path

from coordinator.protocol.config import BatchesConfig
from coordinator.protocol.gateway_config import REDIS_SCHEMES
from gateway.batches.api import BatchParts
from gateway.batches.content import Content
from gateway.batches.redis_store import RedisStore
from gateway.batches.runner import AnswerLine
from gateway.batches.service import BatchService, BatchServiceSettings
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.store import BatchStore, StoreCalls

FILES_FOLDER = "files"
DATABASE = "batches.sqlite3"


def set_up_batches(config: BatchesConfig, owner: str, answer: AnswerLine) -> BatchParts | None:
    """Return the parts, or None if batches are off; raises ValueError for unusable settings."""
    if not config.data_dir:
        return None
    if config.storage != "sqlite://" and not config.storage.startswith(REDIS_SCHEMES):
        raise ValueError("batches.storage: use sqlite:// or a redis:// URL.")
    folder = Path(config.data_dir)
    store = StoreCalls(lambda: _open_store(config.storage, folder))
    content = Content(folder / FILES_FOLDER)
    settings = BatchServiceSettings(config.lines_at_once, config.lease_ms / 1_000)
    return BatchParts(store, content, BatchService(owner, store, content, answer, settings))


def _open_store(storage: str, folder: Path) -> BatchStore:
    if storage.startswith(REDIS_SCHEMES):
        return RedisStore(storage)
    return SqliteStore(folder / DATABASE)
