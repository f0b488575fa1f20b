"""Tables and verdicts from the JSON files of a GPU benchmark."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.bench import gpu_report_modes, gpu_report_pp, gpu_report_sp
from tests.bench.gpu_numbers import Results, find, loads, ratio, sizes
from tests.bench.gpu_verdict import Verdict, at_least, at_most

SAME_SPEED_MAX = 1.02
"""aileron's time over static vLLM's in tp."""
SATURATED_MIN = 0.98
"""aileron's throughput over static vLLM's in dp."""
CUT_OVER_MS_MAX = 5.0
SWAP_MS_MAX = 0.1
KV_BYTES_LESS_MAX = 2.5e9
"""Below static vLLM's, per GPU and at the same memory share."""


def modes(results: Results) -> list[str]:
    """Such as dp4, tp4."""
    return [f"{mode}{results['ranks']}" for mode in ("dp", "tp")]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _row(label: str, digits: int, ours: float | None, theirs: float | None) -> str:
    by = ratio(ours, theirs)
    share = "–" if by is None else f"{by:.3f}"
    return f"| {label} | {_number(ours, digits)} | {_number(theirs, digits)} | {share} |"


def load_table(results: Results) -> list[str]:
    """aileron beside static vLLM, mode by mode."""
    rows = [
        "| | aileron | static vLLM | aileron / static |",
        "|---|---|---|---|",
    ]
    for mode in modes(results):
        pair = [find(results, "servers", f"{side} {mode}") or {} for side in ("aileron", "static")]
        for size in sizes(results, "ttft"):
            values = [find(one, "ttft", size, "median_ms") for one in pair]
            rows.append(_row(f"{mode}: TTFT of {int(size):,} tokens, ms", 1, *values))
        for size in sizes(results, "tpot"):
            values = [find(one, "tpot", size, "median_ms") for one in pair]
            each = " per GPU" if mode.startswith("dp") and size != "1" else ""
            rows.append(_row(f"{mode}: TPOT, {size} streams{each}, ms", 2, *values))
        for size in loads(results):
            values = [find(one, "saturated", size, "tokens_per_s") for one in pair]
            load = "saturated" if size == "all" else f"{size} per GPU"
            rows.append(_row(f"{mode}: {load}, output tokens/s", 0, *values))
        values = [one.get("kv_bytes_per_gpu") for one in pair]
        in_gb = [None if value is None else value / 1e9 for value in values]
        rows.append(_row(f"{mode}: KV per GPU, GB", 2, *in_gb))
        rows.append(_row(f"{mode}: KV per engine, tokens", 0, *(o.get("kv_tokens") for o in pair)))
    return rows


def default_table(results: Results) -> list[str]:
    """The wide static engine with vLLM's own compilation settings, if it was measured."""
    mode = modes(results)[1]
    server = find(results, "servers", f"static-default {mode}")
    if not server:
        return []
    parts = [f"TTFT {k}: {v['median_ms']:.1f} ms" for k, v in server.get("ttft", {}).items()]
    parts += [f"TPOT {k}: {v['median_ms']:.2f} ms" for k, v in server.get("tpot", {}).items()]
    saturated = find(server, "saturated", "all", "tokens_per_s")
    parts += [f"saturated: {_number(saturated, 0)} tokens/s"]
    what = f"Static vLLM {mode} with its default compilation ({server.get('compilation')})"
    return ["", f"{what}: {'; '.join(parts)}."]


def mode_lines(results: Results) -> list[str]:
    """All modes in one table, where more than dp and tp were measured."""
    if not gpu_report_modes.is_measured(results, "sp", "shift", "pp"):
        return []
    return gpu_report_modes.table(results) + gpu_report_sp.communication_lines(results)


def step_table(results: Results) -> list[str]:
    """The steps that aileron's ranks timed at start-up, by mode; empty where it did not start."""
    timed = find(results, "aileron", "step_times") or []
    columns = {
        mode if mode[-1].isdigit() else f"{mode}{widths['width']}": {
            point["tokens"]: point["ms"] for point in points
        }
        for widths in timed
        for mode, points in widths["curves"].items()
    }
    if not columns:
        return []
    rows = [
        f"| {tokens:,} | "
        + " | ".join(_number(each.get(tokens), 2) for each in columns.values())
        + " |"
        for tokens in sorted(set().union(*columns.values()))
    ]
    head = "| tokens of a step | " + " | ".join(f"{name}, ms" for name in columns) + " |"
    lines = ["", "### Steps timed at start-up", "", head, "|---" * (len(columns) + 1) + "|", *rows]
    for widths in timed:
        for mode, floor_ms in widths.get("floor_ms", {}).items():
            pace = widths.get("pace_tokens", {}).get(mode)
            lines += [
                "",
                f"Loans of {mode}{widths['width']}: {floor_ms:.1f} ms; pace: {pace} tokens.",
            ]
    return lines


def verdicts(results: Results) -> list[Verdict]:
    """Every target of the project that this benchmark can judge."""
    dp, tp = modes(results)
    judged = []
    for kind, what in (("ttft", "TTFT"), ("tpot", "TPOT")):
        for size in sizes(results, kind):
            path = (kind, size, "median_ms")
            by = ratio(
                find(results, "servers", f"aileron {tp}", *path),
                find(results, "servers", f"static {tp}", *path),
            )
            judged.append(at_most(f"{tp} {what} {size}: at most 1.02 x static", by, 1.02, ".3f"))
    path = ("saturated", "all", "tokens_per_s")
    by = ratio(
        find(results, "servers", f"aileron {dp}", *path),
        find(results, "servers", f"static {dp}", *path),
    )
    target = f"{dp} saturated: at least {SATURATED_MIN} x static"
    judged.append(at_least(target, by, SATURATED_MIN))
    times = find(results, "aileron", "switches", "pause", "phases") or {}
    cut_over = find(times, "cut_over_ms", "p99")
    judged.append(at_most("cut-over p99: at most 5 ms", cut_over, CUT_OVER_MS_MAX, ".2f"))
    swap = find(times, "swap_ms", "max")
    judged.append(at_most("swap, slowest: below 0.1 ms", swap, SWAP_MS_MAX, ".3f"))
    ours = find(results, "servers", f"aileron {dp}", "kv_bytes_per_gpu")
    theirs = find(results, "servers", f"static {dp}", "kv_bytes_per_gpu")
    less = None if ours is None or theirs is None else (theirs - ours) / 1e9
    target = f"{dp} KV: at most 2.5 GB per GPU below static"
    judged.append(at_most(target, less, KV_BYTES_LESS_MAX / 1e9, ".2f"))
    return judged


def all_verdicts(results: Results) -> list[Verdict]:
    """Of the modes that were measured."""
    judged: list[Verdict] = []
    if gpu_report_modes.is_measured(results, "sp", "shift"):
        judged += gpu_report_sp.verdicts(results)
    if gpu_report_modes.is_measured(results, "pp"):
        judged += gpu_report_pp.verdicts(results)
    usual = verdicts(results)
    return judged + [one for one in usual if one.met is not None] if judged else usual


def verdict_table(results: Results) -> list[str]:
    """Targets."""
    rows = [f"| {v.target} | {v.measured} | {v.word} |" for v in all_verdicts(results)]
    return ["| target | measured | |", "|---|---|---|", *rows]


def switch_tables(results: Results) -> list[str]:
    """Phases of switches by carry plan, and what clients saw."""
    lines: list[str] = []
    for carry, run in (find(results, "aileron", "switches") or {}).items():
        lines += [
            "",
            f"### Switches, `{carry}`: {run['switches']} with {run['streams']} streams"
            + (" in each layout" if carry == "pause" else ""),
        ]
        if run["stopped"]:
            lines += ["", f"Stopped: {run['stopped']}"]
        rows = [
            (name, numbers)
            for name, numbers in (
                *run["phases"].items(),
                ("client: last old to first new token", run.get("client_cut_over_ms")),
                ("client: gap of each stream", run.get("client_stall_ms")),
                ("client: longest gap of a switch", run.get("client_stall_worst_ms")),
                ("client: tokens between switches", run.get("token_interval_ms")),
            )
            if numbers
        ]
        if rows:
            lines += ["", "| ms | count | p50 | p99 | max |", "|---|---|---|---|---|"]
            lines += [
                f"| {name} | {n['count']} | {n['p50']:.3f} | {n['p99']:.3f} | {n['max']:.3f} |"
                for name, n in rows
            ]
        lines += ["", f"Carried over all switches: {run['totals'] or 'nothing'}."]
        memory = run["gpu_memory_mib"]
        grown = [now - then for then, now in zip(memory["before"], memory["after"], strict=False)]
        lines += [f"GPU memory before: {memory['before']} MiB; change over the switches: {grown}."]
    return lines


def idle_table(results: Results) -> list[str]:
    """Busy and idle time of GPUs between decode steps, if recorded."""
    rows = [
        f"| {name} | {kind} | {n['steps']} | {n['busy_ms']:.3f} | {n['gap_ms']:.3f} "
        f"| {n['idle_share']:.2%} |"
        for name, server in sorted(results["servers"].items())
        for kind, n in server.get("idle", {}).items()
    ]
    if not rows:
        return []
    return [
        "",
        "### GPU time between decode steps",
        "",
        "From one step's sampling to the next one's forward pass, input preparation included.",
        "",
        "| server | | steps | busy, ms | gap, ms | share of gaps |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def memory_lines(results: Results) -> list[str]:
    """What aileron's rank 0 says that it holds."""
    memory = (find(results, "aileron", "memory") or [{}])[0]
    if not memory:
        return []
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items())
    return ["", f"Memory of aileron's rank 0 in GB: {parts}."]


def stage_lines(results: Results) -> list[str]:
    """What is in use of rank 0's GPU after each stage of its start; not every file tells."""
    stages = [
        stage
        for stage in find(results, "aileron", "device_memory") or []
        if stage["rank"] == 0 and "reserved" in stage
    ]
    if not stages:
        return []
    return [
        "",
        "| GB after a stage | taken by it | torch's tensors | torch's free parts | not torch's |",
        "|---|---|---|---|---|",
        *(
            f"| {stage['stage']} | {stage['taken'] / 1e9:.2f} | {stage['allocated'] / 1e9:.2f} | "
            f"{(stage['reserved'] - stage['allocated']) / 1e9:.2f} | {stage['outside'] / 1e9:.2f} |"
            for stage in stages
        ),
    ]


def start_lines(results: Results) -> list[str]:
    """How long servers took to start; not compared, as their imports are timed differently."""
    starts = [
        f"{name} {server['start_s']:.0f} s"
        for name, server in sorted(results["servers"].items())
        if "start_s" in server
    ]
    what = "Start (aileron with imports, static engines after theirs)"
    return ["", f"{what}: {', '.join(starts)}."] if starts else []


def document(results: Results) -> list[str]:
    """The whole report in Markdown."""
    versions = ", ".join(f"{k} {v}" for k, v in results.get("versions", {}).items())
    compared = (
        "aileron and static vLLM ran one after the other on the same GPUs with the same options: "
        f"`{json.dumps(results['engine'])}`. Clients spoke to the engines below HTTP in both."
    )
    lines = [
        f"# aileron's modes against static vLLM, {results['shape']} shape, {results['date']}",
        "",
        f"Command: `{results['command']}`, commit {results['commit']}, {results['hardware']}; "
        f"{versions}.",
        compared,
        "",
        *verdict_table(results),
        "",
        *load_table(results),
        *default_table(results),
        *mode_lines(results),
        *step_table(results),
        *memory_lines(results),
        *stage_lines(results),
        *start_lines(results),
        *switch_tables(results),
        *idle_table(results),
    ]
    if results.get("errors"):
        lines += ["", "### Failed or not measured", ""]
        lines += [f"- {name}: {brief(text)}" for name, text in results["errors"].items()]
    return lines


def brief(text: str) -> str:
    """A text's first line, and its last one if there are more."""
    first, *more = text.splitlines() or [""]
    return f"{first} … {more[-1]}" if more else first


def joined(files: Iterable[Results]) -> Results:
    """Runs of parts of one shape as one: servers and switches of later ones are added."""
    first, *others = files
    for other in others:
        if (other["shape"], other["ranks"]) != (first["shape"], first["ranks"]):
            raise ValueError("only runs of one shape and number of ranks can be joined")
        for key in ("servers", "errors", "seconds"):
            first[key] |= other[key]
        switches = {
            **(first["aileron"].get("switches") or {}),
            **(other["aileron"].get("switches") or {}),
        }
        first["aileron"] |= other["aileron"]
        if switches:
            first["aileron"]["switches"] = switches
        if other["commit"] not in first["commit"]:
            first["commit"] += f" and {other['commit']}"
    return first


def write_report(files: Sequence[Path], target: Path | None = None) -> str:
    """Write table and picture beside the (first) JSON file; returns the table."""
    results = joined([json.loads(file.read_text()) for file in files])
    target = target or files[0]
    if "servers" not in results:
        raise ValueError(f"{files[0]} is no result of this benchmark")
    text = "\n".join(document(results)) + "\n"
    target.with_suffix(".md").write_text(text)
    try:
        from tests.bench.gpu_plot import draw
    except ImportError:
        print(f"no picture: matplotlib is missing; later: --report {target}", flush=True)
    else:
        target.with_suffix(".svg").write_bytes(draw(results))
    return text
