"""What the pages and the sources refer to is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_equation_that_the_sources_name_is_there():
    defined = {int(n) for n in re.findall(r" {6,}\((\d+)\)$", (ROOT / "docs/MATH.md").read_text("utf-8"), re.M)}
    assert defined == set(range(1, 28))
    named = 0
    for path in [path for folder in ("qla_jit", "templates") for path in (ROOT / folder).rglob("*.py")]:
        for numbers in re.findall(r"MATH\.md((?:[ ,-]*\(\d+\))+)", path.read_text("utf-8")):
            named += 1
            assert {int(n) for n in re.findall(r"\d+", numbers)} <= defined, path
    assert named > 5


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as its readers make them."""
    found = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_link_between_pages_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/*/README.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))]
    links = [(page, link) for page, link in links if not link.startswith("http")]
    assert len(pages) > 8 and len(links) > 40
    for page, link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), (page.name, link)
        assert not anchor or anchor in anchors(target), (page.name, link)
