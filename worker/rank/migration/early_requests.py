"""Requests of tasks that this rank will lead after a switch, built while their old groups serve.

Decoding a payload, making a request and its row of tokens take longer than all else that a new
leader does with a task. At the switch only the tokens since then are appended. That is right as
long as the old leader has the same attempt: its tokens only grow. All other tasks are built anew.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from worker.rank.engine import Continuation, Engine, Tokens
from worker.rank.migration.manifest import Manifest, TaskSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class EarlyRequest:
    """A request of an attempt that `leader` runs, and the tokens that it had when it was built."""

    leader: int
    attempt: int
    count: int
    """Generated tokens among `tokens`."""
    request: Continuation
    tokens: Tokens


class EarlyRequests:
    """The requests that one rank builds for one switch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._payloads: dict[tuple[str, int], bytes] = {}
        """By (task, attempt): leaders publish each once."""
        self._expected: dict[str, tuple[int, TaskSnapshot]] = {}
        self._built: dict[str, EarlyRequest] = {}

    def learn(self, manifests: Iterable[Manifest]) -> None:
        """Take note of the payloads in these manifests."""
        for manifest in manifests:
            for each in manifest.cargo:
                if each.payload:
                    self._payloads[each.state.task, each.attempt] = each.payload

    def completed(self, manifest: Manifest) -> Manifest:
        """Return the manifest with all payloads; raises KeyError if one was never published."""
        known = self._payloads
        cargo = tuple(
            each if each.payload else replace(each, payload=known[each.state.task, each.attempt])
            for each in manifest.cargo
        )
        return replace(manifest, cargo=cargo)

    def expect(self, tasks: Iterable[tuple[int, TaskSnapshot]]) -> None:
        """Take note of tasks that this rank will lead; each comes with its old leader.

        A payload comes once per attempt, so nothing is built twice.
        """
        for leader, cargo in tasks:
            if cargo.payload:
                self._expected[cargo.state.task] = leader, cargo

    @property
    def is_complete(self) -> bool:
        """Whether all that are expected are built."""
        return not self._expected

    def build(self, most: int) -> None:
        """Build at most this many."""
        for _ in range(min(most, len(self._expected))):
            leader, cargo = self._expected.pop(next(iter(self._expected)))
            state = cargo.state
            request = self._engine.intake.continued_request(cargo.payload, state)
            self._built[state.task] = EarlyRequest(
                leader, cargo.attempt, state.count, request, request.token_ids()
            )

    def take(self, leader: int, cargo: TaskSnapshot) -> tuple[Continuation, Tokens] | None:
        """Return the request of a task, as its old leader lists it now, and its first tokens.

        None: it was not built.
        """
        built = self._built.pop(cargo.state.task, None)
        if built is None or not _is_of(built, leader, cargo):
            return None
        built.request.catch_up(cargo.state)
        return built.request, built.tokens

    def forget(self) -> None:
        """Drop all."""
        self._payloads.clear()
        self._expected.clear()
        self._built.clear()


def without_payloads(manifest: Manifest, sent: Container[tuple[str, int]]) -> Manifest:
    """Return the manifest without the payloads of these (task, attempt): its readers have them."""
    cargo = tuple(
        replace(each, payload=b"") if (each.state.task, each.attempt) in sent else each
        for each in manifest.cargo
    )
    return replace(manifest, cargo=cargo)


def _is_of(built: EarlyRequest, leader: int, cargo: TaskSnapshot) -> bool:
    now = leader, cargo.attempt
    return now == (built.leader, built.attempt) and built.count <= cargo.state.count
