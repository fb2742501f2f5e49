"""The page of rollouts in headless Chromium: ``make test-browser``.

Screenshots of every state that is looked at go to ``$SCREENSHOTS``, where that is set.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from components.envs.base import ToolCall
from tests.unit.tools.recorded import HOSTILE, hostile_run, make_rollout, write_run
from tests.unit.tools.test_view_rollouts import load
from tools.viewer import entries as found
from tools.viewer.page import build_page

pytestmark = pytest.mark.browser

OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1400,900"),
)
CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const parse = (text) => {
  const n = rgb(text), unit = text.startsWith("color(") ? 255 : 1;
  return [...n.slice(0, 3).map((v) => v * unit), n.length > 3 ? n[3] : 1];
};
const over = (top, base) => top.slice(0, 3).map((v, i) => v * top[3] + base[i] * (1 - top[3]));
const ground = (node) => {
  if (!node) return [255, 255, 255];
  return over(parse(getComputedStyle(node).backgroundColor), ground(node.parentElement));
};
const luminance = (c) => c.map((v) => v / 255)
  .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const found = {};
for (const node of document.querySelectorAll("*")) {
  const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
  if (!own || !node.checkVisibility() || node.disabled) continue;
  const base = ground(node), ink = over(parse(getComputedStyle(node).color), base);
  const [a, b] = [luminance(ink), luminance(base)].sort((x, y) => y - x);
  const name = node.tagName + "." + node.className;
  found[name] = Math.min(found[name] ?? 99, (a + 0.05) / (b + 0.05));
}
return found;
"""


@pytest.fixture(scope="module")
def browser():
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.fail("needs Debian's packages chromium and chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for option in OPTIONS:
        options.add_argument(option)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The hostile texts, an evaluation, and a violation of S7 in mock."""
    folder = tmp_path_factory.mktemp("page")
    entries = load(hostile_run(folder / "run"))
    mock = write_run(folder / "mock", [(3, make_rollout(step=3, domain="mock", texts=("a",) * 2))])
    more = found.read_entries(mock / "rollouts.jsonl")
    more[0].findings = {"S7": [{"passed": False, "text": HOSTILE[1], "message": 2}], "S12": []}
    more[0].number = len(entries) + 1
    path = folder / "page.html"
    path.write_text(build_page([*entries, *more], title=HOSTILE[0]), encoding="utf-8")
    return path


def open_page(browser, path, *, width=1400):
    browser.set_window_size(width, 900)
    browser.get("about:blank")
    browser.get(f"file://{path}")
    browser.execute_script("window.hit = 0; window.alert = () => { window.hit = 1; }")


def press(browser, *keys):
    for key in keys:
        browser.switch_to.active_element.send_keys(key)


def text(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
    )


def shoot(browser, name):
    if os.environ.get("SCREENSHOTS"):
        browser.save_screenshot(str(Path(os.environ["SCREENSHOTS"]) / f"{name}.png"))


def test_hostile_text_stays_text(browser, page):
    open_page(browser, page)
    allowed = {"DIV", "SPAN", "PRE", "P", "H2", "H3", "DL", "DT", "DD", "DETAILS", "SUMMARY"}
    allowed |= {"ARTICLE", "UL", "LI", "BUTTON", "WBR"}
    for written in HOSTILE:
        press(browser, "j")
        tags = browser.execute_script(
            "return [...document.querySelectorAll('#view *')].map((e) => e.tagName)"
        )
        assert set(tags) <= allowed
        spelled_out = found.visible(written)
        assert text(browser, "#view h2")[0].startswith(f"text/{spelled_out}")
        assert text(browser, "#view .call-name")[0] == f"tool {spelled_out}"
        sampled = found.visible(written.encode("utf-8", "replace").decode())
        assert text(browser, "#view .user .text")[0] == f"Hi! {sampled}"
        assert text(browser, "#view .tokens")[0].replace("·", "") == sampled
    assert browser.execute_script("return window.hit") == 0
    assert text(browser, "h1") == [HOSTILE[0]]
    press(browser, "j", "g")
    assert browser.execute_script("return window.hit") == 0
    assert browser.execute_script("return document.images.length + frames.length") == 0
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    # Chromium reports the script of a text that became markup even where the policy stops it.
    assert browser.get_log("browser") == []


def test_without_a_mouse(browser, page):
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    press(browser, "j", "j", Keys.ARROW_DOWN, "k")
    assert text(browser, "#rows tr[aria-selected=true] .place") == [" #1"]
    assert text(browser, "#view .place")[0] == " rollout 1"
    press(browser, "]")
    assert text(browser, "#view h2 .place") == [" rollout 2"]
    press(browser, "]", "[", "]")  # round its group of three
    assert text(browser, "#view h2 .place") == [" rollout 0"]
    press(browser, "g")
    assert text(browser, "#view h2 .place") == [f" rollout {n}" for n in range(3)]
    assert browser.execute_script("return location.hash") == "#1"
    press(browser, Keys.ESCAPE, Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "detail"
    browser.execute_script("document.querySelector('#view .tokens').focus()")
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    readout = text(browser, "#view .readout")[0]
    assert readout.startswith("token 2 of ")
    assert "p 0.500" in readout
    assert "advantage +1.000" in readout
    press(browser, "s")
    assert browser.execute_script("return document.body.dataset.shade") == "advantage"
    press(browser, "?")
    assert browser.execute_script("return document.getElementById('help').open")
    press(browser, Keys.ESCAPE, "/", "onerror")
    assert text(browser, "#summary") == ["1 of 10 rollouts, mean reward 0.000"]
    shown = browser.find_element("css selector", "#rows tr")
    assert "onerror" in shown.text


def test_filters_and_order(browser, page):
    open_page(browser, page)

    def number_shown(**fields):
        browser.execute_script(
            """document.getElementById("filters").reset();
            for (const [name, value] of Object.entries(arguments[0]))
              document.getElementById("filters").elements[name].value = value;
            document.getElementById("filters").dispatchEvent(new Event("input"));""",
            fields,
        )
        time.sleep(0.05)  # a reset is drawn in the next task
        return len(text(browser, "#rows tr"))

    assert number_shown() == 10
    assert number_shown(status="truncated_tokens") == 3
    assert number_shown(step_from="2") == 4
    assert number_shown(step_from="2", step_to="2") == 3
    assert number_shown(reward_from="0.5") == 4
    assert number_shown(reward_to="0.5") == 3
    assert number_shown(safety="S7") == number_shown(safety="any check") == 1
    assert number_shown(text="mock/") == 1
    assert number_shown(text="no such") == 0
    assert "No rollout passes these filters." in text(browser, "#nothing:not([hidden])")
    number_shown()
    browser.execute_script("document.querySelector('[data-name=reward] button').click()")
    assert text(browser, "#rows tr > :nth-child(4)") == ["0.000"] * 3 + ["1.000"] * 4 + ["–"] * 3
    browser.execute_script("document.querySelector('[data-name=reward] button').click()")
    assert text(browser, "#rows tr > :nth-child(4)") == ["1.000"] * 4 + ["0.000"] * 3 + ["–"] * 3


def test_a_finding_leads_to_its_message(browser, page):
    open_page(browser, f"{page}#10")
    assert text(browser, "#view .safety li") == [f"message 2 {HOSTILE[1]}"]
    browser.execute_script("document.querySelector('#view .jump').click()")
    focused = browser.switch_to.active_element
    assert focused.get_attribute("data-place") == "2"


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_can_be_read(browser, page, theme, width):
    """Contrast of at least 4.5 : 1 everywhere (WCAG 2.1 AA), and nothing beyond the window."""
    open_page(browser, page, width=width)
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert (
        browser.execute_script(ground)
        == {
            "light": "rgb(255, 255, 255)",
            "dark": "rgb(21, 23, 27)",
        }[theme]
    )
    for keys, name in [("", "list"), ("j\ue007", "rollout"), ("s", "advantage"), ("g", "group")]:
        press(browser, *keys)
        shoot(browser, f"{theme}-{width}-{name}")
        measured = browser.execute_script(CONTRAST)
        assert len(measured) > 8
        assert {k: v for k, v in measured.items() if v < 4.5} == {}
        beyond = "return document.documentElement.scrollWidth - innerWidth"
        assert browser.execute_script(beyond) <= 0
    assert len(text(browser, "#view .token")) > 30


def test_the_system_decides_between_light_and_dark(browser, page):
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    open_page(browser, page)
    assert (
        browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(21, 23, 27)"
    )
    press(browser, "t")
    assert (
        browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_two_thousand_rollouts_open_in_three_seconds(browser, tmp_path):
    """Each of 12 turns of 20 tokens, and as many tool answers of 1,000 characters: 30 MB."""
    call = ToolCall(name="get_order_details", arguments={"order_id": "#W0000000"}, id="call_0")
    how = {"texts": ("Looking at the order",) * 12, "calls": (call,), "answer": "pending " * 125}
    rollouts = [
        make_rollout(step=1 + n // 40, group=n // 8 % 5, member=n % 8, reward=n % 3 / 2, **how)
        for n in range(2000)
    ]
    run = write_run(tmp_path, [(r.tokens.policy_versions[-1] + 1, r) for r in rollouts])
    entries = found.read_entries(run / "rollouts.jsonl")
    found.add_advantages(entries, {})
    path = tmp_path / "page.html"
    path.write_text(build_page(entries, title="many"), encoding="utf-8")
    assert path.stat().st_size > 25e6
    open_page(browser, path)
    ready = float(browser.execute_script("return document.documentElement.dataset.readyMs"))
    print(f"ready after {ready:.0f} ms, {path.stat().st_size / 1e6:.1f} MB")
    assert text(browser, "#summary")[0].startswith("2000 rollouts")
    press(browser, "j")
    assert len(text(browser, "#view .message")) == 25
    assert ready < 3000
