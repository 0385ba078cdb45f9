"""A local Hugging Face Hub: the small part of its API that fetching a model needs, over real files.

As the hub does, it answers with ETag and X-Repo-Commit, redirects large files to another host (here: localhost instead
of 127.0.0.1), which must not see the token, and serves ranges there.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000  # bytes from which a file lies on the other host


@dataclass
class Hub:
    """The fields may be changed while it runs."""

    root: Path  # org/repo/files
    tokens: dict[str, str] = field(default_factory=dict)  # of private repositories
    gated: set[str] = field(default_factory=set)
    break_after: int | None = None  # bytes of a file, after which every connection breaks
    stall_after: int | None = None  # bytes, after which nothing comes any more
    down: bool = False  # 503 for everything
    failing: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)  # of api, resolve, cdn
    damaged: bool = False  # large files come with their last byte changed
    ignores_ranges: bool = False  # whole files come, whatever was asked for
    revisions: set[str] = field(default_factory=lambda: {"main", COMMIT, "v1.0"})
    other: str | None = None  # the answer to everything, of a server that is no hub
    port: int = 0
    scheme: str = "http"
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    leaked: list[str] = field(default_factory=list)  # tokens that the other host has seen

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def downloads(self) -> list[tuple[str, str | None]]:
        """File and Range of each request for a file's content."""
        return [
            (Path(path).name, span)
            for method, path, span in self.requests
            if method == "GET" and "/cdn/" in path
        ]

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._record])
        app.router.add_get("/api/models/{org}/{repo}", self._info)
        app.router.add_get("/api/models/{org}/{repo}/revision/{revision}", self._info)
        app.router.add_get("/{org}/{repo}/resolve/{revision}/{file:.+}", self._resolve)
        app.router.add_get("/cdn/{org}/{repo}/{file:.+}", self._content)
        return app

    @web.middleware
    async def _record(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path, request.headers.get("Range")))
        if self.down:
            return web.Response(status=503)
        for part, (status, headers) in self.failing.items():
            if f"/{part}/" in request.path:
                return web.Response(status=status, headers=headers, text="<html>Sorry</html>")
        if self.other is not None:
            return web.Response(text=self.other)
        return await handler(request)

    def _refusal(self, request: web.Request) -> web.Response | None:
        name = f"{request.match_info['org']}/{request.match_info['repo']}"
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if name in self.gated:
            return web.Response(
                status=403, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "Ask first."}
            )
        if given == "wrong":
            return web.Response(
                status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}
            )
        if request.match_info.get("revision", "main") not in self.revisions:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        if not (self.root / name).is_dir() or self.tokens.get(name, given) != given:
            return web.Response(status=401 if not given else 404, headers={"X-Error-Code": "RepoNotFound"})
        return None

    async def _info(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        folder = self.root / request.match_info["org"] / request.match_info["repo"]
        siblings = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            entry: dict[str, str | int] = {"rfilename": path.relative_to(folder).as_posix()}
            if "blobs" in request.query:
                entry |= {"size": path.stat().st_size, "blobId": sha(path)}
            siblings.append(entry)
        return web.json_response({"id": folder.name, "sha": COMMIT, "siblings": siblings})

    async def _resolve(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        info = request.match_info
        path = self.root / info["org"] / info["repo"] / info["file"]
        headers = {"X-Repo-Commit": COMMIT}
        if not path.is_file():
            return web.Response(status=404, headers=headers | {"X-Error-Code": "EntryNotFound"})
        if path.stat().st_size < LARGE:
            return web.Response(body=path.read_bytes(), headers=headers | {"ETag": f'"{git_sha(path)}"'})
        headers |= {"X-Linked-ETag": f'"{sha(path)}"', "X-Linked-Size": str(path.stat().st_size)}
        headers["Location"] = (
            f"{self.scheme}://localhost:{self.port}/cdn/{info['org']}/{info['repo']}/{info['file']}"
        )
        return web.Response(status=302, headers=headers)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        self.leaked += request.headers.getall("Authorization", [])
        info = request.match_info
        body = (self.root / info["org"] / info["repo"] / info["file"]).read_bytes()
        if self.damaged:
            body = body[:-1] + bytes([body[-1] ^ 1])
        ranged = "Range" in request.headers and not self.ignores_ranges
        start = (request.http_range.start or 0) if ranged else 0
        status = 206 if ranged else 200
        response = web.StreamResponse(status=status, headers={"Content-Length": str(len(body) - start)})
        if status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        await response.prepare(request)
        for limit in (self.break_after, self.stall_after):
            if limit is not None and len(body) - start > limit:
                await response.write(body[start : start + limit])
                while self.stall_after is not None:
                    await asyncio.sleep(0.02)
                assert request.transport is not None
                request.transport.abort()
                return response
        await response.write(body[start:])
        return response


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_sha(path: Path) -> str:
    """As git names a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub(root: Path, encrypted: ssl.SSLContext | None = None) -> Iterator[Hub]:
    """A hub of the repositories root/org/repo, on a free port, in a thread of its own."""
    hub = Hub(root, scheme="https" if encrypted else "http")
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(hub.application(), shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=encrypted)
        await site.start()
        hub.port = runner.addresses[0][1]

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()
