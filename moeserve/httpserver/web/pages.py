"""The web pages: the files of the folder `static`, read once when the server starts. `static/vendor` has their
libraries, fetched by scripts/vendor_web.sh.

The content security policy lets a page load only the other files and talk only to this server, and text never becomes
HTML or script in it (trusted types). The reader of PDF files and the frame that shows HTML of a model have no network
access. Pages need no API key; their requests to the API do.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import Final

from fastapi import APIRouter, Request, Response

_MEDIA_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_PAGES: Final = {"chat.html": "/", "experts.html": "/experts", "docs.html": "/docs"}
_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "font-src": "'self'",
    "connect-src": "'self'",
    "worker-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
# The policy of Swagger's page, which builds HTML from text and sets styles on elements. Its pictures are in its style
# sheet, and its scripts come from this server.
_SWAGGER_POLICY: Final = {
    name: value
    for name, value in _POLICY.items()
    if name not in ("require-trusted-types-for", "trusted-types")
} | {"style-src": "'self' 'unsafe-inline'", "img-src": "'self' data:"}
# The chat starts one worker, which reads PDF files. Text may not become a script's URL, except through the
# trusted-types policy of this name, which can be created only once and returns only that worker's URL. Pictures of a
# message are data: URLs.
_CHAT_POLICY: Final = _POLICY | {
    "worker-src": "'self'",
    "trusted-types": "pdf-worker",
    "img-src": "'self' data:",
    "manifest-src": "'self'",
    "frame-src": "'self'",  # artifact.html: a frame that goes elsewhere by itself is stopped, too
}
# HTML that a model wrote runs in this frame, without an origin ("sandbox") and without network access.
_ARTIFACT_POLICY: Final = {name: "'none'" for name in _POLICY if "trusted-types" not in name} | {
    "script-src": "'unsafe-inline'",
    "style-src": "'unsafe-inline'",
    "img-src": "data: blob:",
    "media-src": "data: blob:",
    "font-src": "data:",
    "frame-ancestors": "'self'",
    "sandbox": "allow-scripts",
}
# The PDF worker reads untrusted files and needs only its scripts. It has no network access, so a malicious file cannot
# send data.
_PDF_POLICY: Final = dict.fromkeys(_POLICY, "'none'") | {
    "script-src": "'self'",
    "worker-src": "'self'",  # for browsers that apply worker-src to a worker's imports
    "require-trusted-types-for": "'script'",
}
_POLICIES: Final = {
    "chat.html": _CHAT_POLICY,
    "docs.html": _SWAGGER_POLICY,
    "artifact.html": _ARTIFACT_POLICY,
    "pdf_worker.js": _PDF_POLICY,
}
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-dns-prefetch-control": "off",  # prefetching would reveal the names of hosts in an answer
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated at each use, but sent again only after a change
}


class _File:
    def __init__(self, name: str, body: bytes) -> None:
        self.path = _PAGES.get(name, f"/web/{name}")
        self._body = body
        self._media_type = _MEDIA_TYPES[PurePath(name).suffix]
        policy = _POLICIES.get(name, _POLICY)
        self._headers = _HEADERS | {
            "content-security-policy": "; ".join(f"{word} {value}" for word, value in policy.items()),
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        }

    async def answer(self, request: Request) -> Response:
        """Answers 304 to a client that has this version already."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, media_type=self._media_type, headers=self._headers)


def _read_files(folder: Traversable, prefix: str = "") -> Iterator[_File]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _read_files(entry, f"{name}/")
        else:
            yield _File(name, entry.read_bytes())


_FILES: Final = list(_read_files(importlib.resources.files("moeserve") / "httpserver" / "web" / "static"))
PATHS: Final = frozenset(file.path for file in _FILES)

router = APIRouter()
for _file in _FILES:
    router.add_api_route(_file.path, _file.answer, methods=["GET", "HEAD"], include_in_schema=False)
