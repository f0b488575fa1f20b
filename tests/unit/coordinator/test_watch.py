"""`aileron status` on a terminal: what it shows, and that it refreshes until Ctrl-C."""

import asyncio
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from coordinator.cli.watch import mode_of, render, sparkline
from tests.harness.cells.admin import switch
from tests.harness.cells.coordinator_process import TOKEN, Coordinator
from tests.harness.cells.rank_sessions import RankSessions

SHOWN_LIMIT_S = 60


def shown(answer: dict[str, Any], samples: list[dict[str, Any]], height: int = 40) -> str:
    console = Console(width=120, height=height, record=True, file=io.StringIO())
    console.print(render(answer, samples, 120, height))
    return console.export_text()


def sample(layout: str, ranks: str) -> dict[str, Any]:
    return {
        "layout": layout,
        "ranks": ranks,
        "placed": [1, 2, 0],
        "queued": [0, 0, 7],
        "oldest_s": [0.0, 0.0, 2.5],
        "pages": [25, 100],
        "tokens_per_s": 120.0,
        "ttft_ms": [[12.5, 40.0], [None, None], [None, None]],
        "tpot_ms": [[3.0, 9.0], [None, None], [None, None]],
        "slo": [0.995, None, None],
    }


def answer_of(world: int) -> dict[str, Any]:
    tier = {"queued": 0, "placed": 0}
    return {
        "model": "demo",
        "device": "cpu",
        "world": world,
        "gateways": 1,
        "policy": "fixed",
        "layout": f"dp{world}",
        "target": "tp4",
        "epoch": 3,
        "serving": False,
        "out_of_service": [],
        "groups": [
            {"ranks": [n], "mode": "dp", "width": 1, "leader": n, "running": 5, "waiting": 0}
            for n in range(world)
        ],
        "ranks": [{"rank": n, "phase": "serve", "available": n != 1} for n in range(world)],
        "queue": {"tiers": dict.fromkeys(("interactive", "standard", "batch"), tier)},
        "switches": [
            {
                "time": "2026-01-02T03:04:05.678+00:00",
                "from": "tp4",
                "to": "dp4",
                "cause": "operator",
                "outcome": "served",
                "total_ms": 41,
                "gap_ms_max": 12.5,
            }
        ],
    }


def test_it_shows_what_the_page_shows() -> None:
    text = shown(answer_of(4), [sample("tp4", "ssss"), sample("tp2+dp2", "ssxw")])
    assert "dp4 → tp4" in text
    assert "12.5 / 40.0" in text
    assert "99.5%" in text
    assert "serve, not available" in text
    assert "tt" in text, "rank 0 was in tp twice"
    assert "t✕" in text, "rank 2 was in tp and is away"
    assert "operator" in text


def test_many_ranks_are_cut_to_the_terminal() -> None:
    text = shown(answer_of(64), [sample("dp64", "s" * 64)], height=40)
    assert "48 more" in text
    assert len(text.splitlines()) <= 40


def test_it_shows_parts_of_the_weights_where_ranks_hold_them() -> None:
    answer = answer_of(2)
    assert "weights" not in shown(answer, [sample("dp2", "ss")])
    for rank in answer["ranks"]:
        rank["weights"] = {
            "part": rank["rank"],
            "parts": 2,
            "borrow": "all",
            "whole_layers": 0,
            "borrowing_bytes": {"ring": 975_000_000},
            "floor_ms": {"dp1": 67.5},
        }
    text = shown(answer, [sample("dp2", "ss")])
    assert "part 0 of 2, borrows all, ring 975 MB, steps from 67.5 ms" in text
    assert "part 1 of 2" in text


def test_modes_and_sparklines() -> None:
    assert [mode_of("tp2+dp2", rank) for rank in range(5)] == ["tp", "tp", "dp", "dp", ""]
    assert sparkline([0, 1, 2]) == " ▄█"
    assert sparkline([]) == ""
    assert sparkline([0.0]) == " "


async def test_it_refreshes_on_a_terminal_until_interrupted(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    with coordinator.running():
        async with RankSessions(f"127.0.0.1:{coordinator.grpc}", TOKEN, 2):
            await coordinator.serving()
            master, slave = pty.openpty()
            url = f"http://127.0.0.1:{coordinator.admin}"
            status = subprocess.Popen(
                [sys.executable, "-m", "coordinator.cli", "status", "--admin-url", url],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
                start_new_session=True,
            )
            os.close(slave)
            try:
                await until(master, "dp2 serves")
                await asyncio.to_thread(switch, url, "tp2", "recompute")
                await until(master, "tp2 serves")
                status.send_signal(signal.SIGINT)
                # The terminal is read on, or its end of it would be full.
                deadline = time.monotonic() + SHOWN_LIMIT_S
                while status.poll() is None and time.monotonic() < deadline:
                    await read(master)
                assert status.poll() == 0
            finally:
                status.kill()
                status.wait()
                os.close(master)


async def read(master: int) -> str:
    """Return what the terminal shows next; "" if nothing comes soon, or it was closed."""
    os.set_blocking(master, False)
    try:
        return os.read(master, 65_536).decode(errors="replace")
    except BlockingIOError:
        await asyncio.sleep(0.05)
    except OSError:
        await asyncio.sleep(0.05)
    return ""


async def until(master: int, text: str) -> None:
    said, deadline = "", time.monotonic() + SHOWN_LIMIT_S
    while text not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said):
        assert time.monotonic() < deadline, said[-4_000:]
        said += await read(master)
