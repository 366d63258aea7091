"""The web page in a real browser: the list, a live run, the figures, comparing; light and dark; and hostile folders.

Screenshots go to the folder that FEDKIN_SCREENSHOTS names, else to a temporary one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium")

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from fedkin.config import make_config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)
PAYLOAD = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few short real runs, and one folder written by somebody else."""
    from fedkin.runs.start import start

    folder = tmp_path_factory.mktemp("runs")
    common = {"data": "digits", "clients": 10, "rounds": 5, "epochs": 1, "model": "mlp", "runs_dir": str(folder)}
    for more in (
        {"method": "pfedcs"},
        {"method": "fedcap", "attack": "ipm", "options": {"t_norm": 2.0}, "epochs": 5},
        {"method": "c-pfl", "attack": "sf"},
    ):
        made = start(make_config({**common, **more}))
    _spoil(folder, Path(str(made.run)))
    return folder


def _spoil(runs: Path, source: Path) -> None:
    import sqlite3

    hostile = runs / "hostile"
    shutil.copytree(source, hostile)
    about = json.loads((hostile / "run.json").read_text())
    about["config"] |= dict.fromkeys(("method", "data", "attack", "rule", "partition"), PAYLOAD)
    about |= {
        "names": [PAYLOAD] * len(about["names"]),
        "error": PAYLOAD,
        "options": {PAYLOAD: PAYLOAD},
        "environment": {PAYLOAD: PAYLOAD},
    }
    (hostile / "run.json").write_text(json.dumps(about))
    base = sqlite3.connect(hostile / "metrics.sqlite")
    base.execute("UPDATE clients SET name = ?", (PAYLOAD,))
    base.execute("UPDATE exchanges SET phase = ?", (PAYLOAD,))
    base.execute("UPDATE events SET reason = ?", (PAYLOAD,))
    base.commit()
    base.close()
    (hostile / "report.html").write_text(f"<title>report</title><script>document.title = 'ran'</script>{PAYLOAD}")


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "fedkin", "web", "--runs-dir", str(runs), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = next(word for word in line.split() if word.startswith("http://")).rstrip("/")
        for _ in range(200):
            try:
                httpx.get(found, timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield found
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def picture(browser: webdriver.Chrome, tmp_path: Path) -> Callable[..., None]:
    """Saves the whole page, as it looks on a light and on a dark screen."""
    folder = Path(os.environ.get("FEDKIN_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)

    def save(name: str) -> None:
        tall = min(6000, browser.execute_script("return document.documentElement.scrollHeight"))
        size = {"width": 1400, "height": tall, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for look in ("light", "dark"):
            scheme = {"features": [{"name": "prefers-color-scheme", "value": look}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            time.sleep(0.2)
            assert browser.save_screenshot(str(folder / f"{name}-{look}.png"))
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    return save


def until(browser: webdriver.Chrome, true: Callable[[], Any], seconds: float = 40) -> Any:
    """What is waited for; a table that is drawn anew in between is looked at again."""
    waiting = WebDriverWait(browser, seconds, 0.1, [NoSuchElementException, StaleElementReferenceException])
    return waiting.until(lambda _: true())


def rows(browser: webdriver.Chrome) -> list[str]:
    script = "return [...document.querySelectorAll('#runs tbody tr')].map(row => row.dataset.run)"
    return list(browser.execute_script(script))


def text(browser: webdriver.Chrome, id: str) -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0])?.textContent ?? ''", id))


def press(browser: webdriver.Chrome, selector: str, *keys: str) -> None:
    """As somebody who has come to this element with the tabulator; a figure that is drawn anew (after the window's size
    changed, say) is looked for again."""

    def reached() -> bool:
        element = browser.find_element(By.CSS_SELECTOR, selector)
        assert element.get_property("tabIndex") == 0
        browser.execute_script("arguments[0].focus()", element)
        return bool(browser.switch_to.active_element == element)

    until(browser, reached)
    ActionChains(browser).send_keys(*keys).perform()


def complaints(browser: webdriver.Chrome) -> list[str]:
    """Errors of scripts, and what the content policy stopped."""
    return [str(entry["message"]) for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_list_filter_and_sort(browser: webdriver.Chrome, address: str, picture: Callable[..., None]) -> None:
    browser.get(address)
    until(browser, lambda: len(rows(browser)) == 4)
    assert "4 runs" in text(browser, "count")
    picture("list")
    Select(browser.find_element(By.ID, "by-method")).select_by_value("fedcap")
    until(browser, lambda: len(rows(browser)) == 1)
    assert rows(browser)[0].startswith("fedcap-")
    assert "method=fedcap" in browser.current_url
    assert "1 of 4" in text(browser, "count")
    browser.refresh()  # a filter lives in the address
    until(browser, lambda: len(rows(browser)) == 1)
    browser.find_element(By.ID, "clear").click()
    until(browser, lambda: len(rows(browser)) == 4)
    browser.find_element(By.ID, "by-text").send_keys("c-pfl digits")
    until(browser, lambda: len(rows(browser)) == 1)
    browser.find_element(By.ID, "clear").click()
    until(browser, lambda: len(rows(browser)) == 4)
    focus = "[...document.querySelectorAll('th button')].find(b => b.textContent === 'accuracy').focus()"
    browser.execute_script(focus)
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    until(browser, lambda: browser.find_element(By.CSS_SELECTOR, "th[aria-sort] button").text == "accuracy")
    cells = "return [...document.querySelectorAll('#runs tbody td[data-key=macro]')].map(cell => cell.textContent)"
    found = [float(cell.removesuffix("\u00a0%")) for cell in browser.execute_script(cells)]
    assert len(found) == 4
    assert found == sorted(found, reverse=True)
    assert complaints(browser) == []


@pytest.mark.parametrize("width", [1400, 1000, 390])
def test_the_list_shows_what_it_is_sorted_by_and_how_well_runs_did(
    browser: webdriver.Chrome, address: str, width: int
) -> None:
    """Also on a phone, where each run is a card."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get(address)
        until(browser, lambda: len(rows(browser)) >= 4)
        right = """return Math.max(...[...document.querySelectorAll(arguments[0])].map(cell => {
            const box = cell.getBoundingClientRect(); return box.width ? box.right : Infinity; }))"""
        for key in ("created", "macro", "worst_decile"):
            assert browser.execute_script(right, f"#runs tbody td[data-key={key}]") <= width, key
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        sort = browser.find_element(By.ID, "sort")
        assert sort.is_displayed() == (width < 500)
        browser.get(f"{address}/?sort=partition")
        until(browser, lambda: len(rows(browser)) >= 4)
        if width < 500:
            assert Select(browser.find_element(By.ID, "sort")).first_selected_option.text == "partition"
        else:
            until(browser, lambda: browser.execute_script(right, "#runs th[aria-sort]") <= width)
            left = "return document.querySelector('#runs td[data-key=id]').getBoundingClientRect().left"
            assert browser.execute_script(left) >= 0  # the names stay when the table is moved
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_live_run_advances_before_the_eyes(
    browser: webdriver.Chrome, address: str, runs: Path, picture: Callable[..., None]
) -> None:
    """A real run in a process of its own: its curve grows without a reload, and its end is seen."""
    before = {path.name for path in runs.iterdir()}
    words = "run fedavg --data digits --clients 10 --rounds 2000 --model mlp --attack ipm --rule krum --runs-dir"
    command = [sys.executable, "-m", "fedkin", *words.split(), str(runs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as training:
        try:
            name = until(browser, lambda: next(iter(_fresh(browser, address, before)), None), 90)
            browser.get(f"{address}/run/{name}")
            until(browser, lambda: " of 2000 rounds" in text(browser, "going"))
            seen = {text(browser, "going").split()[0]}
            until(browser, lambda: seen.add(text(browser, "going").split()[0]) or len(seen) >= 4)
            assert text(browser, "status") == "running"
            points = (
                "return document.querySelector('#accuracy-per-round path.line').getAttribute('d').split('L').length"
            )
            drawn = browser.execute_script(points)
            until(browser, lambda: browser.execute_script(points) > drawn)
            picture("live")
            training.terminate()  # stops after the round, and saves
            assert training.wait(60) == 143
            until(browser, lambda: text(browser, "status") == "interrupted")
            done = httpx.get(f"{address}/api/runs/{name}").json()["curves"]["round"]
            until(browser, lambda: browser.execute_script(points) == len(done))
            assert text(browser, "going") == f"{len(done)} of 2000 rounds"
            assert f"fedkin resume {name}" in until(browser, lambda: text(browser, "steps"))
            assert "equal throughout" in browser.find_element(By.CSS_SELECTOR, "#bytes-per-round .readout").text
            asked = "return performance.getEntriesByType('resource').map(entry => entry.name)"
            assert sum("/stream" in place for place in browser.execute_script(asked)) == 1
        finally:
            if training.poll() is None:
                training.kill()
    assert complaints(browser) == []


def _fresh(browser: webdriver.Chrome, address: str, before: set[str]) -> list[str]:
    """Runs that the list shows as running and that were not there before."""
    browser.get(f"{address}/?status=running")
    time.sleep(0.3)
    return [name for name in rows(browser) if name not in before]


def test_the_figures_answer_to_mouse_and_keys(
    browser: webdriver.Chrome, address: str, runs: Path, picture: Callable[..., None]
) -> None:
    name = next(path.name for path in runs.glob("pfedcs-*"))
    browser.get(f"{address}/run/{name}")
    heat = until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#split svg path.heat"))
    assert heat
    svg = browser.find_element(By.CSS_SELECTOR, "#split .chart svg")
    assert "10 clients hold" in svg.get_attribute("aria-label")
    press(browser, "#split .chart svg", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    told = browser.find_element(By.CSS_SELECTOR, "#split .readout").text
    (split,) = httpx.get(f"{address}/api/runs/{name}/figures/split").json()["panels"]
    count = split["values"][0][1]
    assert told == f"client 0, class 1: {'–' if count is None else int(count)}"
    slider = until(browser, lambda: browser.find_element(By.ID, "at-round"))
    until(browser, lambda: text(browser, "at-round-now") == "5 of 5")
    slider.send_keys(Keys.ARROW_LEFT)
    until(browser, lambda: text(browser, "at-round-now") == "4 of 5")
    picture("run")
    (matrix,) = httpx.get(f"{address}/api/runs/{name}/figures/matrix").json()["panels"]
    names = "return [...document.querySelectorAll('#matrix .tick[text-anchor=end]')].map(tick => tick.textContent)"
    ordered = [matrix["rows"][i].removeprefix("client-") for i in matrix["order"]]
    assert [said.removeprefix("⚑ ") for said in browser.execute_script(names)] == ordered
    browser.find_element(By.ID, "by-likeness").click()
    until(browser, lambda: browser.execute_script(names) == sorted(ordered))
    press(browser, "#accuracy-per-round .chart svg", Keys.ARROW_RIGHT)
    assert "round 1: macro" in browser.find_element(By.CSS_SELECTOR, "#accuracy-per-round .readout").text
    browser.find_element(By.LINK_TEXT, "client-3").click()
    until(browser, lambda: "client-3" in text(browser, "name"))
    until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#accuracy path.line"))
    picture("client")
    for kind, card in (("fedcap", "removals"), ("c-pfl", "committee")):
        browser.get(f"{address}/run/{next(path.name for path in runs.glob(f'{kind}-*'))}")
        until(browser, lambda card=card: browser.find_elements(By.CSS_SELECTOR, f"#{card} .chart path"))
        picture(kind)
    assert "of benign clients" in text(browser, "tiles")
    spread = until(browser, lambda: text(browser, "spread-over-clients"))
    assert "malicious (the truth)" in spread
    ends = (
        "return document.querySelector('#spread-over-clients svg line.across[y1]:not([x1=\"1\"])').getAttribute('x2')"
    )
    bars = "return [...document.querySelectorAll('#spread-over-clients rect.s1')].map(bar => bar.getAttribute('x'))"
    assert len(browser.execute_script(bars)) == 3
    assert all(float(bar) >= float(browser.execute_script(ends)) for bar in browser.execute_script(bars))
    ticks = "return [...document.querySelectorAll('#accuracy-per-round .tick')].map(tick => tick.textContent)"
    assert "100\u00a0%" in browser.execute_script(ticks)
    assert complaints(browser) == []


def _ticked(browser: webdriver.Chrome, name: str) -> bool:
    box = browser.find_element(By.CSS_SELECTOR, f"tr[data-run='{name}'] input")
    if not box.is_selected():
        box.click()
    return bool(box.is_selected())


def test_compare_what_was_selected(browser: webdriver.Chrome, address: str, picture: Callable[..., None]) -> None:
    browser.get(address)
    until(browser, lambda: len(rows(browser)) >= 4)
    link = browser.find_element(By.ID, "compare")
    assert link.get_attribute("aria-disabled") == "true"
    chosen = [name for name in rows(browser) if name.startswith(("fedcap-", "c-pfl-", "pfedcs-"))]
    for name in chosen:
        until(browser, lambda name=name: _ticked(browser, name))
    assert "3" in link.text
    link.click()
    until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "#per-round path.line")) == 3)
    diff = until(browser, lambda: text(browser, "diff"))
    assert "attack" in diff
    assert "ipm" in diff
    picture("compare")
    before = browser.execute_script("return document.querySelector('#per-round path.line').getAttribute('d')")
    Select(browser.find_element(By.ID, "measure")).select_by_value("test_loss")
    until(
        browser,
        lambda: (
            browser.execute_script("return document.querySelector('#per-round path.line').getAttribute('d')") != before
        ),
    )
    press(browser, "#per-round .legend button", Keys.SPACE)
    until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "#per-round path.line")) == 2)
    assert complaints(browser) == []


TOO_WIDE = """
const inside = (e) => e && (e.matches('.scroll, .unseen, .skip') || inside(e.parentElement));
return [...document.querySelectorAll('body *')].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width > 1 && (box.right > innerWidth + 1 || box.left < -1) && !inside(e);
}).map((e) => `${e.tagName} #${e.id} ${Math.round(e.getBoundingClientRect().right)}`);
"""


def test_nothing_is_wider_than_a_phone(browser: webdriver.Chrome, address: str, picture: Callable[..., None]) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    names = [run["id"] for run in httpx.get(f"{address}/api/runs").json()["runs"]]
    capped, voted = (next(n for n in names if n.startswith(method)) for method in ("fedcap", "c-pfl"))
    pages = {
        "/": "#runs tbody tr",
        f"/run/{capped}": "#card-removals svg",
        f"/run/{voted}": "#card-committee svg",
        f"/run/{capped}/client/3": "#classes svg",
        f"/compare?run={capped}&run={voted}": "#numbers tbody tr",
        "/run/hostile": "#clients tbody tr",
    }
    try:
        for path, drawn in pages.items():
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
            browser.get(f"{address}{path}")
            until(browser, lambda drawn=drawn: browser.find_elements(By.CSS_SELECTOR, drawn))
            until(browser, lambda: not browser.execute_script(TOO_WIDE))
            assert browser.execute_script("return document.documentElement.scrollWidth") == 390, path
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_figures_are_saved_and_commands_copied(browser: webdriver.Chrome, address: str, tmp_path: Path) -> None:
    run = next(r["id"] for r in httpx.get(f"{address}/api/runs").json()["runs"] if r["id"].startswith("pfedcs"))
    allowed = {"origin": address, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", allowed)
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.get(f"{address}/run/{run}")
    until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#card-matrix .save a"))
    slider = browser.find_element(By.ID, "at-round")
    browser.execute_script("arguments[0].value = 0; arguments[0].oninput()", slider)
    until(
        browser,
        lambda: (
            browser.find_element(By.CSS_SELECTOR, "#card-matrix .save a").get_dom_attribute("href")[-7:] == "round=1"
        ),
    )
    for words in ("SVG", "CSV"):
        press(browser, f"#card-matrix .save a[aria-label$='{words}']", Keys.ENTER)
    for kind in ("svg", "csv"):
        file = tmp_path / f"{run}-matrix-round-1.{kind}"
        until(browser, file.exists)
        assert file.read_bytes() == httpx.get(f"{address}/api/runs/{run}/figures/matrix/{kind}?round=1").content
    cards = browser.find_elements(By.CSS_SELECTOR, "section[data-figure]:not([hidden])")
    until(browser, lambda: all(len(card.find_elements(By.CSS_SELECTOR, ".save a")) == 2 for card in cards))
    press(browser, "#steps .command button", Keys.ENTER)
    until(browser, lambda: browser.find_element(By.CSS_SELECTOR, "#steps .command button").text == "copied")
    copied = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied.startswith(f"fedkin resume {run} --rounds 10 --runs-dir ")
    assert browser.find_element(By.CSS_SELECTOR, "#steps code").text == copied
    assert complaints(browser) == []


def test_a_folder_written_by_somebody_else_injects_nothing(browser: webdriver.Chrome, address: str) -> None:
    browser.get(address)
    until(browser, lambda: PAYLOAD in text(browser, "runs"))
    for path in ("/run/hostile", "/run/hostile/client/1"):
        browser.get(address + path)
        until(browser, lambda: PAYLOAD in text(browser, "content"))
        until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "[id^=accuracy] .chart path"))
        time.sleep(0.5)
        assert browser.execute_script("return window.hacked") is None
        assert browser.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    assert complaints(browser) == []
    browser.get(f"{address}/report/hostile")
    time.sleep(0.5)
    assert browser.title == "report"  # its script did not run
    blocked = complaints(browser)
    assert any("Content Security Policy" in line or "sandboxed" in line for line in blocked)
