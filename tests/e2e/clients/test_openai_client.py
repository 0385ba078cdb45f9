"""The official openai client against a real server."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import IS_BATCH_INVARIANT
from tests.e2e.completions import TEXT, at_once, completion
from tests.support.clients.official_clients import openai_client
from tests.support.servers.server import Server

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.completion_choice import CompletionChoice

MESSAGES: Any = [{"role": "user", "content": "Who jumps over the lazy dog?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return openai_client(server.base_url)


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def test_model_is_named_after_its_file(model: str) -> None:
    assert model == "tiny-qwen3moe-q4_k_m"


def test_completion(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=TEXT, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.model == model
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


@pytest.mark.skipif(not IS_BATCH_INVARIANT, reason="the candidates must be the same ones again")
def test_best_of_returns_the_likeliest_candidates(client: OpenAI, model: str) -> None:
    """Candidates are the choices of as large an `n`: those with the highest mean log-probability, best first."""
    asked: Any = {"model": model, "prompt": [TEXT, "Once"], "max_tokens": 9, "seed": 5, "temperature": 1.5}
    candidates = client.completions.create(n=5, logprobs=0, **asked)
    answer = client.completions.create(n=2, best_of=5, **asked)
    expected = []
    for prompt in (candidates.choices[:5], candidates.choices[5:]):
        ranked = sorted(prompt, key=lambda choice: -statistics.fmean(_logprobs(choice)))
        expected += [choice.text for choice in ranked[:2]]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None
    assert candidates.usage is not None
    assert answer.usage.completion_tokens == candidates.usage.completion_tokens


def _logprobs(choice: CompletionChoice) -> list[float]:
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    return choice.logprobs.token_logprobs


def test_streamed_completion_is_the_same_text_in_pieces(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=TEXT, **GREEDY)
    chunks = list(client.completions.create(model=model, prompt=TEXT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) > 5
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


def test_streamed_chat_ends_with_its_usage(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24
    assert all(piece.usage is None for piece in pieces)


def test_chat_template_arguments_reach_the_template(client: OpenAI, model: str) -> None:
    """Qwen3's template adds an empty thought, four tokens or more, when thinking is switched off."""

    def prompt_tokens(**arguments: Any) -> int:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=1, extra_body={"chat_template_kwargs": arguments}
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens(enable_thinking=False) >= prompt_tokens() + 4


def test_sixteen_clients_at_once_get_their_own_answers(client: OpenAI, model: str) -> None:
    questions = [f"Client {i} says: {TEXT * (i + 1)}" for i in range(16)]

    def ask(question: str) -> str:
        chunks = client.completions.create(model=model, prompt=question, stream=True, **GREEDY)
        return "".join(chunk.choices[0].text for chunk in chunks)

    alone = [ask(question) for question in questions]
    crowd = at_once(ask, questions)
    assert crowd == alone or not IS_BATCH_INVARIANT
    assert all(crowd)
    assert len(set(alone)) > 8


def test_n_choices_are_independent_and_reproducible(client: OpenAI, model: str) -> None:
    def ask() -> dict[int, str]:
        answer = client.completions.create(
            model=model, prompt=TEXT, n=3, seed=5, max_tokens=16, temperature=1
        )
        return {choice.index: choice.text for choice in answer.choices}

    first = ask()
    assert sorted(first) == [0, 1, 2]
    assert len(set(first.values())) == 3
    assert ask() == first


def test_n_streamed_choices_are_told_apart(client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": TEXT, "n": 3, "seed": 5, "max_tokens": 16}
    whole = client.completions.create(**request)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_lists_of_prompts_answer_in_order(client: OpenAI, server: Server, model: str) -> None:
    ids = server.post("/tokenize", {"prompt": TEXT})["tokens"]
    by_text = client.completions.create(model=model, prompt=["Hello", TEXT], n=2, **GREEDY)
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    by_ids = client.completions.create(model=model, prompt=[ids, ids[:2]], **GREEDY)
    end = None if IS_BATCH_INVARIANT else 8  # of the text that is compared
    assert by_ids.choices[0].text[:end] == by_text.choices[2].text[:end] == by_text.choices[3].text[:end]
    assert by_text.choices[0].text[:end] != by_text.choices[2].text[:end]


def test_seed_reproduces_and_another_seed_differs(client: OpenAI, model: str) -> None:
    def ask(seed: int | None) -> str:
        answer = client.completions.create(model=model, prompt=TEXT, seed=seed, max_tokens=24, temperature=1)
        return answer.choices[0].text

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)
    assert ask(None) != ask(None)


def straddling_stop(server: Server) -> tuple[str, str]:
    """A stop string that begins in one generated token and ends in the next, and the text before it."""
    choice = completion(server, prompt=TEXT, max_tokens=32, logprobs=0)
    text, tokens = choice["text"], choice["logprobs"]["tokens"]
    for left, right in itertools.pairwise(tokens[3:]):
        stop = left[-1:] + right[:1]
        position = text.find(left + right)
        if (
            len(stop) == 2
            and stop.isascii()
            and stop.isprintable()
            and stop not in left
            and stop not in right
        ):
            first = text.find(stop)
            if first == position + len(left) - 1:
                return stop, text[:first]
    raise AssertionError(f"no stop string straddles two tokens of {tokens}")


def test_stop_string_across_tokens_ends_the_text_and_never_leaks(
    client: OpenAI, server: Server, model: str
) -> None:
    stop, before = straddling_stop(server)
    answer = client.completions.create(
        model=model, prompt=TEXT, stop=[stop, "no such text"], **GREEDY | {"max_tokens": 32}
    )
    assert answer.choices[0].text == before
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == stop
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 32

    chunks = list(
        client.completions.create(
            model=model, prompt=TEXT, stop=stop, stream=True, **GREEDY | {"max_tokens": 32}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_completion_logprobs_cover_prompt_and_answer(client: OpenAI, server: Server, model: str) -> None:
    prompt = server.post("/tokenize", {"prompt": TEXT})["tokens"]
    answer = client.completions.create(model=model, prompt=TEXT, echo=True, logprobs=5, **GREEDY).choices[0]
    logprobs = answer.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    total = len(prompt) + 24
    assert {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs)} == {total}
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens) == answer.text
    assert answer.text.startswith(TEXT)
    for token, place in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert answer.text.startswith(token, place)
    generated = logprobs.top_logprobs[len(prompt) :]
    assert all(5 <= len(top) <= 6 for top in generated)
    assert all(
        max(top.values()) == chosen
        for top, chosen in zip(generated, logprobs.token_logprobs[len(prompt) :], strict=True)
    )


def test_chat_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 24
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert token.bytes is not None


def test_usage_says_what_was_cached_and_how_long_each_phase_took(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=TEXT * 20, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 0 <= cached < answer.usage.prompt_tokens
    assert answer.model_extra is not None
    timings = answer.model_extra["timings"]
    assert timings["queue_ms"] >= 0
    assert timings["prefill_ms"] > 0
    assert timings["decode_ms"] > 0
