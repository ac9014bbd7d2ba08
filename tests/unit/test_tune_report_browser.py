"""The report in a real browser: nothing is loaded, nothing overflows, text is readable in both colour schemes."""

import shutil
from pathlib import Path

import pytest

from qla_jit.tune.report import model_section, render
from qla_jit.tune.report_data import from_files

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
SWEEPS = Path(__file__).resolve().parents[2] / "tuning_db" / "sweeps"
MODEL = {
    "name": "fused_forward sm90",
    "coefficients": {"depth_us": 1.25, "constant_us": 12.5},
    "rows": 24,
    "loo_error": 0.031,
    "fitted_on": "ab" * 32,
    "points": [(100.0 + 10 * i, 103.0 + 9.8 * i) for i in range(24)],
}


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        if binary is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)} on PATH, or `playwright install chromium`")
        launched = playwright.chromium.launch(executable_path=binary, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    data = from_files(sorted(SWEEPS.glob("*.jsonl")))
    data.models = [MODEL]
    assert model_section(data.models)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(data), encoding="utf-8")
    return path


@pytest.fixture(params=["light", "dark"])
def page(browser, page_file, request):
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1280, "height": 1000}, offline=True)
    opened = context.new_page()
    opened.asked, opened.said = [], []
    opened.on("request", lambda r: opened.asked.append(r.url))
    opened.on("console", lambda m: opened.said.append(m.text))
    opened.on("pageerror", lambda e: opened.said.append(str(e)))
    opened.goto(page_file.as_uri())
    yield opened
    context.close()


def test_page_opens_without_network_or_complaint(page, page_file):
    page.wait_for_load_state("networkidle")
    assert page.asked == [page_file.as_uri()]
    assert page.said == []
    assert page.title() == "Tuning report"
    assert page.locator("section").count() == 6


def test_only_wide_tables_scroll_never_the_page(page):
    for width in (1280, 420, 320):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_links_lead_to_sections_and_details_open_by_keyboard(page):
    page.get_by_role("link", name="Provenance").click()
    assert page.evaluate("location.hash") == "#provenance"
    closed = page.locator("#spaces > details:not([open])").first
    closed.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#spaces > details[open]").count() == 3
    chart = page.locator("#spaces svg[role=img]").first
    box = chart.bounding_box()
    assert box["width"] > 250 and box["height"] > 120


def test_tables_have_heads_and_captions_and_charts_have_names(page):
    counts = page.evaluate(
        """() => ({
            tables: document.querySelectorAll('table').length,
            headless: [...document.querySelectorAll('table')].filter(t => !t.querySelector('thead th')).length,
            rowless: [...document.querySelectorAll('tbody tr')].filter(r => !r.querySelector('th[scope=row]')).length,
            unnamed: [...document.querySelectorAll('svg:not([aria-hidden])')].filter(s => !s.ariaLabel).length,
            heat: document.querySelectorAll('table.heat caption').length,
        })"""
    )
    assert counts["tables"] > 100 and counts["heat"] > 50
    assert (counts["headless"], counts["rowless"], counts["unnamed"]) == (0, 0, 0)


CONTRAST = """() => {
    const linear = x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
    const light = c => { const v = c.map(x => linear(x / 255));
        return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] };
    const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d',
        {willReadFrequently: true});
    const paper = getComputedStyle(document.body).backgroundColor;
    const seen = (front, back) => { canvas.fillStyle = paper; canvas.fillRect(0, 0, 1, 1);
        for (const c of [back, front]) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1) }
        return light([...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)) };
    const ratio = e => { const s = getComputedStyle(e), back = s.backgroundColor;
        const a = seen(s.color, back), b = seen('transparent', back);
        return (Math.max(a, b) + .05) / (Math.min(a, b) + .05) };
    document.querySelectorAll('details').forEach(d => d.open = true);
    return Math.min(...[...document.querySelectorAll('p,td,th,dt,dd,a,summary,.quiet,.badge,figcaption')].map(ratio));
}"""


def test_text_has_a_contrast_of_at_least_4_5_in_both_schemes(page):
    assert page.evaluate(CONTRAST) >= 4.5
