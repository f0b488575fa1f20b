"""What operators see of the part of the weights that a rank holds, and of its loans."""

from typing import Any

from msgspec.structs import replace

from comm_pool.layout import Rank
from coordinator.cli import operate
from coordinator.cli.rank_words import weights_words
from coordinator.model.events import RankOpened, RankReported
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.telemetry import exposition
from tests.transcripts.cell import Cell

FLOORS = (
    WidthTimes(1, (("dp", ((1, 68_000),)),), floor_us=(("dp", 67_500),)),
    WidthTimes(4, (("tp", ((1, 8_000),)),), 64, floor_us=(("sp", 70_000), ("sp2tp2", 35_000))),
)


MEMORY = (("ring", 975_000_000), ("whole_layers", 1_180_000))


def views(*, parts: bool) -> list[dict[str, Any]]:
    """Of two ranks; the first has reported its loans."""
    cell = Cell("dp2")
    for rank in map(Rank, range(2)):
        hello = cell.ranks[rank].hello()
        if parts:
            hello = replace(
                hello, part=rank, parts=2, borrow="ffn", whole_layers=3, step_times=FLOORS
            )
            hello = replace(hello, memory=(*hello.memory, *MEMORY))
        cell.event(RankOpened(hello))
    report = cell.ranks[Rank(0)].report(0)
    loans = (("borrowed_bytes", 5 << 30), ("loan_wait_us", 1_500)) if parts else ()
    cell.event(RankReported(Rank(0), replace(report, gauges=loans)))
    view: Any = cell.core.views.ranks(cell.now_ms)
    ranks: list[dict[str, Any]] = view["ranks"]
    return ranks


def test_the_ranks_view_names_part_loans_and_floors() -> None:
    first, second = views(parts=True)
    assert first["weights"] == {
        "part": 0,
        "parts": 2,
        "borrow": "ffn",
        "whole_layers": 3,
        "borrowing_bytes": dict(MEMORY),
        "floor_ms": {"dp1": 67.5, "sp4": 70.0, "sp2tp2": 35.0},
    }
    assert second["weights"]["part"] == 1
    assert views(parts=False)[0]["weights"] == {
        "part": 0,
        "parts": 1,
        "borrow": "none",
        "whole_layers": 0,
        "borrowing_bytes": {},
        "floor_ms": {},
    }


def test_status_has_a_column_only_where_ranks_hold_parts() -> None:
    shown = operate._ranks_table(views(parts=True))
    words = "part 1 of 2, borrows ffn, ring 975 MB, 3 layers whole (1.18 MB), steps from 70.0 ms"
    assert words in shown
    assert "weights" in shown.splitlines()[0]
    assert "weights" not in operate._ranks_table(views(parts=False))


def test_the_words_for_what_a_rank_holds() -> None:
    assert weights_words({}) == "-"
    assert weights_words(views(parts=False)[0]) == "all"
    alone = {
        "part": 1,
        "parts": 4,
        "borrow": "none",
        "whole_layers": 0,
        "borrowing_bytes": {},
        "floor_ms": {},
    }
    assert weights_words({"weights": alone}) == "part 1 of 4"


def test_explain_says_what_borrowing_keeps_from_kv() -> None:
    assert operate.borrowing_text(dict(MEMORY)) == (
        "Each rank keeps 975 MB as the ring of its loans and 1.18 MB as other parts of whole "
        "layers: KV lacks this memory."
    )
    assert operate.borrowing_text({"ring": 12_345_678}) == (
        "Each rank keeps 12 MB as the ring of its loans: KV lacks this memory."
    )


def test_metrics_of_loans_exist_for_every_rank() -> None:
    def samples(*, parts: bool) -> dict[str, list[float]]:
        families = exposition.rank_metrics(views(parts=parts))
        return {each.name: [sample.value for sample in each.samples] for each in families}

    found, plain = samples(parts=True), samples(parts=False)
    for name, values in {
        "aileron_borrowed_bytes": [float(5 << 30), 0.0],
        "aileron_loan_wait_seconds": [0.0015, 0.0],
        "aileron_step_floor_seconds": [0.07, 0.07],
        "aileron_whole_layers": [3.0, 3.0],
    }.items():
        assert found[name] == values
        assert plain[name] == [0.0, 0.0]


HOST = (
    ("host_pages", 818),
    ("host_pages_used", 139),
    ("host_hits", 4096),
    ("host_loaded_bytes", 7),
    ("host_stored_bytes", 8),
    ("host_full_blocks", 9),
    ("computed_tokens", 10),
)


def host_views(gauges: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
    cell = Cell("dp2")
    for rank in map(Rank, range(2)):
        cell.event(RankOpened(cell.ranks[rank].hello()))
    report = cell.ranks[Rank(0)].report(0)
    cell.event(RankReported(Rank(0), replace(report, gauges=gauges)))
    view: Any = cell.core.views.ranks(cell.now_ms)
    ranks: list[dict[str, Any]] = view["ranks"]
    return ranks


def test_host_pages_are_shown_where_a_cell_has_some() -> None:
    shown = operate._ranks_table(host_views(HOST)).splitlines()
    assert "host pages" in shown[0]
    assert any("139 of 818, 4,096 tokens read" in line for line in shown)
    assert "host pages" not in operate._ranks_table(host_views((("rss_bytes", 1),)))
    families = exposition.rank_metrics(host_views(HOST))
    found = {each.name: [sample.value for sample in each.samples] for each in families}
    for name, value in HOST:
        assert found[f"aileron_{name}"] == [value]
    plain = exposition.rank_metrics(host_views((("rss_bytes", 1),)))
    assert {each.name: [s.value for s in each.samples] for each in plain}[
        "aileron_host_pages_used"
    ] == [0.0]
