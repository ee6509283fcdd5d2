"""Reports in a real browser: light, dark and on paper; ``make test-browser``."""

import base64
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from tests.browser.chromium import Chromium
from tests.browser.fetch import program

import fedpdmc as fp

pytestmark = pytest.mark.browser
FOLDER = Path(__file__).parents[2] / "build" / "browser"
SECTIONS = ["Question", "Model", "Estimates", "Sites", "Convergence", "Fit at the sites", "Privacy", "Exactness", "Methods",
            "Citation", "Record of the run", "Words"]  # fmt: skip
HOSTILE = "A trial <img src=x onerror=alert(1)><script>alert(2)</script>"
# Pairs of texts that overlap: of a figure, or of two blocks of the page.
OVERLAPS = """
(() => {
  const shown = e => e.getClientRects().length && getComputedStyle(e).visibility !== 'hidden';
  const groups = [...document.querySelectorAll('svg')].map(s => [...s.querySelectorAll('text, g[id^=text_]')]);
  groups.push([...document.querySelectorAll('h1, h2, h3, h4, p, td, th, li, dt, dd, blockquote, footer')]);
  const found = [];
  for (const group of groups) {
    const boxes = group.filter(e => shown(e)).map(e => [e, e.getBoundingClientRect()]);
    for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
      const [e, a] = boxes[i], [f, b] = boxes[j];
      if (e.contains(f) || f.contains(e)) continue;
      const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (w > 1.5 && h > 1.5) found.push([e.textContent.trim() || e.id, f.textContent.trim() || f.id, w, h]);
    }
  }
  return found;
})()
"""
FIGURES = """
[...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text, g[id^=text_]')];
  return {width: box.width, height: box.height, texts: texts.length, inside: texts.every(t => {
    const b = t.getBoundingClientRect();
    return b.left > box.left - 2 && b.right < box.right + 2 && b.top > box.top - 2 && b.bottom < box.bottom + 2; })};
})
"""


# What is wider than its place: a table that scrolls, or a cell that is cut.
CLIPPED = """
[...document.querySelectorAll('.wide, th, td, svg')].filter(e => e.getClientRects().length)
  .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 || e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.textContent.trim().slice(0, 60))
"""


@pytest.fixture(scope="module")
def browser():
    made = Chromium(program(FOLDER))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a study with many terms and long names."""
    rng = np.random.default_rng(2)
    n = 400
    frame = pd.DataFrame({"centre": rng.choice(["north", "south", "west - east"], n)})
    frame["falls"] = rng.poisson(2, n)
    frame["a_covariate_with_a_very_long_name_indeed"] = rng.normal(size=n)
    frame["ward"] = rng.choice(["surgery", "internal medicine", "emergency & <b>"], n)
    for k in range(6):
        frame[f"marker_{k}"] = rng.normal(size=n) * 10.0**k
    formula = "falls ~ a_covariate_with_a_very_long_name_indeed + ward + " + " + ".join(f"marker_{k}" for k in range(6))
    sites = fp.sites(frame, by="centre", formula=formula, family="poisson")
    post = fp.sample(sites, seed=1, ess=200, progress=False)
    path = tmp_path_factory.mktemp("report") / "study.html"
    fit = fp.assessment.assess(post, sites)
    return post.report(path, sites=sites, assessment=fit, title=HOSTILE, question="Does it work?")


def opened(browser, page, dark=False, width=1100):
    browser.open(page.as_uri(), dark)
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=1200, deviceScaleFactor=1, mobile=False)
    height = browser.evaluate("document.documentElement.scrollHeight")
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    return np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB"), float)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_report_is_drawn_whole_and_asks_for_nothing(browser, page, dark):
    image = opened(browser, page, dark)
    assert browser.complaints() == [] and browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.images.length + document.scripts.length") == 0
    assert browser.evaluate("document.querySelector('h1').innerText") == HOSTILE
    assert browser.evaluate("[...document.querySelectorAll('h2')].map(h => h.innerText)") == SECTIONS
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(OVERLAPS) == []
    figures = browser.evaluate(FIGURES)
    large = [one for one in figures if one["width"] > 400]
    # A forest plot of all coefficients and six by site, the path, and the densities.
    assert len(large) == 8 and len(figures) == 8 + 10
    assert all(one["height"] > 100 and one["texts"] > 3 and one["inside"] for one in large), large
    assert all(one["inside"] for one in figures) and browser.evaluate(CLIPPED) == []
    background = np.median(image.reshape(-1, 3), 0)
    assert background.max() < 60 if dark else background.min() > 230
    # Text stands out from its background, in figures too.
    far = np.abs(image - background).max(-1) > 120
    for box in browser.evaluate(
        "[...document.querySelectorAll('svg, p, table')].map(e => e.getBoundingClientRect().toJSON())"
    ):
        part = far[int(box["top"]) : int(box["bottom"]) + 1, int(box["left"]) : int(box["right"]) + 1]
        assert part.mean() > 0.001, box
    if dark:
        # Nothing is black on black: glyphs are drawn in the colour of the page.
        fills = browser.evaluate(
            "[...document.querySelectorAll('svg text, svg g[id^=text_] path, svg g[id^=text_] use')]"
            ".map(e => getComputedStyle(e).fill)"
        )
        assert fills and "rgb(0, 0, 0)" not in fills


def test_a_report_fits_a_telephone(browser, page):
    opened(browser, page, width=420)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")
    assert browser.evaluate(OVERLAPS) == [] and browser.evaluate(CLIPPED) == []


def test_a_report_is_printed_dark_on_white(browser, page):
    opened(browser, page, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    # The width of a sheet of A4 between its margins.
    browser.call("Emulation.setDeviceMetricsOverride", width=720, height=1000, deviceScaleFactor=1, mobile=False)
    assert browser.evaluate(CLIPPED) == []
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=False)["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    assert 2 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") <= 15
    browser.call("Emulation.setEmulatedMedia", media="", features=[])
