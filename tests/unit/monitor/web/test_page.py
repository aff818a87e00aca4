"""The page in a real browser, on a made-up run."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from manyhands.monitor.web import Filled, Guess, bind
from manyhands.monitor.web import server as server_module
from manyhands.monitor.web.page_files import PageFiles, page_files
from manyhands.monitor.web.server import PageServer
from tests.browser import chromium, found_chromium
from tests.synthetic_run import STEP_S, SyntheticRun

pytestmark = pytest.mark.skipif(found_chromium() is None, reason="there is no Chromium here")

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> </td><script>document.title='owned'</script>"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
SERIOUS = ("serious", "critical")
PEERS = 40


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Shown:
    """A run, its page, and a browser that has it open.

    Attributes:
        problems: what the console of the browser said.
    """

    def __init__(self, browser: Browser, run: SyntheticRun, **context: Any) -> None:
        self.run = run
        self.port = 0
        self.serve()
        self._context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **context})
        self.page = self._context.new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)

    def serve(self) -> None:
        self.server = PageServer(self.run, bind(f"127.0.0.1:{self.port}"), fill)
        self.server.start()
        self.port = int(self.server.url.rpartition(":")[2])

    def open(self, path: str = "/") -> Page:
        self.page.goto(self.server.url + path)
        expect(self.page.locator("#connection")).to_have_text("live")
        expect(self.page.locator("#peers tbody tr").first).to_be_visible()
        return self.page

    def close(self) -> None:
        self._context.close()
        self.server.close()


def fill(text: str) -> Filled:
    return Filled(text.replace("[MASK]", "paris"), [[Guess("paris", 0.61), Guess("<b>lyon</b>", 0.12)]])


@pytest.fixture
def shown(browser: Browser) -> Iterator[Shown]:
    shown = Shown(browser, SyntheticRun(PEERS, time.time(), past_steps=60))  # 40 minutes
    yield shown
    shown.close()


def row_of(page: Page, peer_id: str) -> Any:
    return page.locator(f'#peers tr[data-peer="{peer_id}"]')


def has_curve(page: Page, first: int | str, last: int) -> None:
    """Wait for a curve, as a screen reader has it."""
    text = re.compile(f"^Loss: from .* at step {first} to .* at step {last}$")
    expect(page.locator("#loss-chart")).to_have_attribute("aria-label", text)


def test_curve_grows_outlives_a_reload_and_a_lost_connection(shown: Shown) -> None:
    shown.run.advance(2.0)
    page = shown.open()
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    has_curve(page, 1, 60)
    samples = page.locator("#samples").inner_text()
    expect(page.locator("#samples")).not_to_have_text(samples)  # moves between two looks
    assert page.locator("#countdown").inner_text().endswith(" s")
    shown.run.advance(STEP_S)
    expect(page.locator("#step")).to_have_text("61")
    has_curve(page, 1, 61)
    page.reload()
    has_curve(page, 1, 61)
    assert shown.problems == []
    shown.server.close()
    expect(page.locator("#connection")).to_have_text("connection lost, trying again")
    assert page.evaluate("document.documentElement.className") == "stale"
    stands = page.locator("#countdown").inner_text(), page.locator("#samples").inner_text()
    here_for = page.locator("#peers tbody td:nth-child(7)").all_inner_texts()
    page.wait_for_timeout(2100)  # durations move each second otherwise
    assert (page.locator("#countdown").inner_text(), page.locator("#samples").inner_text()) == stands
    assert page.locator("#peers tbody td:nth-child(7)").all_inner_texts() == here_for
    shown.run.advance(STEP_S)
    shown.run.advance(STEP_S)
    shown.serve()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#step")).to_have_text("63")
    assert page.evaluate("document.documentElement.className") == ""
    has_curve(page, 1, 63)


@pytest.mark.long
def test_page_that_is_open_over_an_upgrade_reloads_itself_once(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    page = shown.open()
    loads: list[str] = []
    page.on("load", lambda _: loads.append(page.url))
    shown.server.close()
    files = page_files(has_model=True)
    index = files.index.replace(files.version.encode(), b"newer").replace(b"<h1", b"<h1 title='newer'")
    static = {path.replace(files.version, "newer"): content for path, content in files.static.items()}
    monkeypatch.setattr(server_module, "page_files", lambda **_: PageFiles("newer", index, static))
    shown.serve()
    expect(page.locator("#run-id[title=newer]")).to_have_text("albert-together")
    expect(page.locator("#connection")).to_have_text("live")
    assert len(loads) == 1
    assert shown.problems == []


@pytest.mark.long
def test_page_whose_server_always_names_another_one_does_not_reload_for_ever(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown.server.close()
    files = page_files(has_model=True)
    monkeypatch.setattr(server_module, "page_files", lambda **_: PageFiles("another", files.index, files.static))
    shown.serve()
    loads: list[str] = []
    shown.page.on("load", lambda _: loads.append(shown.page.url))
    shown.open()
    has_curve(shown.page, 1, 60)
    shown.page.wait_for_timeout(500)
    assert len(loads) <= 2
    shown.run.advance(STEP_S)
    expect(shown.page.locator("#step")).to_have_text("61")


@pytest.mark.long
def test_tabs_that_nobody_sees_have_no_connection_and_those_seen_do_not_stall(shown: Shown) -> None:
    page = shown.open()
    context = page.context
    context.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.isHidden ?? true })")
    tabs = [context.new_page() for _ in range(8)]  # a browser has 6 connections for one server
    for tab in tabs:
        tab.goto(shown.server.url)
    assert open_pages(shown) == 1
    for tab in tabs:
        show(tab, is_hidden=False)
        expect(tab.locator("#connection")).to_have_text("live")
        has_curve(tab, 1, 60)
        show(tab, is_hidden=True)
    shown.run.advance(STEP_S)
    expect(page.locator("#step")).to_have_text("61")
    assert tabs[0].locator("#step").inner_text() == "60"
    show(tabs[0], is_hidden=False)
    expect(tabs[0].locator("#step")).to_have_text("61")
    has_curve(tabs[0], 1, 61)
    assert open_pages(shown) == 2


def show(tab: Page, *, is_hidden: bool) -> None:
    """Have a tab believe that it is hidden or seen: a browser without a screen shows all."""
    tab.evaluate(
        "(isHidden) => { window.isHidden = isHidden; document.dispatchEvent(new Event('visibilitychange')); }",
        is_hidden,
    )


def open_pages(shown: Shown) -> int:
    """The streams that the server sends, once it has noticed what browsers have closed."""
    time.sleep(0.3)
    with urllib.request.urlopen(f"{shown.server.url}/metrics") as answer:
        [number] = re.findall(r"open_pages(?:{.*})? (\d+)", answer.read().decode())
    return int(number)


@pytest.mark.long
def test_page_of_a_run_that_has_gone_back_asks_for_its_history_now_and_then(shown: Shown) -> None:
    page = shown.open()
    has_curve(page, 1, 60)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    shown.run.go_back(50)
    expect(page.locator("#step")).to_have_text("50")
    page.wait_for_timeout(2000)
    assert len(asked) <= 1


@pytest.mark.long
def test_curve_of_an_hour_stays_one_of_an_hour(browser: Browser) -> None:
    shown = Shown(browser, SyntheticRun(3, time.time() - 1800, past_steps=80))  # from 83 to 30 minutes ago
    shown.page.clock.install()
    page = shown.open()
    page.get_by_role("button", name="Hour").click()
    has_curve(page, "3[456]", 80)
    page.clock.fast_forward(1700_000)
    shown.run.advance(1800.0)
    has_curve(page, "7[678]", 81)
    shown.close()


def test_page_of_a_run_without_steps_says_so_in_place_of_curves(browser: Browser) -> None:
    shown = Shown(browser, SyntheticRun(3, time.time()))
    page = shown.open()
    for chart in ("loss", "speed", "peers"):
        expect(page.locator(f"#{chart}-now")).to_have_text("no steps yet")
    assert page.locator(".plot canvas").count() == 0
    shown.run.advance(STEP_S)
    has_curve(page, 1, 1)
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    shown.close()


def test_lost_connection_fits_a_small_phone(browser: Browser) -> None:
    shown = Shown(browser, SyntheticRun(3, time.time()), viewport={"width": 320, "height": 640})
    page = shown.open()
    place = page.locator("#step").bounding_box()
    shown.server.close()
    expect(page.locator("#connection")).to_have_text("connection lost, trying again")
    assert page.locator("#step").bounding_box() == place  # nothing jumps
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    shown.close()


def test_dead_peer_turns_grey_and_a_newcomer_appears(shown: Shown) -> None:
    page = shown.open()
    victim = shown.run.picture().peers[0].peer_id
    before = row_of(page, victim).locator("td").first.evaluate("cell => getComputedStyle(cell).color")
    shown.run.set_state(victim, "gone", "It has not been heard of for 15 s.")
    expect(row_of(page, victim)).to_have_class("gone")
    expect(row_of(page, victim).locator("td").nth(1)).to_have_text(re.compile(r"^gone \d+ s$"))
    after = row_of(page, victim).locator("td").first.evaluate("cell => getComputedStyle(cell).color")
    assert after != before
    expect(page.locator("#events li").first).to_contain_text("It has not been heard of for 15 s.")
    newcomer = shown.run.add_peer("a newcomer")
    page.locator("#filter").fill("a newcomer")
    newcomer_for = row_of(page, newcomer).locator("td:nth-child(7)")
    expect(newcomer_for).not_to_have_text(newcomer_for.inner_text())  # moves between two looks
    expect(row_of(page, newcomer)).to_be_visible()
    expect(page.locator("#num-peers")).to_have_text(str(PEERS))


def test_leaderboard_and_table_equal_the_source_to_the_sample(shown: Shown) -> None:
    page = shown.open()
    shown.run.advance(STEP_S)
    expect(page.locator("#step")).to_have_text("61")
    expect(page.locator("#committed")).to_have_text(f"{shown.run.picture().committed_samples:,}")
    page.locator("#leaders-more").click()
    picture = shown.run.picture()
    wanted = [(str(leader.rank), f"{leader.samples:,}") for leader in picture.leaders]
    expect(page.locator("#leaders li .much")).to_have_text([samples for _, samples in wanted])
    expect(page.locator("#leaders li .rank")).to_have_text([rank for rank, _ in wanted])
    most = max(row.samples for row in picture.peers)
    expect(page.locator("#peers tbody td:nth-child(3)").first).to_have_text(f"{most:,}")  # the table follows within 2 s
    seen: dict[str, str] = {}
    while True:
        for row in page.locator("#peers tbody tr").all():
            seen[row.get_attribute("data-peer") or ""] = row.locator("td").nth(2).inner_text()
        if page.locator("#page-next").is_disabled():
            break
        page.locator("#page-next").click()
    assert seen == {row.peer_id: f"{row.samples:,}" for row in picture.peers}


def test_credit_of_tokens_is_called_tokens(shown: Shown) -> None:
    page = shown.open()
    expect(page.locator("#peers th").nth(2)).to_have_text("Samples")
    shown.run.unit = "tokens"
    shown.run.advance(1.0)
    expect(page.locator("#peers th").nth(2)).to_have_text("Tokens")
    expect(page.get_by_text("tokens in committed steps")).to_be_visible()
    expect(page.get_by_text("Tokens so far")).to_be_visible()
    expect(page.locator("#peers th").nth(4)).to_have_text("Samples/s")


def test_hostile_names_are_text_everywhere(shown: Shown) -> None:
    peer_id = shown.run.add_peer(HOSTILE)
    shown.run.tell("refused", f"{HOSTILE} was refused: {HOSTILE}")
    shown.run.advance(STEP_S)
    page = shown.open(f"/?peer={peer_id}")
    expect(page.locator("#you-title")).to_contain_text(HOSTILE)
    page.locator("#filter").fill("onerror")
    expect(row_of(page, peer_id).locator("td").first).to_have_text(HOSTILE)
    expect(page.locator("#events li").first).to_contain_text(HOSTILE)
    page.locator("#leaders-more").click()
    expect(page.locator("#leaders")).to_contain_text(HOSTILE)
    page.goto(f"{shown.server.url}/?peer={HOSTILE}")
    expect(page.locator("#you-reason")).to_have_text("This monitor does not know this peer.")
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()
    assert shown.problems == []  # the policy of the page had nothing to refuse


def test_card_of_a_peer_has_its_rank_and_why_it_missed_a_step(shown: Shown) -> None:
    page = shown.open()
    picture = shown.run.picture()
    last = picture.peers[-1]
    page.locator("#filter").fill(last.peer_id)
    row_of(page, last.peer_id).get_by_role("link").click()
    assert page.url.endswith(f"?peer={last.peer_id}")
    leader = shown.run.leader_of(last.peer_id)
    assert leader is not None
    expect(page.locator("#you-rank")).to_have_text(str(leader.rank))
    expect(page.locator("#you-samples")).to_have_text(f"{last.samples:,}")
    expect(page.locator("#you-committed")).to_have_text(str(last.rounds_committed))
    expect(page.locator("#you-missed")).to_have_text(str(last.rounds_missed))
    for _ in range(200):  # until it misses one
        shown.run.advance(STEP_S)
        row = next(row for row in shown.run.picture().peers if row.peer_id == last.peer_id)
        if row.reason:
            break
    expect(page.locator("#you-reason")).to_have_text(f"Not in the last step: {row.reason}")
    page.go_back()
    expect(page.locator("#you")).to_be_hidden()


def test_table_is_sorted_and_filtered_by_keyboard(shown: Shown) -> None:
    page = shown.open()
    button = page.get_by_role("button", name="Samples/s")
    button.focus()
    page.keyboard.press("Enter")
    head = page.locator("#peers th", has_text="Samples/s")
    expect(head).to_have_attribute("aria-sort", "descending")
    speeds = [float(text.replace(",", "")) for text in page.locator("#peers tbody td:nth-child(5)").all_inner_texts()]
    assert speeds == sorted(speeds, reverse=True)
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.locator("#filter").fill("no such peer")
    expect(page.locator("#peers-empty")).to_have_text("No peer has this text.")


def test_a_run_whose_target_is_not_known_yet_is_not_called_empty(shown: Shown) -> None:
    """As after a restart of the monitor, until a trainer has published the manifest again."""
    shown.run.change(target_batch_size=0, eta_s=None, committed_since=1_790_000_000.0)
    page = shown.open()
    expect(page.locator("#samples")).to_have_text("How many samples a step needs is not known here yet.")
    expect(page.locator("#countdown")).to_have_text("waiting")
    expect(page.locator("#committed-since")).to_have_text(re.compile("^since Sep 2[012]$"))


def test_on_a_phone_nothing_is_too_small_to_hit_and_the_example_is_whole(browser: Browser) -> None:
    shown = Shown(browser, SyntheticRun(2, time.time(), past_steps=3), viewport=PHONE)
    page = shown.open()
    small = page.evaluate(
        """() => [...document.querySelectorAll("main a, main button, main input, footer a, header button")]
          .map((one) => [one.outerHTML, one.getBoundingClientRect()])
          .filter(([, box]) => box.width && (box.width < 24 || box.height < 24)).map(([html]) => html)"""
    )
    assert small == []
    assert page.evaluate("(input => input.scrollWidth <= input.clientWidth)(document.getElementById('fill-text'))")
    expect(page.locator(".sideways")).to_be_visible()
    for card in page.locator(".two > .card").all():
        box = card.bounding_box()
        assert box is not None
        assert box["height"] < 300, "a small run needs no large cards"
    shown.close()


def test_without_javascript_the_page_says_where_the_numbers_are(browser: Browser) -> None:
    shown = Shown(browser, SyntheticRun(2, time.time(), past_steps=3), java_script_enabled=False)
    try:
        shown.page.goto(shown.server.url)
        expect(shown.page.locator(".noscript")).to_contain_text("This page needs JavaScript")
    finally:
        shown.close()


def test_model_fills_a_mask(shown: Shown) -> None:
    page = shown.open()
    page.get_by_role("button", name="Fill").click()
    expect(page.locator("#fill-said")).to_have_text("The capital of France is paris.")
    expect(page.locator("#fill-guesses li .who")).to_have_text(["paris", "<b>lyon</b>"])


@pytest.mark.long
def test_the_page_has_no_serious_axe_violation_and_does_not_overflow(browser: Browser) -> None:
    run = SyntheticRun(PEERS, time.time(), past_steps=60)
    run.set_state(run.picture().peers[0].peer_id, "gone", "It has not been heard of for 15 s.")
    run.set_state(run.picture().peers[1].peer_id, "left", "It left.")
    for viewport, scheme in ((DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")):
        shown = Shown(browser, run, viewport=viewport, color_scheme=scheme)
        page = shown.open(f"/?peer={run.picture().peers[0].peer_id}")
        expect(page.locator("#loss-chart canvas")).to_be_visible()
        found = Axe().run(page).response["violations"]
        serious = [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] in SERIOUS]
        assert serious == []
        assert "landmark-unique" not in [one["id"] for one in found]
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        shown.close()


@pytest.mark.long
def test_page_of_2000_peers_stays_quick_and_does_not_jump(browser: Browser) -> None:
    run = SyntheticRun(2000, time.time(), past_steps=3)
    shown = Shown(browser, run)
    try:
        page = shown.open()
        expect(page.locator("#peers-shown")).to_have_text("1 to 25 of 2,000")
        page.evaluate(
            """() => {
              window.longest = 0; window.moved = 0;
              new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
              }).observe({ type: "longtask" });
              new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) window.moved += entry.value;
              }).observe({ type: "layout-shift" });
            }"""
        )
        for step in (4, 5):
            run.advance(STEP_S)
            expect(page.locator("#step")).to_have_text(str(step))
            page.wait_for_timeout(2100)  # the table of peers follows within 2 s
        assert page.locator("#peers tbody tr").count() == 25
        assert page.evaluate("window.longest") < 400  # milliseconds; a user feels a stall from there
        assert page.evaluate("window.moved") < 0.01
    finally:
        shown.close()
