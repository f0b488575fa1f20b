"""`aileron status` on a terminal: the live page as text that refreshes.

It polls the admin API once per second and redraws in place until Ctrl-C. `render` gets the
answers and the terminal's size as arguments, so tests need no terminal.
"""

import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.cli.admin_client import AdminClient
from coordinator.cli.errors import CliError
from coordinator.cli.rank_words import hold_parts, pages_free, phase_words, weights_words

POLL_S = 1.0
SAMPLES_MAX = 900
SWITCHES_MAX = 5
ROWS_BESIDE_RANKS = 24
"""Lines of the display apart from the ranks."""
MODE_STYLES = {"dp": "blue", "tp": "yellow", "sp": "green", "shift": "magenta"}
MODE_LETTERS = {"dp": "d", "tp": "t", "sp": "s", "shift": "h"}
BARS = " ▁▂▃▄▅▆▇█"
TIERS = ("interactive", "standard", "batch")


def watch(client: AdminClient) -> int:
    """Show the cell until Ctrl-C; wait while the admin API is unreachable."""
    samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_MAX)
    answer = _ask(client, samples)
    console = Console()
    # Set explicitly: a process started in the background may have SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        problem = ""
        try:
            while True:
                view = render(answer, samples, console.width, console.height)
                note = Text(
                    problem or f"{client.url}; press Ctrl-C to quit.",
                    style="red" if problem else "dim",
                )
                live.update(Group(view, note), refresh=True)
                time.sleep(POLL_S)
                try:
                    answer, problem = _ask(client, samples), ""
                except CliError as error:
                    problem = str(error)
        except KeyboardInterrupt:
            return 0
        finally:
            signal.signal(signal.SIGINT, before)


def _ask(client: AdminClient, samples: deque[dict[str, Any]]) -> dict[str, Any]:
    after = samples[-1]["n"] if samples else 0
    answer = client.get(f"/admin/live?after={after}")
    new = answer["samples"]
    if new and new[0]["n"] <= after:
        samples.clear()  # Another coordinator counts from the start.
    samples.extend(new)
    return answer


def render(
    answer: dict[str, Any], samples: Sequence[dict[str, Any]], width: int, height: int
) -> RenderableType:
    """Return the display for a terminal of `width` columns and `height` rows."""
    parts: list[RenderableType] = [_head(answer)]
    if samples:
        parts += [_curves(samples, width), _tiers(answer, samples[-1])]
    parts += [_ranks(answer, samples, width, max(4, height - ROWS_BESIDE_RANKS))]
    if answer["switches"]:
        parts.append(_switches(answer["switches"][-SWITCHES_MAX:]))
    return Group(*parts)


def _head(answer: dict[str, Any]) -> Text:
    text = Text()
    text.append("aileron", style="bold")
    text.append(f"  {answer['model']} on {answer['world']} {answer['device']} ranks  ")
    if answer["serving"]:
        text.append(f"{answer['layout']} serves", style="bold green")
    else:
        text.append(f"{answer['layout'] or 'starting'} → {answer['target']}", style="bold yellow")
    text.append(f"  epoch {answer['epoch']}  gateways {answer['gateways']}")
    text.append(f"  policy {answer['policy']}\n")
    if answer["out_of_service"]:
        modes = sorted({each["mode"] for each in answer["out_of_service"]})
        text.append(f"out of service after drift: {', '.join(modes)}\n", style="bold red")
    return text


def _curves(samples: Sequence[dict[str, Any]], width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    columns = max(10, width - 34)
    pages = [_share(*each["pages"]) for each in samples]
    for name, values, unit in (
        ("tokens per second", [each["tokens_per_s"] for each in samples], ""),
        ("tasks in groups", [sum(each["placed"]) for each in samples], ""),
        ("tasks waiting", [sum(each["queued"]) for each in samples], ""),
        ("KV pages in use", pages, " %"),
    ):
        row = values[-columns:]
        table.add_row(name, f"{values[-1]:,.0f}{unit}".rjust(9), Text(sparkline(row), style="cyan"))
    return table


def _tiers(answer: dict[str, Any], now: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", header_style="dim")
    table.add_column("tier")
    for name in ("placed", "waiting", "oldest s", "first token ms p50/p99", "per token ms p50/p99"):
        table.add_column(name, justify="right")
    table.add_column("objective kept", justify="right")
    for at, tier in enumerate(TIERS):
        share = now["slo"][at]
        table.add_row(
            tier,
            str(answer["queue"]["tiers"][tier]["placed"]),
            str(answer["queue"]["tiers"][tier]["queued"]),
            f"{now['oldest_s'][at]:.1f}",
            _pair(now["ttft_ms"][at]),
            _pair(now["tpot_ms"][at]),
            "-" if share is None else f"{share:.1%}",
        )
    return table


def _ranks(
    answer: dict[str, Any], samples: Sequence[dict[str, Any]], width: int, rows: int
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "group", "state", "run", "wait", "pages free", "heard ms"):
        table.add_column(name, justify="left" if name in ("group", "state") else "right")
    parted = hold_parts(answer["ranks"])
    words = [weights_words(rank) for rank in answer["ranks"]] if parted else []
    if parted:
        table.add_column("weights", no_wrap=True)
        width -= 2 + max(map(len, words))
    table.add_column("last seconds by mode")
    groups = {rank: group for group in answer["groups"] for rank in group["ranks"]}
    strip = max(8, width - 68)
    for rank in answer["ranks"][:rows]:
        number = rank["rank"]
        group = groups.get(number)
        leads = group is not None and group["leader"] == number
        table.add_row(
            str(number),
            f"{group['mode']}{group['width']}" if group else "none",
            phase_words(rank),
            str(group["running"]) if group and leads else "",
            str(group["waiting"]) if group and leads else "",
            str(pages_free(rank)),
            str(rank.get("heartbeat_age_ms", "")),
            *words[number : number + 1],
            _lane(number, list(samples)[-strip:]),
        )
    if len(answer["ranks"]) > rows:
        more = len(answer["ranks"]) - rows
        table.add_row("…", f"{more} more", "see the page at /", *[""] * (len(table.columns) - 3))
    return table


def _lane(rank: int, samples: Iterable[dict[str, Any]]) -> Text:
    lane = Text()
    for each in samples:
        letter = each["ranks"][rank]
        if letter == "s":
            mode = mode_of(each["layout"], rank)
            lane.append(MODE_LETTERS.get(mode, "?"), style=MODE_STYLES.get(mode, "white"))
        else:
            lane.append({"x": "✕", "-": "·"}.get(letter, "~"), style="red" if letter == "x" else "")
    return lane


def mode_of(layout: str, rank: int) -> str:
    """Return the mode of a rank in a layout's notation, such as `tp2+dp2`."""
    first = 0
    for part in layout.split("+"):
        mode = part.rstrip("0123456789")
        first += int(part[len(mode) :] or 0)
        if rank < first:
            return mode
    return ""


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value, scaled to the largest value."""
    most = max(values, default=0) or 1
    return "".join(BARS[round((len(BARS) - 1) * max(0, value) / most)] for value in values)


def _switches(switches: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("switch", "from", "to", "because", "outcome"):
        table.add_column(name)
    for name in ("total ms", "longest gap ms"):
        table.add_column(name, justify="right")
    for each in reversed(switches):
        table.add_row(
            datetime.fromisoformat(each["time"]).astimezone().strftime("%H:%M:%S"),
            *(str(each[name]) for name in ("from", "to", "cause", "outcome")),
            f"{each['total_ms']:,.0f}",
            f"{each['gap_ms_max']:,.1f}",
        )
    return table


def _share(used: int, total: int) -> float:
    return 100 * used / total if total else 0.0


def _pair(values: Sequence[float | None]) -> str:
    return " / ".join("-" if each is None else f"{each:,.1f}" for each in values)
