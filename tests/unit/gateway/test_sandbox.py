"""Calls that hang are killed, whatever they do, and nobody else waits for them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import asyncio, ctypes, json, os, sys, time
from gateway.engine import sandbox
from gateway.engine.sandbox import BusyError, ForkServer, Sandbox, TooSlowError

asked = 0

def prepare():
    def call(question):
        global asked
        asked += 1
        if question.startswith(b"hang"):
            # Native code that holds the interpreter's lock.
            ctypes.PyDLL(None).sleep(3600)
        if question == b"crash":
            os.abort()
        if question == b"slow":
            time.sleep(0.2)
        return b"%s %d %d" % (question, os.getpid(), asked)
    return call

async def main():
    box = Sandbox(nursery)
    told = {}
    first, second = (await box.ask(b"one")).split(), (await box.ask(b"two")).split()
    told["same_worker"] = first[1] == second[1]
    told["remembered"] = (await box.ask(b"one")).split() == first
    big = b"x" * 1_000_000
    told["large"] = (await box.ask(big)).split()[0] == big
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.02)
            ticks += 1
    ticking = asyncio.create_task(tick())
    began = time.monotonic()
    for name in ("hang", "crash"):
        try:
            await box.ask(name.encode())
        except TooSlowError:
            told[name] = time.monotonic() - began
    told["ticks"] = ticks
    told["after"] = (await box.ask(b"three")).split()[0].decode()
    both = await asyncio.gather(*(box.ask(b"slow %d" % n) for n in range(5)))
    told["workers"] = len({each.split()[2] for each in both})
    sandbox.WAIT_S = 0.1
    for _ in range(sandbox.WORKERS_MAX):
        await box._permits.acquire()
    try:
        await box.ask(b"four")
    except BusyError:
        told["busy"] = True
    for _ in range(sandbox.WORKERS_MAX):
        box._permits.release()
    left = [asyncio.create_task(box.ask(b"hang %d" % n)) for n in range(2)]
    await asyncio.sleep(0.05)
    for each in left:
        each.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    sandbox.WAIT_S = 60
    told["freed"] = (await box.ask(b"five")).split()[0].decode()
    ticking.cancel()
    box.close()
    try:
        os.kill(nursery.pid, 0)
    except ProcessLookupError:
        told["nursery_gone"] = True
    print(json.dumps(told))

nursery = ForkServer(prepare, float(sys.argv[1]))
asyncio.run(main())
"""
LIMIT_S = 1.0


def test_what_hangs_is_killed_and_nothing_else_notices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(LIMIT_S)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    print(told)
    assert told["same_worker"]
    assert told["remembered"]
    assert told["large"]
    assert told["hang"] >= LIMIT_S
    assert told["crash"] >= told["hang"]
    assert told["ticks"] >= 5, "the event loop goes on meanwhile"
    assert told["after"] == "three"
    assert told["workers"] <= 2
    assert told["busy"]
    assert told["freed"] == "five"
    assert told["nursery_gone"]
