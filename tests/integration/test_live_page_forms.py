"""The live page in Chromium over states of 4 and 64 ranks: it fits, and needs no eyes or mouse."""

import json
from pathlib import Path

import pytest

from tests.harness.browser.browser import NO_BROWSER, Page, browser, find_browser
from tests.harness.browser.live_states import decisions, live_state, page_server
from tests.harness.cells.coordinator_process import TOKEN, Coordinator
from tests.harness.cells.rank_sessions import RankSessions

BROWSER = find_browser()
WORLDS = ((4, 2), (64, 4))
"""Ranks, and parts of the weights."""
SIZES = (1280, 400)
SCHEMES = ("light", "dark")
TEXT_CONTRAST, SHAPE_CONTRAST = 4.5, 3.0
"""What WCAG 2.2 asks of text (1.4.3), and of what one must see to use a control (1.4.11)."""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER),
]

WIDER = """[...document.querySelectorAll("body *")].filter(node => {
  const box = node.getBoundingClientRect();
  if (!box.width || node.closest(".scroll table, .only-read, .skip, [hidden]")) return false;
  return box.right > document.documentElement.clientWidth + 0.5 || box.left < -0.5;
}).map(node => node.tagName + "#" + node.id + "." + node.className)"""
"""What sticks out of the window; tables scroll inside of their own boxes."""

OVERLAPS = """(() => {
  const hidden = ".only-read, .skip, .mark, #tip, datalist, option, [hidden]";
  const texts = [...document.querySelectorAll("body *")].filter(node => {
    const own = [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim());
    return (own || ["CANVAS", "INPUT", "SELECT", "BUTTON"].includes(node.tagName))
      && !node.closest(hidden) && !node.closest(".scroll") && node.getClientRects().length;
  });
  const boxes = texts.map(node => node.getBoundingClientRect()), found = [];
  for (let a = 0; a < texts.length; a++) for (let b = a + 1; b < texts.length; b++) {
    if (texts[a].contains(texts[b]) || texts[b].contains(texts[a])) continue;
    const wide = Math.min(boxes[a].right, boxes[b].right) - Math.max(boxes[a].left, boxes[b].left);
    const high = Math.min(boxes[a].bottom, boxes[b].bottom) - Math.max(boxes[a].top, boxes[b].top);
    if (wide > 1 && high > 1) found.push([texts[a].textContent, texts[b].textContent, wide, high]);
  }
  return found;
})()"""
"""Pairs of texts or controls that lie on each other."""

DRAWN_TEXTS = """(() => {
  window.drawnTexts = new Map();
  const pens = CanvasRenderingContext2D.prototype, plain = pens.fillText, clear = pens.clearRect;
  pens.clearRect = function (...box) {
    drawnTexts.set(this.canvas.id, []);
    return clear.apply(this, box);
  };
  pens.fillText = function (text, x, y) {
    const wide = this.measureText(text).width;
    const left = x - wide * { right: 1, center: 0.5, left: 0 }[this.textAlign];
    drawnTexts.get(this.canvas.id).push([text, left, left + wide, y]);
    return plain.call(this, text, x, y);
  };
})()"""
"""Notes the texts that charts draw, with their left and right edges and their lines."""

BAD_TEXTS = """[...drawnTexts].flatMap(([id, texts]) => texts.filter(([text, left, right, y], at) =>
  left < 0 || right > document.getElementById(id).clientWidth
    || texts.some(([other, start, end, line], number) =>
      number > at && Math.abs(line - y) < 8 && start < right && end > left)
).map(([text]) => id + ": " + text))"""
"""Those that stick out of their chart, or lie on another one."""

CONTRASTS = """(() => {
  const light = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return parts.reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  };
  const ratio = (one, other) => {
    const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const behind = node => {
    for (let each = node; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (!/, 0\\)$/.test(color) && color !== "transparent") return color;
    }
  };
  const found = { texts: {}, edges: {}, shapes: {} };
  for (const node of document.querySelectorAll("body *")) {
    const style = getComputedStyle(node);
    const own = [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim());
    if (own && !["SCRIPT", "OPTION"].includes(node.tagName))
      found.texts[[node.tagName, node.id, node.className, node.textContent].join(" ")] =
        ratio(style.color, behind(node));
    if (["INPUT", "SELECT"].includes(node.tagName))
      found.edges[node.id] = ratio(style.borderTopColor, behind(node.parentElement));
  }
  const probe = document.createElement("i"), card = behind(document.querySelector(".card"));
  document.body.append(probe);
  const names = "dp tp sp shift away t0 t1 t2 good warn bad accent";
  for (const name of names.split(" ")) {
    probe.style.color = "var(--" + name + ")";
    found.shapes[name] = ratio(getComputedStyle(probe).color, card);
  }
  probe.remove();
  return found;
})()"""


async def shown(page: Page, address: str, scheme: str, width: int) -> None:
    await page.prefer(scheme)
    await page.open(address, width=width, height=900)
    await page.until("document.documentElement.dataset.drawn > 0")
    await page.until("document.getElementById('why').children.length === 3")


@pytest.mark.parametrize(("world", "parts"), WORLDS)
async def test_nothing_overflows_or_overlaps(world: int, parts: int, tmp_path: Path) -> None:
    assert BROWSER is not None
    async with (
        page_server(live_state(world, parts)) as address,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=DRAWN_TEXTS)
        for scheme in SCHEMES:
            for width in SIZES:
                await shown(page, address, scheme, width)
                case = f"{world} ranks, {scheme}, {width} px"
                fits = (
                    "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
                )
                assert await page.evaluate(WIDER) == [], case
                assert await page.evaluate(fits), case
                assert await page.evaluate(OVERLAPS) == [], case
                assert await page.evaluate("drawnTexts.size") == 7
                assert await page.evaluate(BAD_TEXTS) == [], case
        assert page.problems == []


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_contrasts(scheme: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    async with (
        page_server(live_state(4, 2)) as address,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await shown(page, address, scheme, 1280)
        for kind in ("good", "bad"):
            await page.evaluate(f"say('a result of this kind', {kind!r})")
            found = await page.evaluate(CONTRASTS)
            assert len(found["texts"]) > 60
            assert {name: at for name, at in found["texts"].items() if at < TEXT_CONTRAST} == {}
        for group in ("edges", "shapes"):
            assert {name: at for name, at in found[group].items() if at < SHAPE_CONTRAST} == {}
        for name in ("dp", "tp", "sp", "shift"):
            label = f"onTop(color({name!r}))"
            pair = await page.evaluate(f"[{label}, color({name!r})]")
            assert contrast(*pair) >= TEXT_CONTRAST, name


def contrast(one: str, other: str) -> float:
    """Of two colours such as #3b76d8, by WCAG."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
        ]
        return sum(
            each * share for each, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True)
        )

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


async def test_everything_has_a_name_and_a_role(tmp_path: Path) -> None:
    """By the tree that a screen reader gets."""
    assert BROWSER is not None
    async with (
        page_server(live_state(64, 4)) as address,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await shown(page, address, "light", 1280)
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        named: dict[str, list[str]] = {}
        for node in tree:
            if not node.get("ignored"):
                name = node.get("name", {}).get("value", "")
                named.setdefault(node["role"]["value"], []).append(name.strip())
        for role in (
            "button",
            "textbox",
            "combobox",
            "link",
            "region",
            "image",
            "group",
            "heading",
        ):
            assert all(named.get(role, ["none"])), (role, named.get(role))
        assert {"banner", "main", "region", "table", "list", "status"} <= set(named)
        # A field with proposals is a combobox as well.
        assert {"Layout", "Running tasks", "Span of time"} <= set(named["combobox"])
        charts = [name for name in named["image"] if "; now " in name]
        assert len(charts) == 6
        assert (
            "Waiting tasks by tier over time; now interactive 99,999, standard 840, batch 5"
            in charts
        )
        assert "Why this layout" in named["region"]
        assert "Where weights and host KV are" in named["region"]


async def test_the_keyboard_reaches_all_in_order(tmp_path: Path) -> None:
    """Switches are one stop; arrow keys walk along them, and Escape closes the tooltip."""
    assert BROWSER is not None
    async with (
        page_server(live_state(4, 2)) as address,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await shown(page, address, "light", 1280)
        order = []
        for _ in range(8):
            await page.key("Tab")
            seen = "document.activeElement"
            order.append(
                await page.evaluate(
                    f"{seen}.id || {seen}.className || {seen}.getAttribute('aria-label')"
                )
            )
            outline = await page.evaluate(f"getComputedStyle({seen}).outlineStyle")
            assert outline != "none", order
        assert order == [
            *("skip", "span", "mark", "wanted", "carry", "go"),
            *("scroll", "scroll"),
        ]
        await page.evaluate("document.querySelector('.mark[tabindex=\"0\"]').focus()")
        epoch = "Number(document.activeElement.dataset.epoch)"
        last = await page.evaluate(epoch)
        await page.key("ArrowLeft")
        assert await page.evaluate(epoch) == last - 1
        assert not await page.evaluate("document.getElementById('tip').hidden")
        await page.key("Home")
        assert await page.evaluate(epoch) < last - 1
        await page.key("End")
        assert await page.evaluate(epoch) == last
        assert await page.evaluate("document.querySelectorAll('.mark[tabindex=\"0\"]').length") == 1
        await page.key("Escape")
        assert await page.evaluate("document.getElementById('tip').hidden")


async def test_nothing_moves_for_those_who_ask(tmp_path: Path) -> None:
    assert BROWSER is not None
    async with (
        page_server(live_state(4, 2)) as address,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        await page.call("Emulation.setEmulatedMedia", features=features)
        await page.open(address, width=1280)
        await page.until("document.documentElement.dataset.drawn > 1")
        assert await page.evaluate("document.getAnimations().length") == 0
        lasting = (
            "[...document.querySelectorAll('*')].filter("
            "each => getComputedStyle(each).transitionDuration !== '0s').length"
        )
        assert await page.evaluate(lasting) == 0


@pytest.mark.parametrize(("world", "parts"), [*WORLDS, (4, 1)])
async def test_weights_and_reasons_are_shown(world: int, parts: int, tmp_path: Path) -> None:
    assert BROWSER is not None
    async with (
        page_server(live_state(world, parts)) as address,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await shown(page, address, "light", 1280)
        reasons = await page.evaluate(
            "[...document.getElementById('why').children].map(e => e.textContent)"
        )
        expected = [each["reason"] for each in reversed(decisions()[-3:])]
        assert [each.split(": ", 1)[1] for each in reasons] == expected
        lines = await page.evaluate(
            "[...document.getElementById('parts').children].map(e => e.textContent)"
        )
        if parts > 1:
            host = lines.pop()
            assert host.startswith("host memory: ")
            for count in (12_345 * world, 98_765 * world, 1_234_567 * world):
                assert str(count) in "".join(char for char in host if char.isalnum() or char == " ")
        assert len(lines) == parts
        if parts == 1:
            assert lines == ["ranks 0–3: all weights"]
        else:
            for part, line in enumerate(lines):
                for text in (
                    f"part {part} of {parts}",
                    "borrows ffn",
                    "ring 786 MB",
                    "41 layers whole",
                ):
                    assert text in line
        colours = (
            "new Set([...document.getElementById('strip').children].map("
            "each => getComputedStyle(each).backgroundColor)).size"
        )
        assert await page.evaluate(colours) == parts
        assert await page.evaluate("document.getElementById('strip').childElementCount") == world


async def test_the_page_keeps_what_did_not_change(tmp_path: Path) -> None:
    """A reader in a table keeps its place: rows are written again only where they differ."""
    assert BROWSER is not None
    async with (
        page_server(live_state(4, 2)) as address,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await shown(page, address, "light", 1280)
        await page.evaluate(
            "window.changes = 0; new MutationObserver(all => { changes += all.length; }).observe("
            "document.getElementById('ranks'), "
            "{ childList: true, characterData: true, subtree: true })"
        )
        drawn = await page.evaluate("Number(document.documentElement.dataset.drawn)")
        await page.until(f"document.documentElement.dataset.drawn > {drawn + 1}")
        assert await page.evaluate("changes") == 0


async def test_the_states_have_the_form_of_a_real_answer(tmp_path: Path) -> None:
    """What the page reads of them is in what a coordinator says."""
    coordinator = Coordinator(tmp_path, cell={"ranks": 4, "layout": "dp4", "widths": [1, 2, 4]})
    with coordinator.running():
        target = f"127.0.0.1:{coordinator.grpc}"
        async with RankSessions(target, TOKEN, 4, heartbeat_s=0.1):
            real = await coordinator.serving()
            answer = coordinator.get("/admin/live")
    assert real is None or real
    made = live_state(4, 2)
    lacking = set(made) - set(answer)
    assert lacking == set()
    for name in ("groups", "ranks", "samples", "switches"):
        assert answer[name], name
        assert set(made[name][0]) - set(answer[name][0]) == set(), name
    assert set(made["ranks"][0]["weights"]) <= set(answer["ranks"][0]["weights"])
    assert json.dumps(made)


def test_contrasts_are_those_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
