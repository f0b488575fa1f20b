"""A client that floods a gateway in a process of its own, until its standard input is closed.

Prints a line once it floods, and at the end how its requests ended, by OpenAI's error code.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from types import TracebackType
from typing import Self

import openai

REFUSED_WAIT_S = 0.3
"""How long each of its clients waits behind a refusal; less than any that obeys `Retry-After`."""
LIMIT_S = 60.0


class Flood:
    """So many requests at once with one key, from another process."""

    def __init__(self, url: str, key: str, clients: int) -> None:
        self._words = (url, key, str(clients))
        self.ended: Counter[str] = Counter()
        """How requests ended, known behind the flood."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.cells.flood_client", *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "flooding\n"
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        __: BaseException | None,
        ___: TracebackType | None,
    ) -> None:
        told, _told = self._process.communicate(timeout=LIMIT_S)
        self.ended = Counter(json.loads(told))


async def client(made: openai.AsyncOpenAI, ended: Counter[str]) -> None:
    while True:
        try:
            await made.completions.create(model="demo", prompt="flood", max_tokens=8)
            ended["answered"] += 1
        except openai.APIStatusError as error:
            ended[str(error.code)] += 1
            await asyncio.sleep(REFUSED_WAIT_S)


async def flood(url: str, key: str, clients: int) -> None:
    ended: Counter[str] = Counter()
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=LIMIT_S
    ) as made:
        work = [asyncio.create_task(client(made, ended)) for _ in range(clients)]
        while not ended["tier_capacity"] + ended["queue_full"]:
            await asyncio.sleep(0.05)
        print("flooding", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    print(json.dumps(ended))


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], sys.argv[2], int(sys.argv[3])))
