"""Keys of requests over HTTP: their names, salts and bounds, and a refusal by the router."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from moeserve.messages.schema import GenerateRequest, RequestError
from tests.support.servers.http_harness import HttpServer, echo, http_server, silence
from tests.support.servers.waiting import within


def test_requests_carry_the_name_of_their_key_and_their_salt(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-alice\n")
    with http_server(api_key=("sk-1",), api_key_file=str(tmp_path / "keys")) as server:
        with httpx.Client(base_url=server.url) as client:  # one connection for all
            for key, body in (
                ("sk-alice", {"prompt": "Hi", "cache_salt": "mine"}),
                ("sk-1", {"prompt": "Hi"}),
                ("sk-alice", {"prompt": "Hi", "stream": True}),
            ):
                headers = {"authorization": f"Bearer {key}"}
                assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "cache_salt": "s"}
            headers = {"authorization": "Bearer sk-1"}
            assert client.post("/v1/chat/completions", json=chat, headers=headers).status_code == 200
        seen = [(request.key_name, request.cache_salt) for request in server.requests]
        assert seen == [("alice", "mine"), ("key-1", ""), ("alice", ""), ("key-1", "s")]


def test_a_full_queue_is_a_503_with_the_routers_retry_after() -> None:
    def refuse(server: HttpServer, request: GenerateRequest) -> None:
        server.send(RequestError(request.id, 503, "the server is busy: too many", retry_after=42))

    with http_server() as server:
        server.answer = refuse
        response = server.post("/v1/completions", {"prompt": "Hi"})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "42"
        assert response.json()["error"]["code"] == "overloaded"
        assert "too many" in response.json()["error"]["message"]


def test_a_hangup_reads_the_file_of_keys_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sk-1\n")

    def status(server: HttpServer, key: str) -> int:
        return httpx.get(server.url + "/v1/models", headers={"x-api-key": key}).status_code

    with http_server(api_key_file=str(file)) as server:
        assert (status(server, "sk-1"), status(server, "sk-2")) == (200, 401)
        file.write_text("bob sk-2\n")
        server.process.send_signal(signal.SIGHUP)
        assert within(30, lambda: status(server, "sk-2") == 200)
        assert status(server, "sk-1") == 401
        file.write_text("# no key\n")  # refused: the keys stay
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert (status(server, "sk-1"), status(server, "sk-2")) == (401, 200)


@pytest.mark.parametrize(("options", "warns"), [({}, True), ({"api_key": ("secret",)}, False)])
def test_a_server_that_is_open_to_all_says_so(
    capfd: pytest.CaptureFixture[str], options: dict[str, Any], warns: bool
) -> None:
    with http_server(host="0.0.0.0", **options):
        assert ("whoever reaches 0.0.0.0 may use this server" in capfd.readouterr().err) == warns


def test_open_requests_of_one_key_have_a_bound() -> None:
    """Another key's are answered, and the key's own when its first has ended."""
    one, other = ({"authorization": f"Bearer {key}"} for key in ("one", "other"))
    body = {"prompt": "Hi", "max_tokens": 1}
    with http_server(api_key=("one", "other"), max_requests_per_key=1) as server:
        server.answer = silence
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as waiting:
            content = orjson.dumps(body)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {one['authorization']}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            waiting.sendall(head.encode() + content)
            assert within(30, lambda: len(server.requests) == 1)
            server.answer = echo
            refused = server.post("/v1/completions", body, headers=one)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert "this API key has 1 open requests" in refused.json()["error"]["message"]
            assert server.post("/v1/completions", body, headers=other).status_code == 200
            assert server.get("/health", headers=one).status_code == 200
        assert within(30, lambda: server.post("/v1/completions", body, headers=one).status_code == 200)
