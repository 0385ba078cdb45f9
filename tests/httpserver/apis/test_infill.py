"""Fill-in-the-middle: what editors send to /infill, /v1/completions and /api/generate, and the tokens it becomes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moeserve.httpserver.llama_server.text_limits import TextLimits
from moeserve.messages.schema import GenerateRequest, TextItem, TextOut
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.fill_in_middle import FimTokens
from moeserve.tokenizer.vocabulary import Vocabulary
from tests.support.clients.official_clients import openai_client
from tests.support.models.gguf_bytes import TOKEN_TYPES, TOKENS, gguf_bytes, model_metadata, model_tensors
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say, tokens_of
from tests.support.servers.waiting import within

if TYPE_CHECKING:
    from openai import OpenAI

CONTROL = 3
QWEN = (
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
# As llama.vim sends it (2026), with what a line under the cursor has.
VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": [{"text": "x = 1\n", "filename": "a.py"}, {"text": "y = 2\n", "filename": "b.py"}],
    "prompt": "    ret",
    "n_predict": 64,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        *("content", "timings/prompt_n", "timings/prompt_ms", "timings/predicted_n", "truncated"),
        "tokens_cached",
    ],
}
# It then sends what the next request will need, and reads no answer.
VIM_AHEAD = VIM | {
    "input_prefix": "",
    "input_suffix": "",
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
# As llama.vscode sends it (2026).
VSCODE = {
    **{key: VIM[key] for key in ("id_slot", "input_prefix", "input_suffix", "input_extra", "prompt")},
    "n_predict": 128,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "n_indent": 4,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}


def write_model(to: Path, tags: tuple[str, ...], **keys: Any) -> Path:
    """A model whose vocabulary ends with the tags, as control tokens."""
    metadata = model_metadata(
        tokenizer__ggml__tokens=[*TOKENS, *tags],
        tokenizer__ggml__token_type=[*TOKEN_TYPES, *([CONTROL] * len(tags))],
        **keys,
    )
    to.write_bytes(gguf_bytes(metadata, model_tensors()))
    return to


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    model = write_model(tmp_path_factory.mktemp("models") / "coder.gguf", QWEN)
    with http_server(model=str(model)) as server:
        yield server


@pytest.fixture(autouse=True)
def _as_new(coder: HttpServer) -> None:
    coder.begin_anew()


def prompt_text(server: HttpServer, number: int = -1) -> str:
    return server.tokenizer.decode(tokens_of(server.requests[number]), skip_special=False)


REPOSITORY = (
    "<|repo_name|>myproject\n"
    "<|file_sep|>a.py\nx = 1\n\n"
    "<|file_sep|>b.py\ny = 2\n\n"
    "<|file_sep|>filename\n"
    "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\n\nprint(add(1, 2))\n<|fim_middle|>    ret"
)


def test_what_llama_vim_sends(coder: HttpServer) -> None:
    coder.answer = say("urn", " a + b")
    found = coder.post("/infill", VIM)
    assert found.status_code == 200, found.text
    assert prompt_text(coder) == REPOSITORY
    body = found.json()
    assert body.keys() == {*VIM["response_fields"]}
    assert (body["content"], body["timings/predicted_n"], body["truncated"]) == ("urn a + b", 2, False)
    (request,) = coder.requests
    ends = {coder.tokenizer.token_text(token) for token in request.sampling.stop_token_ids}
    assert ends >= set(QWEN)
    ahead = coder.post("/infill", VIM_AHEAD)
    assert (ahead.status_code, ahead.json()) == (200, {})
    assert coder.requests[-1].sampling.max_tokens == 0


def test_what_llama_vscode_sends(coder: HttpServer) -> None:
    coder.answer = say("urn a + b")
    found = coder.post("/infill", VSCODE).json()
    assert [one["content"] for one in found] == ["urn a + b"] * 3
    assert [one["tokens_predicted"] for one in found] == [1] * 3
    assert prompt_text(coder) == REPOSITORY
    assert coder.post("/infill", VSCODE | {"stream": True}).status_code == 400


def test_a_stream(coder: HttpServer) -> None:
    coder.answer = say("urn", " a")
    text = coder.post("/infill", VIM | {"stream": True, "response_fields": ["stop"]}).text
    assert text.count('"content":') == 2
    assert text.strip().splitlines()[-1] == 'data: {"stop":true}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # Continue's and other clients of an OpenAI API with a suffix.
        ("/v1/completions", {"model": NAME, "max_tokens": 32, "temperature": 0.01, "stop": ["\n\n"]}),
        # Ollama's clients.
        ("/api/generate", {"model": NAME, "stream": False, "options": {"num_predict": 32}}),
    ],
)
def test_a_suffix(coder: HttpServer, path: str, body: dict[str, Any]) -> None:
    coder.answer = say("return")
    given = {"prompt": "def f():\n    ", "suffix": "\n\nf()"}
    found = coder.post(path, body | given)
    assert found.status_code == 200, found.text
    assert "return" in found.text
    assert prompt_text(coder) == "<|fim_prefix|>def f():\n    <|fim_suffix|>\n\nf()<|fim_middle|>"
    coder.post(path, body | given | {"suffix": ""})
    assert len(coder.requests) == 1 or "<|fim_" not in prompt_text(coder)


def test_openais_client(coder: HttpServer) -> None:
    client: OpenAI = openai_client(coder.url)
    coder.answer = say("return 1")
    found = client.completions.create(model=NAME, prompt=["def f():", "def g():"], suffix="f()", n=2)
    assert [choice.text for choice in found.choices] == ["return 1"] * 4
    assert prompt_text(coder) == "<|fim_prefix|>def g():<|fim_suffix|>f()<|fim_middle|>"
    ids = coder.tokenizer.encode("def h():")
    client.completions.create(model=NAME, prompt=ids, suffix="h()")
    assert prompt_text(coder) == "<|fim_prefix|>def h():<|fim_suffix|>h()<|fim_middle|>"


def test_ollama_says_that_the_model_inserts(coder: HttpServer, server: HttpServer) -> None:
    assert "insert" in coder.post("/api/show", {"model": NAME}).json()["capabilities"]
    assert "insert" not in server.post("/api/show", {"model": NAME}).json()["capabilities"]


def test_control_tokens_in_code_stay_text(coder: HttpServer) -> None:
    given = "s = '<|fim_middle|>'"
    body = {"input_prefix": given, "input_suffix": given, "input_extra": [{"text": given}]}
    coder.post("/infill", body | {"n_predict": 4})
    ids = tokens_of(coder.requests[-1])
    middle = coder.tokenizer.encode("<|fim_middle|>")
    assert len(middle) == 1
    assert ids.count(middle[0]) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/api/generate", {"model": NAME, "prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_other_models_refuse_it_by_name(
    server: HttpServer, path: str, body: dict[str, Any], param: str
) -> None:
    found = server.post(path, body)
    assert found.status_code == 400
    assert f"{param}: this model's vocabulary has no tokens for fill-in-the-middle" in found.text


@pytest.mark.parametrize(
    "body",
    [
        {"input_extra": [{"filename": "x" * 5000}]},
        {"input_extra": [{}] * 1025},
        {"n_cmpl": 0},
        {"n_cmpl": 17},
        {"input_prefix": ["a"]},
        {"n_indent": -1},
        {"response_fields": "content"},
        {"response_fields": ["a"] * 65},
    ],
)
def test_values_that_are_refused(coder: HttpServer, body: dict[str, Any]) -> None:
    assert coder.post("/infill", body).status_code == 400


def test_what_does_not_fit_is_left_out(coder: HttpServer) -> None:
    """The context has 512 tokens: files go first, from their beginning; then a prefix's beginning, a suffix's end."""
    body = {"n_predict": 100, "prompt": "go"}
    coder.post("/infill", body | {"input_prefix": "p" * 9, "input_extra": [{"text": "e" * 9000 + "!"}]})
    text = prompt_text(coder)
    assert "e!\n" in text
    assert "<|repo_name|>" not in text
    assert text.endswith("<|fim_prefix|>ppppppppp<|fim_suffix|><|fim_middle|>go")
    coder.post("/infill", body | {"input_prefix": "<" + "pq" * 4000 + ">", "input_suffix": "<" + "st" * 4000})
    ids, text = tokens_of(coder.requests[-1]), prompt_text(coder)
    assert len(ids) <= 512 - 100
    assert text.startswith("<|fim_prefix|>")
    assert "pq><|fim_suffix|><st" in text
    assert text.endswith("<|fim_middle|>go")
    too_long = {"prompt": "pq" * 9000, "suffix": "b", "max_tokens": 4}
    refused = coder.post("/v1/completions", too_long)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_an_answer_ends_with_its_indented_block(coder: HttpServer) -> None:
    coder.answer = say("return a\n", "    +", " b\n", "\n", "  ", "print", "(1)", "\nmore")
    found = coder.post("/infill", VIM | {"response_fields": []}).json()
    assert found["content"] == "return a\n    + b\n\n  "
    assert (found["stop_type"], found["tokens_predicted"]) == ("limit", 6)
    assert found["timings"]["predicted_n"] == 6


def test_what_is_not_wanted_any_more_is_aborted(coder: HttpServer) -> None:
    def endless(server: HttpServer, request: GenerateRequest) -> None:
        for text in ("x\n", "y"):
            server.send(TextOut([TextItem(request.id, text, server.tokenizer.encode("x")[:1])]))

    coder.answer = endless
    assert coder.post("/infill", VIM).json()["content"] == "x\n"
    assert within(30, lambda: coder.requests[-1].id in coder.aborted)


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        (["a\n    b\n  c"], "a\n    b\n  "),
        (["a", "\n", "  ", "  b", "\n\n\n", "\t\t\t\tc", "\nd", "e"], "a\n    b\n\n\n\t\t\t\tc\n"),
        (["  a\n    b"], "  a\n    b"),
    ],
)
def test_indentation(pieces: list[str], kept: str) -> None:
    limits = TextLimits(4, None)
    found = ""
    for piece in pieces:
        found += limits.take(piece)
        if limits.is_reached:
            break
    assert found == kept


def test_the_time_counts_from_the_first_token_and_ends_at_a_lines_end() -> None:
    times: list[float] = []
    limits = TextLimits(0, 1.0, lambda: times[-1])
    for now, text, ends in (
        (100.0, "a\n", False),
        (100.9, "b\n", False),
        (101.5, "c", False),
        (101.6, "\n", True),
    ):
        times.append(now)
        assert limits.take(text) == text
        assert limits.is_reached == ends


@pytest.mark.parametrize(
    "tags",
    [
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"),  # Granite, StarCoder
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
        ("<PRE>", "<SUF>", "<MID>", "<EOT>"),  # CodeLlama
    ],
)
def test_tokens_known_by_their_texts(tmp_path: Path, tags: tuple[str, ...]) -> None:
    gguf = open_gguf(write_model(tmp_path / "m.gguf", tags))
    found = FimTokens.from_gguf(gguf, Vocabulary.from_gguf(gguf))
    assert found is not None
    first = len(TOKENS)
    assert (found.prefix, found.suffix, found.middle) == (first, first + 1, first + 2)
    assert found.repository is None


def test_tokens_that_the_file_names(tmp_path: Path) -> None:
    keys = {
        f"tokenizer__ggml__fim_{role}_token_id": len(TOKENS) + i
        for i, role in enumerate(("pre", "suf", "mid"))
    }
    gguf = open_gguf(write_model(tmp_path / "m.gguf", ("[A]", "[B]", "[C]"), **keys))
    found = FimTokens.from_gguf(gguf, Vocabulary.from_gguf(gguf))
    assert found is not None
    assert (found.prefix, found.middle) == (len(TOKENS), len(TOKENS) + 2)
    gguf = open_gguf(write_model(tmp_path / "n.gguf", ("<PRE>", "<SUF>")))
    assert FimTokens.from_gguf(gguf, Vocabulary.from_gguf(gguf)) is None


def test_files_without_a_token_for_them_are_snippets(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    with http_server(model=str(model)) as server:
        assert server.post("/infill", VIM).status_code == 200
        assert prompt_text(server) == (
            "\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny = 2\n"
            "<fim_prefix>def add(a, b):\n<fim_suffix>\n\nprint(add(1, 2))\n<fim_middle>    ret"
        )
