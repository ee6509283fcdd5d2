"""The status pages of a running study in a real browser, light and dark: ``make test-browser``."""

import io
import json
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.browser.chromium import Chromium
from tests.browser.fetch import program
from tests.federation.kill_soak import SHORT
from tests.federation.processes import Parties, free_port
from tests.federation.studies import SEED, SITE_SEED, Folder

pytestmark = pytest.mark.browser
# A name that would do something if it became a part of the page.
NAME = "two hospitals <img src=x onerror=alert(1)><script>alert(2)</script>"
STUDY = SHORT.replace('"two hospitals"', json.dumps(NAME)).replace("ess = 60", "ess = 100000000")
FOLDER = Path(__file__).parents[2] / "build" / "browser"


@pytest.fixture(scope="module")
def browser():
    made = Chromium(program(FOLDER))
    yield made
    made.close()


def until(ready, seconds=180):
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


class Study:
    """Coordinator and sites as processes, each with its page."""

    def __init__(self, path: Path):
        self.ports = {name: free_port() for name in ("coordinator", "north", "south")}
        self.parties = Parties(Folder(path, STUDY), (SEED, SITE_SEED), wrap=self._watched)

    def _watched(self, name, command):
        return [*command, "--status", f"127.0.0.1:{self.ports[name]}", "--stall-after", "2"]

    def url(self, name):
        return f"http://127.0.0.1:{self.ports[name]}/"

    def facts(self, name):
        try:
            with urllib.request.urlopen(self.url(name) + "status.json", timeout=20) as answer:
                return json.load(answer)
        except OSError:
            return {}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    made = Study(tmp_path_factory.mktemp("study"))
    made.parties.start_all()
    try:
        until(lambda: (made.facts("coordinator").get("rounds") or 0) > 50)
        for name, key in (("coordinator", "worst_ess"), ("coordinator", "worst_rhat"), ("north", "answer_seconds")):
            until(lambda name=name, key=key: sum(one.get(key) is not None for one in made.facts(name)["history"]) > 3)
        yield made
    finally:
        made.parties.stop()


DRAWN = """
[...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect(), paths = [...svg.querySelectorAll('path.path')];
  return {label: svg.getAttribute('aria-label'), width: box.width, height: box.height,
          inside: paths.every(p => { const b = p.getBoundingClientRect();
            return b.left > box.left - 3 && b.right < box.right + 3 && b.top > box.top - 3 && b.bottom < box.bottom + 3; }),
          length: Math.min(...paths.map(p => p.getTotalLength())), strokes: paths.map(p => getComputedStyle(p).stroke)};
})
"""
TABLE = "[...document.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
TILES = "Object.fromEntries([...document.querySelectorAll('.card')].filter(c => c.querySelector('b')).map(" \
        "c => [c.querySelector('span').innerText, c.querySelector('b').innerText]))"  # fmt: skip


def check_page(browser, study, name, dark):
    """A page that is drawn, with nothing from elsewhere and no complaint; returns its tiles and its brightness."""
    browser.open(study.url(name), dark)
    assert browser.complaints() == []
    assert set(browser.requests()) == {study.url(name)}
    # Nothing of the contract has become a part of the page, and nothing is executed.
    assert browser.evaluate("document.images.length + document.scripts.length") == 0
    assert browser.evaluate("document.querySelector('h1').innerText").endswith(NAME)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    drawn = browser.evaluate(DRAWN)
    assert len(drawn) >= 3
    for one in drawn:
        assert one["inside"] and one["width"] > 200 and one["height"] > 100 and one["length"] > 0, one
        assert all(stroke.startswith("rgb") for stroke in one["strokes"])
    image = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB"), float)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20
    return browser.evaluate(TILES), float(np.median(image))


@pytest.mark.parametrize("name", ["coordinator", "north"])
def test_a_page_is_drawn_light_and_dark_from_this_host_alone(browser, study, name):
    tiles, light = check_page(browser, study, name, False)
    again, dark = check_page(browser, study, name, True)
    assert light > 200 and dark < 60
    colour = browser.evaluate("getComputedStyle(document.body).color")
    assert colour == "rgb(255, 255, 255)"
    if name == "coordinator":
        assert tiles["Sites joined"] == "2" and int(tiles["Rounds"].replace(",", "")) > 50
        assert float(tiles["Process time"].replace(",", "")) > 0 and float(again["Worst R-hat"]) > 0.5
        rows = browser.evaluate(TABLE)
        assert [row[0] for row in rows] == ["north", "south"] and all("● connected" in row[1] for row in rows)
        assert all(row[3].endswith("ms") for row in rows)
    else:
        assert tiles["Coordinator"] == "connected" and int(tiles["Requests answered"].replace(",", "")) > 50


def test_a_page_refreshes_itself(browser, study):
    browser.open(study.url("coordinator"))
    first = browser.evaluate(TILES)["Rounds"]
    browser.evaluate("window.seen = 1")
    until(lambda: not browser.evaluate("window.seen"), 60)
    until(lambda: browser.evaluate(TILES).get("Rounds", first) != first, 60)
    assert browser.complaints() == []


def test_a_stall_is_shown_and_is_gone_when_the_site_is_back(browser, study):
    study.parties.kill("south")
    until(lambda: study.facts("coordinator")["stalls"])
    browser.open(study.url("coordinator"), dark=True)
    said = browser.evaluate("[...document.querySelectorAll('[role=alert]')].map(e => e.innerText).join()")
    assert "Stalled: nothing from site south" in said and "not connected" in said
    assert browser.evaluate("document.querySelector('[role=alert]').getBoundingClientRect().height") > 10
    assert browser.evaluate(TILES)["Sites joined"] == "1"
    study.parties.start("south")
    until(lambda: not study.facts("coordinator")["stalls"] and study.facts("coordinator")["joined"] == 2)
    browser.open(study.url("coordinator"))
    assert browser.evaluate("document.querySelectorAll('[role=alert]').length") == 0
