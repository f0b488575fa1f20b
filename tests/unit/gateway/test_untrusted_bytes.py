"""Nothing that comes over a socket is ever unpickled, and nothing without bounds is read."""

import ast
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.protocol import wire

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("gateway", "coordinator", "worker", "comm_pool", "kvadaptor", "loadgen")
UNPICKLES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
OWN_MEMORY = {
    "comm_pool/cpu/step_ring.py",
    "worker/engine/startup_cache.py",
    "worker/engine/weights/manifest.py",
    "worker/rank/migration/migration.py",
    "worker/rank/migration/plan_ahead.py",
    "worker/rank/migration/precopy.py",
}
"""Read what ranks of one launcher left for each other in memory that only their user opens."""

PICKLE, CLOUDPICKLE = 1, 2
"""vLLM's msgpack extensions that hold a pickle."""

DECODERS = [name for name in vars(wire) if name.startswith("decode_")]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    trap = Trap(tmp_path / "sprung")
    pickle.loads(pickle.dumps(trap))
    assert trap.folder.is_dir(), "the trap does not work"
    trap.folder.rmdir()
    return trap


def disguises(trap: Trap) -> list[bytes]:
    """A pickle as it is, and as vLLM would put it into a message."""
    raw = pickle.dumps(trap)
    hidden = [msgspec.msgpack.Ext(code, raw) for code in (PICKLE, CLOUDPICKLE)]
    return [raw, *(msgspec.msgpack.encode(each) for each in (*hidden, hidden, [[raw, hidden]]))]


@pytest.mark.parametrize("name", DECODERS)
def test_no_decoder_of_the_protocol_unpickles(name: str, trap: Trap) -> None:
    for message in disguises(trap):
        with pytest.raises(msgspec.MsgspecError):
            getattr(wire, name)(message)
    assert not trap.folder.exists()


def test_there_are_decoders_to_try() -> None:
    assert len(DECODERS) >= 6


def test_vllm_s_decoders_do_not_unpickle(trap: Trap) -> None:
    serial = pytest.importorskip("vllm.v1.serial_utils")
    engine = pytest.importorskip("gateway.engine.wire")
    for message in disguises(trap):
        for decode in (engine._decode_any, engine._decode_outputs):
            # It may be refused in any way, or come out as bytes.
            with contextlib.suppress(Exception):
                decode([message])
    assert not trap.folder.exists()
    assert (serial.CUSTOM_TYPE_PICKLE, serial.CUSTOM_TYPE_CLOUDPICKLE) == (PICKLE, CLOUDPICKLE)


SETTLE = {
    "gateway": "from gateway.environment import settle\nsettle(os.environ)\n",
    "worker": "from worker.__main__ import FIXED_ENVIRONMENT\n"
    "os.environ.update(FIXED_ENVIRONMENT)\n",
}
"""Package -> what its process does before it imports vLLM."""


@pytest.mark.parametrize("package", list(SETTLE))
def test_a_user_cannot_turn_unpickling_on(package: str, tmp_path: Path) -> None:
    """Whoever starts a process with vLLM's switch set gets one that ignores it."""
    program = (
        f"import os\n{SETTLE[package]}print(int(os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION']))\n"
    )
    environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == ["0"]
    source = (ROOT / package / "__main__.py").read_text()
    main = source[source.index("def main") :]
    applied = main.index(SETTLE[package].splitlines()[-1])
    assert applied < main.index(f"from {package}."), "vLLM is imported before"


def test_only_the_ranks_own_memory_is_unpickled() -> None:
    found = {str(path.relative_to(ROOT)) for path in _sources() if _imports(path) & UNPICKLES}
    assert found == OWN_MEMORY
    assert not [path for path in _sources() if _loads_tensors(path)]


def test_messages_of_peers_are_bounded() -> None:
    options = dict(wire.CHANNEL_OPTIONS)
    assert options["grpc.max_receive_message_length"] == wire.MAX_MESSAGE_BYTES
    assert wire.MAX_MESSAGE_BYTES <= 64 << 20


def test_a_push_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: Any) -> None:
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("vllm")
    from gateway import sockets

    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1_000)
    own = sockets.Sockets(tmp_path, "tcp://127.0.0.1:0")
    context = zmq.Context()
    stranger, leader = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
    try:
        stranger.connect(own.token_address)
        leader.connect(own.token_address)
        stranger.send(b"x" * 1_001)
        leader.send(b"y" * 1_000)
        assert own.tokens.poll(30_000), "nothing came"
        assert own.tokens.recv() == b"y" * 1_000
        assert not own.tokens.poll(200)
    finally:
        context.destroy(linger=0)
        own.close()


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> set[str]:
    names = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def _loads_tensors(path: Path) -> bool:
    """`torch.load` unpickles too, and numpy's if it is told to."""
    calls = [node for node in _nodes(path) if isinstance(node, ast.Call)]
    return any(
        (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "load"
            and ast.unparse(call.func) == "torch.load"
            and "weights_only=True" not in ast.unparse(call)
        )
        or any(
            keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            for keyword in call.keywords
        )
        for call in calls
    )
