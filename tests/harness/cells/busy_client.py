"""Clients that keep a gateway busy in every way that is measured, until they are stopped."""

import contextlib
import itertools
import threading
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any, Self

import msgspec

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TIERS = ("interactive", "standard", "batch")
LIMIT_S = 60


def post(
    url: str, body: dict[str, Any], *, lines_max: int | None = None, **headers: str
) -> tuple[int, bytes]:
    """POST; returns the status and what was read, which is cut off after `lines_max` lines."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        url, msgspec.json.encode(body), {"Content-Type": "application/json", **named}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            if lines_max is None:
                return answer.status, answer.read()
            return answer.status, b"".join(itertools.islice(answer, lines_max))
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class BusyClients:
    """Streams, whole answers, refused requests and clients that leave, in every tier, in turns."""

    def __init__(self, url: str, model: str, threads: int = 3) -> None:
        self._url = url
        self._model = model
        self._stopping = threading.Event()
        self.rounds = 0
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        __: BaseException | None,
        ___: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * LIMIT_S)

    def _run(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._stopping.wait(0.02):
                return
            with contextlib.suppress(OSError):
                self.one(turn)
            self.rounds += 1

    def one(self, turn: int) -> None:
        """Send the request of a turn; twelve turns are all there is."""
        tier = TIERS[turn % 3]
        prompt = {"prompt": "One prefix that many prompts share, so that it is cached.", "seed": 1}
        chat = {"messages": [{"role": "user", "content": f"What is {turn}?"}]}
        long = {"model": self._model, "max_tokens": 48, "ignore_eos": True}
        match turn // 3 % 4:
            case 0:
                post(self._url + CHAT, {**chat, **long, "stream": True}, X_Priority_Tier=tier)
            case 1:
                post(self._url + TEXT, {**prompt, **long}, X_Priority_Tier=tier)
            case 2:
                post(self._url + TEXT, {**prompt, "model": f"../\x00{turn}"}, X_Priority_Tier=tier)
            case _:
                # So long that it is under way when its client leaves, however fast the machine.
                left = {**prompt, **long, "stream": True, "max_tokens": 1_000}
                post(self._url + TEXT, left, lines_max=3, X_Priority_Tier=tier)
