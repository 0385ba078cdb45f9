"""API keys and their names, refusals that name what is wrong with a key, and what a tenant does not find."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.httpserver.generation.chat import chat_prompt
from moeserve.httpserver.generation.chat.chat_formats import formats_of
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.transport.keys import ApiKeys, fault_of
from moeserve.messages.metric import HistogramCounts
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer import ChatRenderer, TextTokenizer
from tests.conftest import TINY_MODEL


def keys_of(tmp_path: Path, text: str, *given: str) -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text(text)
    return ApiKeys.from_config(ServerConfig(api_key=given, api_key_file=str(file)))


def test_keys_have_names(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "# who may\n\nalice  sk-1\nbob\tsk-2\n", "first", "second")
    assert [keys.name_of(key) for key in (b"first", b"second", b"sk-1", b"sk-2")] == [
        "key-1",
        "key-2",
        "alice",
        "bob",
    ]
    assert keys.name_of(b"sk-3") is None
    assert keys.name_of(b"") is None
    assert keys_of(tmp_path, "a k\na2 k2\n# a k3\n").name_of(b"k3") is None
    assert not ApiKeys.from_config(ServerConfig())


def test_what_a_key_stored_stays_its_own_when_others_come_and_go(tmp_path: Path) -> None:
    before = keys_of(tmp_path, "alice sk-1\n", "first", "second")
    after = keys_of(tmp_path, "alice sk-2\n", "second", "key-1")
    assert before.owner_of(b"second") == after.owner_of(b"second") != before.owner_of(b"first")
    assert before.owner_of(b"sk-1") == after.owner_of(b"sk-2")  # alice has a new key
    assert "second" not in before.owner_of(b"second")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("# nobody\n", "has no key"),
        ("alice sk-1\nsk-2\n", "line 2 of .* must be a name and a key"),
        ("alice sk 1\n", "line 1"),
        ("alice sk-1\nbob sk-1\n", "'bob' and 'alice' have the same key"),
    ],
)
def test_a_bad_key_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keys_of(tmp_path, text)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.from_config(ServerConfig(api_key_file=str(tmp_path / "none")))


def test_neither_another_tenant_nor_another_salt_finds_cached_tokens() -> None:
    """By the time that the encoding takes, it would know that a text was there before."""
    encoded: list[int] = []

    class Counting(TextTokenizer):
        def encode_batch(self, texts: Sequence[str], parse_special: bool = True) -> list[list[int]]:
            encoded.append(sum(map(len, texts)))
            return super().encode_batch(texts, parse_special)

    gguf = open_gguf(TINY_MODEL)
    tokenizer = Counting.from_gguf(gguf)
    renderer = ChatRenderer.from_gguf(gguf, tokenizer.vocabulary)
    text = ModelText.of(tokenizer, renderer, formats_of(ServerConfig(), tokenizer, *renderer.sources))
    content = "A tool's description. " * 200

    def is_encoded(tenant: str, salt: str) -> bool:
        encoded.clear()
        prompt = ChatPrompt([{"role": "user", "content": content}])
        asked = Asked(Caller(0.0, tenant=tenant), prompt, cache_salt=salt)
        asyncio.run(chat_prompt.encode(text, 1 << 16, asked, prompt, None))
        return sum(encoded) > len(content)

    callers = [("alice", ""), ("alice", "mine"), ("bob", ""), ("bob", "mine"), ("", "")]
    assert [is_encoded(*caller) for caller in callers] == [True] * 5
    assert [is_encoded(*caller) for caller in callers] == [False] * 5


def test_the_routers_histograms_are_exported() -> None:
    metrics = Metrics("m")
    counts = HistogramCounts(bounds=[1, 10.5], counts=[3, 4, 5], sum=2000.0)
    metrics.reported.load = msgspec.structs.replace(metrics.reported.load, idle_ms=counts)
    lines = metrics.render()[0].decode().splitlines()
    name = "moeserve:worker_idle_seconds"
    assert [line for line in lines if line.startswith(name)] == [
        f'{name}_bucket{{le="0.001",model_name="m"}} 3.0',
        f'{name}_bucket{{le="0.0105",model_name="m"}} 7.0',
        f'{name}_bucket{{le="+Inf",model_name="m"}} 12.0',
        f'{name}_count{{model_name="m"}} 12.0',
        f'{name}_sum{{model_name="m"}} 2.0',
    ]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (None, "none was sent"),
        (("authorization", "Bearer sk-3"), "the one that was sent is not known here"),
        (("authorization", "bearer  k "), "the one that was sent is not known here"),
        (("x-api-key", "sk-3"), "the one that was sent is not known here"),
        (("authorization", "Bearer "), "the Authorization header has none"),
        (("authorization", "Bearer"), "the Authorization header has none"),
        (("authorization", "Basic a2V5"), "the Authorization header is not of the form Bearer <key>"),
        (("authorization", "sk-1"), "the Authorization header is not of the form Bearer <key>"),
        (("x-api-key", ""), "the x-api-key header is empty"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_the_key(header: tuple[str, str] | None, says: str) -> None:
    headers = [] if header is None else [(header[0].encode(), header[1].encode())]
    assert fault_of(headers) == says
