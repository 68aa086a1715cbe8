"""The site: all pages are in it, its links lead somewhere, and search in a browser finds each message."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmloader

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"

FIRST = ".md-search-result__item:first-child h2"
"""The headings found on the page that is found first, the best first."""
FIRST_IS = f"wanted => document.querySelector({FIRST!r})?.innerText.replace(/\\s+/g, ' ') === wanted"


def test_the_navigation_has_every_page() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"([\w./-]+\.md)$", text, re.MULTILINE)
    pages = {str(page.relative_to(REPOSITORY)) for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted([*pages, "README.md", "CHANGELOG.md", "examples/README.md"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it; a link that leads nowhere is an error."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="make docs installs what the site is built with")
    root = tmp_path_factory.mktemp("site")
    source = root / "build" / "site-source"
    source.mkdir(parents=True)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("docs", "examples", "benchmarks"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "mkdocs.yml", root)
    (root / "docs").symlink_to(REPOSITORY / "docs")  # its hook
    (root / "shmloader").symlink_to(REPOSITORY / "shmloader")  # its docstrings are the reference
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "build" / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site served on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_reference_has_the_docstrings(site: Path) -> None:
    page = (site / "docs" / "reference" / "index.html").read_text(encoding="utf-8")
    for name in set(shmloader.__all__) - {"__version__"}:
        assert re.search(rf'id="shmloader\.([a-z_.]+\.)?{name}"', page), name
    assert "memory_budget_nbytes" in page


def test_llms_txt_lists_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[.+?\]\((.+?)\): .", text, re.MULTILINE)
    rows = re.findall(r"^\| \[", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(rows) > 30
    pages = {str(page.relative_to(REPOSITORY)) for page in DOCS.glob("*.md")}
    assert pages - {"docs/index.md"} <= set(listed)
    assert all((site / page).read_text(encoding="utf-8").strip() for page in listed)


def test_search_in_a_browser_finds_each_message_first(address: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="make docs installs it")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser: chromium and google-chrome are not installed")
    messages = re.findall(r"^### (.*)$", (DOCS / "messages.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(messages) > 20
    missed, failed = list[tuple[str, list[str]]](), list[str]()
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"], timeout=120_000)
        page = opened.new_page()
        page.set_default_timeout(60_000)
        page.on("requestfailed", lambda request: failed.append(request.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(address)
        page.keyboard.press("/")
        for message in messages:
            asked = message.replace("…", "4711").strip()
            page.fill(".md-search__input", asked[:-1])
            page.keyboard.type(asked[-1])  # it searches when a key is released
            try:
                page.wait_for_function(FIRST_IS, arg=message)
            except playwright.TimeoutError:
                missed.append((message, page.locator(FIRST).all_inner_texts()))
        opened.close()
    assert (missed, failed) == ([], [])
