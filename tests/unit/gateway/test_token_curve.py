"""The token socket with CURVE: which pushes a gateway reads."""

import time
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import TokenBatch
from coordinator.protocol.token_curve import rank_secret_key, split_address, with_public_key
from gateway.relay.token_curve import TokenGuard
from worker.io.token_publisher import TokenPublisher

TOKEN = "a-secret-for-tests-only"
ADDRESS = "tcp://10.0.0.1:8003"


def test_an_address_with_a_key_is_read_back() -> None:
    key = bytes(range(32))
    assert split_address(with_public_key(ADDRESS, key)) == (ADDRESS, key)
    assert split_address(ADDRESS) == (ADDRESS, None)


@pytest.mark.parametrize("text", ["", "ab", "zz" * 32])
def test_a_key_of_another_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- Python's words differ between the cases
        split_address(f"{ADDRESS}?curve={text}")


def test_ranks_of_one_token_have_one_key() -> None:
    assert rank_secret_key(TOKEN) == rank_secret_key(TOKEN)
    assert rank_secret_key(TOKEN) != rank_secret_key(TOKEN + "x")
    assert len(rank_secret_key(TOKEN)) == 32


class Gateway:
    """A token socket as a gateway's `Sockets` makes it, without the engine's parts."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.tokens = self._context.socket(zmq.PULL)
        self._guard = TokenGuard(self._context, TOKEN)
        key = self._guard.protect(self.tokens)
        port = self.tokens.bind_to_random_port("tcp://127.0.0.1")
        self.token_address = with_public_key(f"tcp://127.0.0.1:{port}", key)

    def close(self) -> None:
        self._guard.close()
        self._context.destroy(linger=0)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.close()


def test_pushes_without_the_ranks_key_are_not_read(gateway: Gateway) -> None:
    address, gateway_key = split_address(gateway.token_address)
    assert gateway_key is not None
    context = zmq.Context()
    foreign = z85.encode(rank_secret_key("another-shared-secret"))
    keys: dict[str, bytes | None] = {
        "plain": None,
        "random": zmq.curve_keypair()[1],
        "of another cell": foreign,
        "of the ranks": z85.encode(rank_secret_key(TOKEN)),
    }
    sockets = []
    try:
        for name, secret in keys.items():
            sockets.append(push := context.socket(zmq.PUSH))
            if secret is not None:
                push.setsockopt(zmq.CURVE_SERVERKEY, gateway_key)
                push.setsockopt(zmq.CURVE_SECRETKEY, secret)
                push.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            push.connect(address)
            push.send(name.encode())
        assert gateway.tokens.poll(10_000), "nothing came"
        assert gateway.tokens.recv() == b"of the ranks"
        # The others have tried several times in this while.
        assert not gateway.tokens.poll(1_000)
    finally:
        for push in sockets:
            push.close(linger=0)
        context.term()


def test_a_rank_pushes_to_a_gateway_that_encrypts(gateway: Gateway) -> None:
    received = _pushed(gateway, TOKEN, 20)
    assert received is not None
    assert received[1] == b"tokens"


def test_a_rank_of_another_token_reaches_no_gateway(gateway: Gateway) -> None:
    assert _pushed(gateway, "another-shared-secret", 2) is None


def _pushed(gateway: Gateway, token: str, limit_s: float) -> list[bytes] | None:
    """Push with the product's own publisher; return what the gateway's socket got."""
    publisher = TokenPublisher(lambda outputs: outputs, lambda _: None, token)
    try:
        publisher.push(gateway.token_address, TokenBatch(Rank(0), 1, 1, ()), [b"tokens"])
        deadline = time.monotonic() + limit_s
        while not gateway.tokens.poll(100):
            publisher.watch()
            if time.monotonic() > deadline:
                return None
        frames: list[bytes] = gateway.tokens.recv_multipart()
        return frames
    finally:
        publisher.close()
