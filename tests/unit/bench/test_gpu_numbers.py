"""Percentiles, steady steps and gaps over switches, from made-up arrivals."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu_idle import Clock, StepRecorder, plugin_folder, recorded, switch_off, switch_on
from tests.bench.gpu_numbers import (
    Batch,
    cut_over_gaps,
    idle_steps,
    memory_stages,
    merge_saturated,
    merge_steady,
    phases,
    spread,
    steady_steps,
    stream_gaps,
    totals,
)
from tests.bench.gpu_shapes import SHAPES, as_arguments, kv_bytes_per_token, plan_for, write_shape


def batches(source: int, streams: list[int], step_s: float, epoch: int = 0) -> list[Batch]:
    return [Batch(i * step_s, source, epoch, count) for i, count in enumerate(streams)]


def test_spread_of_nothing_is_empty() -> None:
    assert spread([]) == {}


def test_spread_interpolates() -> None:
    assert spread(range(101)) == {"count": 101, "p50": 50, "p99": 99, "max": 100}


def test_only_steps_between_full_batches_are_steady() -> None:
    arrivals = [
        Batch(0.0, 0, 0, 3),  # Prompts are still read.
        Batch(1.0, 0, 0, 4),
        Batch(1.010, 0, 0, 4),
        Batch(1.022, 0, 0, 4),
        Batch(5.0, 0, 0, 1),  # The others have ended.
    ]
    (only,) = steady_steps(arrivals).values()
    assert only["streams"] == 4
    assert only["steps"] == 2
    assert only["median_ms"] == pytest.approx(11)


def test_a_client_that_was_held_up_does_not_make_steps_look_short() -> None:
    times = [0.040 * (i // 4 + 1) + 1e-6 * (i % 4) for i in range(64)]  # Four steps at a time.
    (only,) = steady_steps([Batch(time_s, 0, 0, 4) for time_s in times]).values()
    assert only["median_ms"] == pytest.approx(10, rel=0.01)


def test_sources_are_kept_apart() -> None:
    mixed = batches(0, [2] * 5, 0.010) + batches(1, [2] * 5, 0.020)
    steady = steady_steps(sorted(mixed, key=lambda batch: batch.time_s))
    assert [one["median_ms"] for one in steady.values()] == pytest.approx([10, 20])
    merged = merge_steady(list(steady.values()))
    assert merged["median_ms"] == pytest.approx(15)
    assert merged["streams"] == [2, 2]


def test_no_steady_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no steady"):
        merge_steady([])


def test_saturated_counts_the_whole_wall_time() -> None:
    merged = merge_saturated(
        [
            {"requests": 1, "tokens": 100, "started_s": 1.0, "ended_s": 3.0},
            {"requests": 2, "tokens": 300, "started_s": 1.5, "ended_s": 5.0},
        ]
    )
    assert merged == {"requests": 3, "tokens": 400, "wall_s": 4.0, "tokens_per_s": 100.0}


def test_cut_over_ends_with_the_slowest_leader() -> None:
    arrivals = [
        Batch(1.000, 0, 4, 8),
        Batch(1.010, 0, 5, 4),
        Batch(1.013, 1, 5, 4),
        Batch(1.030, 1, 5, 4),
        Batch(1.035, 0, 6, 8),
    ]
    gaps = cut_over_gaps(arrivals)
    assert gaps == {5: pytest.approx(13), 6: pytest.approx(5)}


def test_gaps_of_streams_are_split_at_switches() -> None:
    streams = [
        ([0.0, 0.010, 0.050, 0.060], [1, 1, 2, 2]),
        ([0.0, 0.020], [1, 3]),
    ]
    crossing, within = stream_gaps(streams)
    assert crossing == {2: [pytest.approx(40)], 3: [pytest.approx(20)]}
    assert within == pytest.approx([10, 10])


def test_unknown_times_do_not_count() -> None:
    records: list[dict[str, Any]] = [
        {"epoch": 1, "swap_ms": 0.0, "cut_over_ms": None, "outcome": "served"},
        {"epoch": 2, "swap_ms": 0.1, "cut_over_ms": 3.0, "outcome": "served"},
        {"epoch": 3, "swap_ms": 0.1, "cut_over_ms": 0.0, "gap_ms_max": 0.0, "outcome": "served"},
    ]
    found = phases(records)
    assert set(found) == {"swap_ms", "cut_over_ms"}
    assert found["swap_ms"]["count"] == 3
    assert (found["cut_over_ms"]["count"], found["cut_over_ms"]["max"]) == (2, 3.0)


def test_totals_sum_what_records_count() -> None:
    record = {"tasks": {"pause": 2, "drain": 0}, "reshard_bytes": 7, "recomputed_tokens": 5}
    assert totals([record, record]) == {
        "recomputed_tokens": 10,
        "reshard_bytes": 14,
        "tasks_pause": 4,
    }


def step(requests: int, tokens: int, gap_ms: float) -> dict[str, float]:
    return {"width": 2, "requests": requests, "tokens": tokens, "busy_ms": 4.0, "gap_ms": gap_ms}


def test_idle_share_looks_at_repeated_decode_steps() -> None:
    steps = [step(2, 900, -1.0), step(2, 2, 9.0), step(2, 2, 1.0), step(2, 2, 1.0), step(1, 1, 9.0)]
    (kind,) = idle_steps(steps).items()
    assert kind[0] == "tp2, 2 streams"
    assert kind[1]["steps"] == 2
    assert kind[1]["gap_ms"] == 1.0
    assert kind[1]["idle_share"] == pytest.approx(0.2)


class HandClock(Clock):
    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now


def test_recorder_notes_steps_while_it_is_on(tmp_path: Path) -> None:
    clock = HandClock()
    recorder = StepRecorder(tmp_path, clock)

    def run(steps: int) -> None:
        for _ in range(steps):
            recorder.begin(1, [1, 1])
            clock.now += 0.001
            recorder.launch()
            clock.now += 0.004
            recorder.end()

    run(3)
    switch_on(tmp_path)
    run(20)
    switch_off(tmp_path)
    run(1)
    lines = list(recorded(tmp_path))
    assert len(lines) == 21, "20 steps and what parts processes"
    (result,) = idle_steps(lines).values()
    assert result["busy_ms"] == pytest.approx(4)
    assert result["gap_ms"] == pytest.approx(1)
    assert result["idle_share"] == pytest.approx(0.2)


def test_plugin_can_be_found(tmp_path: Path) -> None:
    from importlib.metadata import distributions

    (found,) = distributions(path=[str(plugin_folder(tmp_path))])
    (entry,) = found.entry_points
    assert entry.group == "vllm.general_plugins"
    assert callable(entry.load())


def test_shapes_are_whole(tmp_path: Path) -> None:
    for name in SHAPES:
        folder = write_shape(name, tmp_path)
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        assert layers >= (24 if name.endswith(("-short", "oss-20b")) else 32)
        assert plan_for(name, quick=True).switches < plan_for(name, quick=False).switches
    model = write_shape("llama-3-8b", tmp_path)
    assert kv_bytes_per_token(model) == 2 * kv_bytes_per_token(model, "fp8") == 131072


def test_options_as_arguments() -> None:
    options = {"max_num_seqs": 4, "enable_prefix_caching": False, "enforce_eager": True, "c": {}}
    assert as_arguments(options) == [
        *("--max-num-seqs", "4", "--no-enable-prefix-caching", "--enforce-eager", "--c", "{}"),
    ]


def test_memory_of_stages_is_read_from_the_ranks_log() -> None:
    told = {"rank": 1, "stage": "weights", "taken": 5, "used": 7}
    told |= {"allocated": 4, "reserved": 5, "outside": 2}
    line = json.dumps({"event": "device_memory", "level": "info", **told})
    log = f"vLLM says: no JSON\n{json.dumps({'event': 'memory_reserved'})}\n{line}\n"
    assert memory_stages(log) == [told]
    assert memory_stages("") == []
