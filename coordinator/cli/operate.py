"""`aileron status`, `switch`, `put-back`, `renew`, `explain`: the admin API as text, or as JSON."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from comm_pool.layout import Mode
from coordinator.cli.admin_client import AdminClient
from coordinator.cli.errors import USAGE_STATUS, CliError
from coordinator.cli.last_run import find_admin_url
from coordinator.cli.rank_words import (
    has_host_pages,
    hold_parts,
    host_words,
    megabytes,
    pages_free,
    phase_words,
    weights_words,
)
from coordinator.cli.tables import format_table

LAST_MAX = 1_000
SWITCH_COLUMNS = (
    ("epoch", "epoch"),
    ("from", "from"),
    ("to", "to"),
    ("outcome", "outcome"),
    ("carry", "carry"),
    ("total ms", "total_ms"),
    ("park ms", "park_ms"),
    ("swap ms", "swap_ms"),
    ("first step ms", "first_step_ms"),
    ("longest gap ms", "gap_ms_max"),
    ("tasks", "tasks"),
)
"""Header -> field of a switch."""


def run_status(options: argparse.Namespace) -> int:
    """Show the state of the cell: on a terminal until Ctrl-C, else once."""
    client = AdminClient(find_admin_url(options.admin_url), options.admin_ca)
    if sys.stdout.isatty() and not (options.json or options.once):
        from coordinator.cli.watch import watch

        return watch(client)
    status = client.get("/admin/status")
    if options.json:
        return _print_json(status)
    serving = "serving" if status["serving"] else f"switching to {status['target']}"
    print(f"model    {status['model']} on {len(status['ranks'])} {status['device']} ranks")
    print(f"layout   {status['layout'] or 'none yet'}, epoch {status['epoch']}, {serving}")
    print(f"gateways {status['gateways']}   policy {status['policy']}   admin API {client.url}")
    for line in gateway_warnings(status.get("gateway_files", []), status.get("config")):
        print(f"         {line}")
    if (config := status.get("config")) is not None:
        print(f"config   {config['hash']}, read at {config['read_at']}")
        if config["refusal"]:
            print(f"         the file as it is now does not apply: {config['refusal']}")
    if status["out_of_service"]:
        print("\nout of service\n" + _out_table(status["out_of_service"]))
    print("\n" + _groups_table(status["groups"]))
    print("\n" + _ranks_table(status["ranks"]))
    print("\n" + _queue_table(status["queue"]))
    if status["batches"]:
        print("\n" + _batches_table(status["batches"]))
    if status["switches"]:
        print("\nlast switch\n" + switches_table(status["switches"]))
    return 0


def gateway_warnings(
    files: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None
) -> list[str]:
    """Return one line for each fault of the gateways' files; the coordinator's own is not one."""
    own = config["refusal"] if config else None
    lines: dict[str, None] = {}
    for each in files:
        if each["keys_refusal"]:
            lines[f"API keys: {each['keys_refusal']}"] = None
        if each["config_refusal"] and each["config_refusal"] != own:
            lines[f"the old configuration stays: {each['config_refusal']}"] = None
    return list(lines)


def run_switch(options: argparse.Namespace) -> int:
    """Change the layout and show the switch."""
    client = AdminClient(find_admin_url(options.admin_url), options.admin_ca)
    body = {"layout": options.layout}
    if options.carry is not None:
        body["carry"] = options.carry
    if not options.json:
        before = _layout_before(client)
        if before is None:
            pass
        elif before["layout"] == options.layout and before["serving"]:
            print(f"{options.layout} serves already, epoch {before['epoch']}.")
            return 0
        else:
            where = f"{client.url} from {before['layout']} to {options.layout}"
            print(f"switching {where} …", flush=True)
    answer = client.post("/admin/layout?wait=1", body)
    if options.json:
        return _print_json(answer)
    print(f"{answer['layout']} serves, epoch {answer['epoch']}.")
    if answer.get("switch"):
        print("\n" + switches_table([answer["switch"]]))
    return 0


def _layout_before(client: AdminClient) -> dict[str, Any] | None:
    """Return the layout; None if it is not to be had: the switch itself then says what it needs."""
    try:
        return client.get("/admin/layout")
    except CliError:
        return None


def run_put_back(options: argparse.Namespace) -> int:
    """Reinstate a mode that the coordinator quarantined."""
    client = AdminClient(find_admin_url(options.admin_url), options.admin_ca)
    answer = client.post("/admin/put-back", {"mode": options.mode})
    if options.json:
        return _print_json(answer)
    print(f"{options.mode} may serve again; {answer['layout']} serves, epoch {answer['epoch']}.")
    return 0


def run_reload(options: argparse.Namespace) -> int:
    """Let the coordinator read its configuration file again."""
    client = AdminClient(find_admin_url(options.admin_url), options.admin_ca)
    answer = client.post("/admin/reload", {})
    if options.json:
        return _print_json(answer)
    print(f"configuration {answer['config']['hash']} applies.")
    return 0


def run_renew(options: argparse.Namespace) -> int:
    """Restart ranks together: all of them, or those of a group while the others serve."""
    client = AdminClient(find_admin_url(options.admin_url), options.admin_ca)
    answer = client.post("/admin/renew", {"ranks": options.ranks})
    if options.json:
        return _print_json(answer)
    if options.ranks:
        names = ", ".join(map(str, sorted(options.ranks)))
        what = "Ranks" if len(options.ranks) > 1 else "Rank"
        how = "restart together" if len(options.ranks) > 1 else "restarts"
        print(f"{what} {names} {how} while the others serve.")
        return 0
    print("All ranks restart, and requests wait until they serve: see `aileron status`.")
    return 0


def run_explain(options: argparse.Namespace) -> int:
    """Show the decisions that led to the layout."""
    if not 1 <= options.last <= LAST_MAX:
        raise CliError(
            f"--last {options.last}: use a number between 1 and {LAST_MAX}.", USAGE_STATUS
        )
    client = AdminClient(find_admin_url(options.admin_url), options.admin_ca)
    answer = client.get(f"/admin/decisions?last={options.last}")
    if options.json:
        return _print_json(answer)
    layout = client.get("/admin/layout")
    print(f"layout {layout['layout']}, epoch {layout['epoch']}")
    if not answer["decisions"]:
        print("No decision yet: the policy is fixed, so only `aileron switch` changes the layout.")
    for decision in answer["decisions"]:
        print("\n" + decision_text(decision))
    if (alternation := answer.get("alternation")) is not None:
        print("\n" + alternation_text(alternation))
    for times in answer["step_times"]:
        print("\n" + step_times_text(times))
    if answer["borrowing_bytes"]:
        print("\n" + borrowing_text(answer["borrowing_bytes"]))
    return 0


def alternation_text(alternation: Mapping[str, Any]) -> str:
    """Return whether batch work alternates between layouts, and what that brought."""
    lines = [f"alternation of batch work: {alternation['reason']}"]
    seconds = alternation["seconds"]
    if alternation["requests"]:
        parts = ", ".join(f"{each:.1f} s {phase}" for phase, each in seconds.items())
        lines.append(
            f"    {alternation['cycles']} cycles served {alternation['requests']} requests in "
            f"{sum(seconds.values()):.1f} s ({parts}); one layout takes about "
            f"{alternation['single_seconds']:.1f} s for them"
        )
    return "\n".join(lines)


def borrowing_text(sizes: Mapping[str, int]) -> str:
    """Return what a rank keeps in order to borrow, which KV lacks."""
    words = {"ring": "as the ring of its loans", "whole_layers": "as other parts of whole layers"}
    named = (f"{megabytes(sizes[name])} {words[name]}" for name in words if name in sizes)
    return f"Each rank keeps {' and '.join(named)}: KV lacks this memory."


def decision_text(decision: dict[str, Any]) -> str:
    """Return one decision: choice, reason, inputs and candidates."""
    suffix = "" if decision.get("changes", True) else "  kept"
    lines = [
        f"{decision['time']}  {decision['choice']}  ({decision['carry']}){suffix}",
        f"    because: {decision['reason']}",
    ]
    lines += [f"    {tier}: {_counts(each)}" for tier, each in decision["inputs"].items()]
    rows = [_candidate_row(each) for each in decision["candidates"]]
    if rows:
        header = ("candidate", "goals met", "worth", "cost", "ttft ms / tpot ms")
        table = format_table(header, rows)
        lines += [f"    {line}" for line in table.splitlines()]
    return "\n".join(lines)


def _candidate_row(candidate: dict[str, Any]) -> tuple[object, ...]:
    if "refused" in candidate:
        return candidate["layout"], "-", "-", "-", candidate["refused"]
    times = ", ".join(
        f"{tier} {each['ttft_ms']:.0f} / {each['tpot_ms']:.1f}"
        for tier, each in candidate["tiers"].items()
    )
    met = f"{candidate['goals_met']:.0%}"
    return candidate["layout"], met, candidate["worth"], candidate["cost"], times


def step_times_text(times: dict[str, Any]) -> str:
    """Return the step times of one width, and the size from which a shift group uses sp."""
    width, curves, mixed = times["width"], times["curves"], times["mixed_from_tokens"]
    known = [
        {point["tokens"]: f"{point['ms']:.2f}" for point in points} for points in curves.values()
    ]
    # Not every mode is measured at every size.
    sizes = sorted(set().union(*known))
    # The names of mixed and pipeline groups have their widths.
    names = [f"{mode}{width} ms" if mode in set(Mode) else f"{mode} ms" for mode in curves]
    columns = [[points.get(size, "") for size in sizes] for points in known]
    lines = [
        "step times measured at start",
        format_table(["tokens", *names], list(zip(sizes, *columns, strict=True))),
        f"A group {width} wide holds KV of {times['kv_tokens']:,} tokens, in stages at least that.",
    ]
    for mode, floor_ms in times["floor_ms"].items():
        name = mode if mode in mixed else f"{mode}{width}"
        lines.append(
            f"A step in {name} takes at least {floor_ms:.1f} ms: it reads the parts of the weights "
            "that the group lacks."
        )
        if (pace_tokens := times["pace_tokens"].get(mode)) is not None:
            lines.append(
                f"Beside decodes {name} reads prompts until a step has {pace_tokens} tokens, which "
                "hide that time."
            )
    if "sp" in curves:
        lines.append(_choice(f"shift{width}", "sp", times["sp_from_tokens"]))
    for shape, start in mixed.items():
        lines.append(_choice(f"shift{shape.removeprefix('sp')}", shape, start))
    return "\n".join(lines)


def _choice(group: str, mode: str, start: int | None) -> str:
    if not start:
        return f"{group} computes all steps in tp."
    return f"{group} computes steps of at least {start} tokens in {mode}, smaller ones in tp."


def _print_json(answer: Mapping[str, Any]) -> int:
    json.dump(answer, sys.stdout, indent=2)
    print()
    return 0


def _groups_table(groups: list[dict[str, Any]]) -> str:
    return format_table(
        ("group", "mode", "running", "waiting", "paused", "pages free", "of"),
        [
            (
                _span(group["ranks"]),
                group["name"],
                group["running"],
                group["waiting"],
                group["paused"],
                group["pages_free"],
                group["pages_total"],
            )
            for group in groups
        ],
    )


def _out_table(modes: list[dict[str, Any]]) -> str:
    return format_table(
        ("mode", "ranks", "probe off by", "at most", "epoch"),
        [
            (
                each["mode"],
                _span(each["ranks"]),
                f"{each['error_nats']:.3g} nats",
                each["error_max_nats"],
                each["epoch"],
            )
            for each in modes
        ],
    )


def _ranks_table(ranks: list[dict[str, Any]]) -> str:
    parted, hosted = hold_parts(ranks), has_host_pages(ranks)
    headers = ["rank", "pid", "phase", "epoch", "heard ms ago", "lease ms", "pages free"]
    return format_table(
        [
            *(*headers, "restarts"),
            *(["weights"] if parted else []),
            *(["host pages"] if hosted else []),
        ],
        [
            (
                rank["rank"],
                rank.get("pid", "-"),
                phase_words(rank),
                rank.get("epoch", "-"),
                rank.get("heartbeat_age_ms", "-"),
                rank.get("lease_left_ms", "-"),
                pages_free(rank),
                rank.get("restarts", "-"),
                *([weights_words(rank)] if parted else []),
                *([host_words(rank)] if hosted else []),
            )
            for rank in ranks
        ],
    )


def _queue_table(queue: dict[str, Any]) -> str:
    rows = [
        (tier, each["queued"], each["tokens"], each["placed"])
        for tier, each in queue["tiers"].items()
    ]
    return (
        format_table(("tier", "queued", "tokens", "placed"), rows)
        + f"\ntasks {_counts(queue['tasks'])}"
    )


def _batches_table(batches: list[dict[str, Any]]) -> str:
    columns = ("batch", "status", "total", "completed", "failed")
    return format_table(columns, [[batch[column] for column in columns] for batch in batches])


def switches_table(switches: list[dict[str, Any]]) -> str:
    """Return a table of switches; the demo shows it too."""
    return format_table(
        [header for header, _ in SWITCH_COLUMNS],
        [[_cell_text(switch.get(field, "")) for _, field in SWITCH_COLUMNS] for switch in switches],
    )


def _cell_text(value: object) -> object:
    if isinstance(value, dict):
        return _counts({name: count for name, count in value.items() if count}) or "none"
    return f"{value:.1f}" if isinstance(value, float) else value


def _counts(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
