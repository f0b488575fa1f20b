"""Metrics, queries of dashboards and rules, and the live page over the whole product under load.

With a real Prometheus and a real Chromium where there are any. `AILERON_KEEP_SCREENSHOT=1` (`make
screenshot`) takes docs/live-page.png anew; otherwise nothing outside temporary folders is written.
Without `prometheus` on PATH the queries are parsed and their names looked up in a live exposition;
what was not run then is named as skipped.
"""

import asyncio
import io
import itertools
import math
import os
import re
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import promql_parser
import pytest
from PIL import Image
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.engine_metrics import EXCLUDED_METRICS
from tests.harness.browser.browser import NO_BROWSER, Page, browser, find_browser
from tests.harness.cells.admin import get_json
from tests.harness.cells.busy_client import CHAT, BusyClients, post
from tests.harness.cells.dashboards import (
    ROOT,
    RULES,
    common_queries,
    filled,
    names_in,
    queries,
    rules,
    variables,
)
from tests.harness.cells.product import MODEL_NAME, Product, product
from tests.harness.cells.prometheus import answer_of, needs_prometheus, prometheus, values_of
from tests.harness.cells.servers import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

TIERS = {"interactive", "standard", "batch"}
SEEN_LIMIT_S = 120
SERIES_MAX = 1_500
"""Most series of a cell of two ranks; what clients send must not add any."""
LAG_TURNS, LAG_MAX_S = 9, 1.0
OCCASIONAL = (
    *("aileron_policy_", "aileron_probe_", "aileron_mode_out_of_service", "aileron_best_layout"),
    "aileron_tenant_tokens",
    "vllm:tool_call_parser_invocations",
)
"""Start of names that exist once what they measure has occurred, as docs/metrics.md says."""

BROWSER = find_browser()
KEEPS_SCREENSHOT = bool(os.environ.get("AILERON_KEEP_SCREENSHOT"))
RANKS = 4 if KEEPS_SCREENSHOT else 2
SCREENSHOT = ROOT / "docs" / "live-page.png"
SCREENSHOT_SIZE = (1280, 1250)
SHOWN = ("tp2+dp2", "tp4", "sp4", "shift4") if KEEPS_SCREENSHOT else ("tp2", "dp2")
SHOWN_S = 13 if KEEPS_SCREENSHOT else 1

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def gateway_port() -> int:
    """Where the gateway of `cell` serves its own metrics."""
    return free_port()


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory, gateway_port: int) -> Iterator[Product]:
    # Predictions are compared between switches, which come every second or two here.
    policy = {"name": "adaptive", "horizon_ms": 300, "decide_every_ms": 100}
    policy |= {"stay_ms": 600_000, "pin_ms": 3_600_000}
    with product(
        tmp_path_factory.mktemp("up"),
        ranks=RANKS,
        settings={
            "policy": policy,
            "gateway": {"metrics_listen": f"127.0.0.1:{gateway_port}"},
        },
    ) as running:
        # Layouts are the tests' to choose: this one is an operator's, and left alone.
        running.switch(f"dp{RANKS}", "reshard")
        yield running


def exposition(cell: Product) -> bytes:
    with urllib.request.urlopen(cell.admin + "/metrics", timeout=60) as answer:
        return bytes(answer.read())


def families(cell: Product) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(exposition(cell).decode()))
    names = [family.name for family in found]
    assert len(names) == len(set(names)), "each family comes once"
    return {family.name: family for family in found}


def samples(cell: Product) -> Samples:
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in families(cell).values()
        for each in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    """Sum of the series that have these labels."""
    wanted = set(labels.items())
    return sum(number for (each, of), number in found.items() if each == name and wanted <= of)


def until(cell: Product, name: str, least: float, **labels: str) -> Samples:
    """Wait until the name is there and the sum of its series has come to `least`."""
    found, deadline = samples(cell), time.monotonic() + SEEN_LIMIT_S
    while name not in {each for each, _ in found} or value(found, name, **labels) < least:
        assert time.monotonic() < deadline, (name, labels, value(found, name, **labels))
        time.sleep(0.3)
        found = samples(cell)
    return found


def documented() -> set[str]:
    """The series of the coordinator that exist from the start, as docs/metrics.md names them."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([\w:]+)` \| .+\((\w+)\) \|$", text, re.MULTILINE)
    rows += re.findall(r"^\| `(vllm:\w+)` \| (\w+) \|", text, re.MULTILINE)
    # Gateways serve some themselves.
    later = ("aileron_gateway_", *OCCASIONAL)
    return {
        name + "_bucket" * (kind == "histogram")
        for name, kind in rows
        if not name.startswith(later)
    }


def test_every_series_exists_from_the_start(cell: Product) -> None:
    """Once a gateway has reported, whatever it has served: what is documented is there."""
    wanted, found, deadline = documented(), samples(cell), time.monotonic() + SEEN_LIMIT_S
    while missing := wanted - {each for each, _ in found}:
        assert time.monotonic() < deadline, missing
        time.sleep(0.3)
        found = samples(cell)
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        tiers = {dict(of)["tier"] for each, of in found if each == f"aileron_{name}_seconds_sum"}
        assert tiers == TIERS
        series = {
            dict(of)["gen_ai_operation_name"]
            for each, of in found
            if each == f"gen_ai_server_{name}_seconds_sum"
        }
        assert series == {"chat", "text_completion"}
    for group in cell.get("/admin/layout")["groups"]:
        (info,) = (
            dict(of)
            for each, of in found
            if each == "vllm:cache_config_info" and dict(of)["engine"] == str(group["leader"])
        )
        assert int(info["block_size"]) > 0
        assert int(info["num_gpu_blocks"]) >= group["pages_total"] > 0


def test_what_is_measured_shows_within_a_second(cell: Product) -> None:
    """Ours and vLLM's, from the end of an answer; the median, as the machine does other work."""
    names = {
        "aileron_requests_total": {"route": CHAT, "code": "200"},
        "aileron_time_to_first_token_seconds_count": {},
        "vllm:request_success_total": {"finished_reason": "length"},
        "vllm:e2e_request_latency_seconds_count": {},
    }
    until(cell, "vllm:time_to_first_token_seconds_count", 0)
    lags = []
    for turn in range(LAG_TURNS):
        before = samples(cell)
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": f"turn {turn}"}]}
        status, _ = post(cell.url + CHAT, {**body, "max_tokens": 2, "ignore_eos": True})
        assert status == 200
        ended_s = time.monotonic()
        while True:
            asked_s = time.monotonic()
            found = samples(cell)
            if all(value(found, n, **of) > value(before, n, **of) for n, of in names.items()):
                break
            assert asked_s < ended_s + SEEN_LIMIT_S
            time.sleep(0.02)
        lags.append(asked_s - ended_s)
    print(f"lags: {[round(each, 2) for each in lags]}")
    assert statistics.median(lags) <= LAG_MAX_S


def test_what_clients_did_is_counted_by_tier(cell: Product) -> None:
    before = samples(cell)
    clients = BusyClients(cell.url, MODEL_NAME, threads=0)
    for turn in range(12):
        clients.one(turn)
    left = value(before, "aileron_client_disconnects_total")
    until(cell, "aileron_client_disconnects_total", left + 3)
    until(cell, "aileron_slo_total", value(before, "aileron_slo_total") + 9)
    done = value(before, "aileron_requests_total", route=CHAT, code="200")
    found = until(cell, "aileron_requests_total", done + 3, route=CHAT, code="200")
    for tier in TIERS:

        def grown(name: str, tier: str = tier, **labels: str) -> float:
            old = value(before, name, tier=tier, **labels)
            return value(found, name, tier=tier, **labels) - old

        assert grown("aileron_requests_total", code="404") == 1
        assert grown("aileron_requests_total", code="499") == 1
        assert grown("aileron_rejections_total", reason="model_not_found") == 1
        assert grown("aileron_request_duration_seconds_count") == 2
        assert grown("aileron_time_to_first_token_seconds_count") == 3
        assert grown("aileron_delivered_tokens_total") >= 96
        assert grown("aileron_inter_token_latency_seconds_count") >= 94
        assert grown("aileron_queue_wait_seconds_count") == 3
        assert grown("aileron_slo_total") == 3
    # vLLM's own agree with ours, and so does OpenTelemetry's spelling.
    new = value(found, "aileron_time_to_first_token_seconds_count")
    assert value(found, "gen_ai_server_time_to_first_token_seconds_count") == new
    success = value(before, "vllm:request_success_total", finished_reason="length")
    found = until(cell, "vllm:request_success_total", success + 6, finished_reason="length")
    assert value(found, "vllm:generation_tokens_total") >= 6 * 48
    assert value(found, "vllm:request_queue_time_seconds_sum") >= 0
    inference = "vllm:request_inference_time_seconds"
    mean_s = value(found, inference + "_sum") / value(found, inference + "_count")
    assert 0 < mean_s < 60, "times of the engine's clock are of one clock"
    found = until(cell, "vllm:prefix_cache_queries_total", 1)
    assert value(found, "vllm:prefix_cache_hits_total") <= value(
        found, "vllm:prefix_cache_queries_total"
    )


def test_predictions_of_the_policy_are_compared_with_what_came_true(cell: Product) -> None:
    with BusyClients(cell.url, MODEL_NAME):
        for name in ("time_to_first_token", "time_per_output_token", "attainment"):
            until(cell, "aileron_policy_prediction_ratio_count", 1, measure=name)
    found = until(cell, "aileron_policy_predictions_total", 1, outcome="compared")
    for kind in ("predicted", "observed"):
        for tier in ("interactive", "standard"):
            mean_s = value(
                found,
                f"aileron_policy_{kind}_seconds",
                measure="time_per_output_token",
                tier=tier,
            )
            assert 0 <= mean_s < 60
    measured = {dict(of).get("measure") for (name, of) in found if "_policy_predi" in name}
    assert measured <= {None, "time_to_first_token", "time_per_output_token", "attainment"}


def test_names_types_and_help_are_right_and_clients_add_no_series(cell: Product) -> None:
    clients = BusyClients(cell.url, MODEL_NAME, threads=0)
    for turn in range(12):
        clients.one(turn)
    for name, least in (("client_disconnects", 3), ("rejections", 3), ("slo", 9)):
        until(cell, f"aileron_{name}_total", least)
    # What the first switch measured comes in behind it.
    before = until(cell, "aileron_switch_duration_seconds_count", 1)
    for number in range(150):
        name = f'x"\n}}{{le="{number}"}} 1 # é\u202e' + "m" * number
        status, _ = post(
            cell.url + CHAT,
            {"model": name, "messages": [{"role": "user", "content": "x"}], "user": name},
            X_Request_Id=f"id-{number}",
        )
        assert status == 404
    found = until(cell, "aileron_rejections_total", value(before, "aileron_rejections_total") + 150)
    added = {
        (name, labels)
        for name, labels in set(found) - set(before)
        if name.startswith(("aileron", "gen_ai")) and "_policy_" not in name
    }
    assert len(added) <= 5, added
    assert len(found) < SERIES_MAX
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for family in families(cell).values():
        if family.name.startswith(("aileron_", "gen_ai_")):
            name = family.name + "_total" * (family.type == "counter")
            assert name in documented, "docs/metrics.md lists every name of ours"
        assert re.fullmatch(r"(aileron_|gen_ai_server_|vllm:|process_)[a-z0-9_]+", family.name)
        assert family.documentation and family.type in ("counter", "gauge", "histogram")
        for each in family.samples:
            for label, text in each.labels.items():
                assert re.fullmatch(r"[a-z_]+", label)
                assert len(text) <= 64 and text.isascii() and '"' not in text, (each.name, text)
            assert math.isfinite(each.value) and each.value >= 0


def test_vllms_names_are_those_that_the_documentation_lists(cell: Product) -> None:
    with BusyClients(cell.url, MODEL_NAME):
        until(cell, "vllm:num_preemptions_total", 0)
        until(cell, "vllm:request_success_total", 1)
    served = [each for each in families(cell).values() if each.name.startswith("vllm:")]
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(vllm:\w+)` \| (\w+) \| (.+?) \| \w+ \|$", text, re.MULTILINE)
    names = {each.name: each.name + "_total" * (each.type == "counter") for each in served}
    listed = {(names[each.name], each.type, labels_of(each)) for each in served}
    assert listed == set(rows)
    sentence = text.partition("\nLeft out are ")[2].partition("\n\n")[0]
    left_out = set(re.findall(r"`(vllm:\w+)`", sentence))
    assert left_out == (vllms_names() | EXCLUDED_METRICS) - names.keys()


def labels_of(family: Metric) -> str:
    """Names of the labels that tell a family's series apart."""
    found = {label for each in family.samples for label in each.labels}
    return ", ".join(sorted(found - {"engine", "model_name", "le"})) or "–"


def vllms_names() -> set[str]:
    """What vLLM's metrics of any engine are called, in its source; importing it takes long."""
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent / "v1" / "metrics" / "loggers.py"
    return set(re.findall(r'name="(vllm:\w+)"', source.read_text()))


@needs_prometheus
def test_promtool_finds_nothing_wrong_with_names_of_ours(cell: Product, tmp_path: Path) -> None:
    saved = tmp_path / "exposition.txt"
    with BusyClients(cell.url, MODEL_NAME):
        until(cell, "aileron_slo_total", 1)
        saved.write_bytes(exposition(cell))
    with saved.open("rb") as file:
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            stdin=file,
            capture_output=True,
            text=True,
            check=False,
        )
    said = [line.split(" ", 1) for line in (done.stdout + done.stderr).splitlines()]
    # vLLM's names are vLLM's: with a colon, and one histogram ends in _total.
    expected = {"metric names should not contain ':'"}
    odd = {'non-counter metrics should not have "_total" suffix'}
    for name, problem in said:
        assert name.startswith("vllm:"), f"{name} {problem}"
        assert problem in expected | (odd if name == "vllm:iteration_tokens_total" else set())
    assert len(said) >= 20, "it has read the file"


def test_every_query_names_metrics_that_exist(cell: Product, gateway_port: int) -> None:
    """Parsed by a PromQL parser; names are those of a live exposition, or recorded by a rule."""
    late = {
        *("aileron_reshard_bytes_total", "aileron_switch_stall_seconds_count"),
        *("vllm:request_success_total", "aileron_client_disconnects_total"),
        *("aileron_policy_prediction_ratio_bucket", "aileron_policy_observed_seconds"),
    }
    deadline = time.monotonic() + 2 * SEEN_LIMIT_S
    with BusyClients(cell.url, MODEL_NAME):
        for layout in itertools.cycle(("tp2", "dp2")):
            live = {name for name, _ in samples(cell)}
            if late <= live:
                break
            assert time.monotonic() < deadline, late - live
            cell.switch(layout, "reshard")
            time.sleep(0.3)
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway_port}/metrics", timeout=60) as answer:
        own = text_string_to_metric_families(answer.read().decode())
        live |= {each.name for family in own for each in family.samples}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    wanted = {rule["record" if "record" in rule else "alert"]: rule["expr"] for rule in rules()}
    assert len(queries()) >= 60
    assert len(common_queries()) >= 8
    for where, text in [*queries(), *common_queries(), *wanted.items()]:
        names = names_in(promql_parser.parse(text))
        assert names, f"{where}: {text} names no metric"
        known = live | recorded | {"up"}
        assert names <= known, f"{where}: {names - known} do not exist"


def choose_all(url: str, deadline: float) -> dict[str, str]:
    """Ask for the values of the dashboards' variables as Grafana does, and choose all of them."""
    chosen: dict[str, str] = {}
    for _, name, selector, label in variables():
        while not (values := values_of(url, filled(selector, chosen), label)):
            assert time.monotonic() < deadline, (name, selector)
            time.sleep(0.3)
        text = "|".join(re.escape(value) for value in values).replace("\\", r"\\")
        assert chosen.setdefault(name, text) == text, "it is the same on each dashboard"
    return chosen


@needs_prometheus
def test_every_panel_has_data_in_a_real_prometheus(
    cell: Product, gateway_port: int, tmp_path: Path
) -> None:
    deadline = time.monotonic() + 2 * SEEN_LIMIT_S
    with (
        BusyClients(cell.url, MODEL_NAME),
        prometheus(cell.admin_port, RULES, tmp_path, gateway_port) as url,
    ):
        chosen = choose_all(url, deadline)
        assert chosen["namespace"] == "chat"
        assert chosen["cell"] == rf"127\\.0\\.0\\.1:{cell.admin_port}"
        assert chosen["gateway"] == rf"127\\.0\\.0\\.1:{gateway_port}"
        assert set(chosen["tier"].split("|")) == TIERS
        asked = [*queries(chosen), *common_queries()]
        missing = {text: panel for panel, text in asked if "changes(" not in text}
        for layout in itertools.cycle(("tp2", "dp2")):
            assert time.monotonic() < deadline, missing
            cell.switch(layout, "reshard")
            time.sleep(2)
            missing = {text: panel for text, panel in missing.items() if not answer_of(url, text)}
            if not missing:
                break
        targets = get_json(url + "/api/v1/targets")["data"]["activeTargets"]
        assert [each["health"] for each in targets] == ["up", "up"]
        assert not answer_of(url, 'ALERTS{alertstate="firing",alertname="AileronAway"}')


async def told_on_hover(page: Page, mark: str) -> str:
    """Hover over a switch until its reason shows; the mark moves on with time."""
    for _ in range(200):
        await page.point(mark)
        if await page.evaluate("!document.getElementById('tip').hidden"):
            return str(await page.evaluate("document.getElementById('tip').textContent"))
        await asyncio.sleep(0.05)
    raise AssertionError("nothing shows on hover")


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
async def test_the_live_page_shows_a_cell_under_load(cell: Product, tmp_path: Path) -> None:
    assert BROWSER is not None
    mark = "[...document.querySelectorAll('.mark')].at(-1)"
    tip = "document.getElementById('tip')"
    with BusyClients(cell.url, MODEL_NAME):
        async with browser(BROWSER, tmp_path / "b") as page:
            width, height = SCREENSHOT_SIZE
            await page.open(cell.admin + "/", width=width, height=height)
            if KEEPS_SCREENSHOT:
                await page.evaluate("document.getElementById('span').value = '60'")
            for layout in SHOWN:
                await asyncio.to_thread(cell.switch, layout, "reshard")
                await asyncio.sleep(SHOWN_S)
            await page.until(f"document.getElementById('layout').textContent === '{layout} serves'")
            await page.until(f"{mark}?.ariaLabel.includes('→ {layout} ')")
            story = await told_on_hover(page, mark)
            assert f"→ {layout}  (served)\nbecause: operator" in story
            # The keyboard's focus stays where it is while the mark moves, the mouse does not.
            await page.point("document.querySelector('h1')")
            await page.evaluate(f"{mark}.focus()")
            await page.until(f"!{tip}.hidden && /longest gap/.test({tip}.textContent)")
            picture = await page.screenshot()
            box = await page.evaluate(
                "(box => [box.left, box.top, box.right, box.bottom].map(Math.round))"
                f"({tip}.getBoundingClientRect())"
            )
            assert page.problems == []
    (tmp_path / "live-page.png").write_bytes(picture)
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    assert image.size == SCREENSHOT_SIZE
    colours = image.getcolors(width * height)
    assert colours is not None and len(colours) > 50, "it is not blank"
    shown = image.crop((box[0], box[1], box[2], box[3]))
    counts = {colour: count for count, colour in shown.getcolors(width * height) or []}
    assert counts[26, 32, 41] > shown.width * shown.height / 3, "the reason is in the picture"
    if KEEPS_SCREENSHOT:
        SCREENSHOT.write_bytes(picture)
