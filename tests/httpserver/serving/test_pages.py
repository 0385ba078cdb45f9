"""The web pages as the server gives them out: what they may do, who may have them, that they are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import httpx
import pytest

from moeserve.httpserver.web import pages
from tests.support.servers.http_harness import HttpServer, http_server

PAGES = ("/", "/experts", "/docs")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(api_key=("secret",)) as running:
        yield running


ALLOWED_TO_ARTIFACTS = {
    "script-src": "'unsafe-inline'",
    "style-src": "'unsafe-inline'",
    "img-src": "data: blob:",
    "media-src": "data: blob:",
    "font-src": "data:",
    "frame-ancestors": "'self'",
    "sandbox": "allow-scripts",
}


@pytest.mark.parametrize("path", sorted(pages.PATHS))
def test_a_file_needs_no_key_and_may_load_nothing_from_elsewhere(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    kind = ".html" if path in PAGES else PurePosixPath(path).suffix
    assert response.headers["content-type"] == TYPES[kind]
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    if (
        path == "/web/artifact.html"
    ):  # where HTML of a model runs: without an origin, and without network access
        assert {name: value for name, value in policy.items() if value != "'none'"} == ALLOWED_TO_ARTIFACTS
        assert policy["connect-src"] == policy["form-action"] == policy["base-uri"] == "'none'"
        return
    if path == "/docs":  # Swagger's, which makes elements of text, and has its pictures in its style sheet
        assert policy["style-src"] == "'self' 'unsafe-inline'"
        assert policy["img-src"] == "'self' data:"
        policy |= {"style-src": "'self'", "img-src": "'self'", "require-trusted-types-for": "'script'"}
    if path == "/":  # which may start one worker, whose address a policy of this name gives
        assert (policy["worker-src"], policy["trusted-types"]) == ("'self'", "pdf-worker")
        assert policy["img-src"] == "'self' data:"  # pictures that go with a question
        assert policy.pop("frame-src") == "'self'"  # artifact.html
        policy |= {"worker-src": "'none'", "trusted-types": "'none'", "img-src": "'self'"}
    if path == "/web/pdf_worker.js":  # which reads files of strangers, and may load its scripts and no more
        allowed = {name for name, value in policy.items() if value != "'none'"}
        assert allowed == {"script-src", "worker-src", "require-trusted-types-for"}
        policy |= {"worker-src": "'none'"} | dict.fromkeys(("style-src", "connect-src", "font-src"), "'self'")
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["worker-src"] == "'none'"
    assert policy.get("trusted-types", "'none'") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["font-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


OF_LIBRARIES = {path for path in pages.PATHS if path.startswith("/web/vendor/") and not path.endswith(".css")}


@pytest.mark.parametrize("path", sorted(pages.PATHS - OF_LIBRARIES))
def test_a_file_names_only_others_that_are_there(client: httpx.Client, path: str) -> None:
    text = client.get(path).text
    named = re.findall(r'(?:src|href)="([^"]+)"|from "([^"]+)"|url\("?(?!data:)([^)"]+)"?\)', text)
    for one in ("".join(groups) for groups in named):
        assert str(httpx.URL(f"http://host{path}").join(one).path) in pages.PATHS, f"{path}: {one}"
    if path in PAGES:
        assert not re.search(r"<script>|<style| style=| on\w+=", text), "the policy would not let it run"


def test_what_they_ask_for_needs_a_key(client: httpx.Client) -> None:
    for path in ("/v1/models", "/v1/experts", "/v1/experts/heat"):
        assert client.get(path).status_code == 401
    assert client.post("/v1/chat/completions", json={}).status_code == 401


def test_nothing_else_of_the_machine_is_given_out(client: httpx.Client) -> None:
    for path in (
        "/web/",
        "/web",
        "/web/..%2fapp.py",
        "/web/%2e%2e/app.py",
        "/web/pages.py",
        "/web/../app.py",
    ):
        response = client.get(path, headers={"authorization": "Bearer secret"})
        assert response.status_code == 404, path


def test_a_browser_that_has_it_is_told_so(client: httpx.Client) -> None:
    first = client.get("/")
    again = client.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    head = client.head("/")
    assert head.status_code == 200
    assert head.headers["content-length"] == str(len(first.content))
    assert client.post("/").status_code == 405


def test_the_libraries_are_named_with_their_licences_and_stay_small() -> None:
    folder = Path(pages.__file__).parent / "static" / "vendor"
    licences = (folder / "LICENSES.txt").read_text()
    for name in (
        "markdown-it",
        "katex",
        "@highlightjs/cdn-assets",
        "swagger-ui-dist",
        "pdfjs-dist",
        "core-js",
    ):
        assert re.search(rf"^{re.escape(name)} \d+\.\d+\.\d+$", licences, re.MULTILINE)
    sizes = {file.name: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    # /docs alone loads them.
    swagger = sum(sizes.pop(name) for name in ("swagger-ui-bundle.js", "swagger-ui.css"))
    pdf = sum(sizes.pop(name) for name in ("pdf.min.mjs", "pdf.worker.min.mjs"))  # loaded with a PDF alone
    assert sum(sizes.values()) < 1_000_000
    assert swagger < 2_000_000
    assert pdf < 2_000_000
