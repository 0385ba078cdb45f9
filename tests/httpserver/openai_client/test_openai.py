"""Completions and chat through the official openai client, against the real process and an echoing engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from moeserve.detokenizer.manager import RequestText
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.schema import GenerateRequest, RequestError, TextItem, TextOut, TokensItem, Usage
from tests.httpserver.openai_events import CHAT, TEXT, events
from tests.support.servers.engine_messages import CONTEXT, logprobs_of
from tests.support.servers.http_harness import NAME, HttpServer, tokens_of

if TYPE_CHECKING:
    from openai import OpenAI


def test_completion_answers_in_openais_shape(client: OpenAI, server: HttpServer) -> None:
    answer = client.completions.create(model=NAME, prompt=TEXT, max_tokens=5)
    prompt = server.tokenizer.encode(TEXT)
    assert answer.choices[0].text == server.tokenizer.decode(prompt[:5])
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == NAME
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 5)
    assert answer.model_extra is not None
    timings = answer.model_extra["timings"]
    assert (timings["queue_ms"], timings["prefill_ms"], timings["decode_ms"]) == (1.0, 2.0, 4.0)
    assert timings["decode_tokens_per_second"] == 1000.0  # four after the first, in 4 ms
    assert timings["prefill_tokens_per_second"] == len(prompt) / 2.0 * 1000


def test_sampling_fields_reach_the_engine(client: OpenAI, server: HttpServer) -> None:
    client.completions.create(
        model=NAME,
        prompt=TEXT,
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"7": -100, "8": 5},
        seed=11,
        stop=["one", "two"],
        logprobs=4,
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": -3,
        },
    )
    (request,) = server.requests
    sampling = request.sampling
    assert tokens_of(request) == server.tokenizer.encode(TEXT)
    assert (sampling.max_tokens, sampling.min_tokens) == (3, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    assert penalties == (0.1, -0.2, 1.1)
    assert sampling.logit_bias == {7: -100.0, 8: 5.0}
    assert (sampling.seed, sampling.logprobs, sampling.prompt_logprobs) == (11, 4, None)
    assert sampling.stop_token_ids == (*server.tokenizer.vocabulary.eos_ids, 9)
    assert request.text.stop == ("one", "two")
    assert request.text.include_stop
    assert not request.text.skip_special_tokens
    assert request.priority == -3


def test_defaults_are_vllms(client: OpenAI, server: HttpServer) -> None:
    client.completions.create(model=NAME, prompt=TEXT)
    client.chat.completions.create(model=NAME, messages=CHAT)
    completion, chat = server.requests
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == CONTEXT - len(tokens_of(chat))
    for request in (completion, chat):
        assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
        assert request.sampling.logprobs is None
    assert completion.sampling.seed != chat.sampling.seed


def test_ignore_eos_leaves_only_the_clients_stop_tokens(client: OpenAI, server: HttpServer) -> None:
    client.completions.create(model=NAME, prompt="a", extra_body={"ignore_eos": True, "stop_token_ids": [3]})
    assert server.requests[0].sampling.stop_token_ids == (3,)


def test_a_completion_near_the_end_of_the_context_gets_what_is_left(server: HttpServer) -> None:
    response = server.post("/v1/completions", {"prompt": [5] * (CONTEXT - 3)})
    assert response.json()["usage"]["completion_tokens"] == 3


def test_each_prompt_gets_n_choices_in_order(client: OpenAI, server: HttpServer) -> None:
    answer = client.completions.create(model=NAME, prompt=["Hello", TEXT], n=2, max_tokens=2, seed=3)
    hello, text = server.tokenizer.encode("Hello"), server.tokenizer.encode(TEXT)
    expected = [server.tokenizer.decode((ids * 2)[:2]) for ids in (hello, hello, text, text)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [request.sampling.seed for request in server.requests] == [3, 4, 3, 4]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(hello) + len(text)
    assert answer.usage.completion_tokens == 8


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]], ids=["ids", "lists of ids"])
def test_token_id_prompts(client: OpenAI, server: HttpServer, prompt: Any) -> None:
    client.completions.create(model=NAME, prompt=prompt, max_tokens=1)
    sent = [tokens_of(request) for request in server.requests]
    assert sent == (prompt if isinstance(prompt[0], list) else [prompt])


def test_echo_with_logprobs_covers_the_prompt(client: OpenAI, server: HttpServer) -> None:
    answer = client.completions.create(model=NAME, prompt=TEXT, max_tokens=2, echo=True, logprobs=2)
    choice = answer.choices[0]
    ids = server.tokenizer.encode(TEXT)
    assert choice.text == TEXT + server.tokenizer.decode(ids[:2])
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs == [None] + [-0.5] * (len(ids) + 1)
    assert logprobs.top_logprobs is not None
    expected: list[Any] = [None, {server.tokenizer.token_text(ids[1] + i): -0.5 - i for i in range(2)}]
    assert logprobs.top_logprobs[:2] == expected
    assert logprobs.text_offset is not None
    assert [choice.text[offset] for offset in logprobs.text_offset] == [t[0] for t in logprobs.tokens]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("echo", [True, False])
def test_text_offsets_are_places_in_the_text_that_is_returned(
    server: HttpServer, skips: bool, echo: bool
) -> None:
    """Also of tokens that are parts of a character, and of control tokens, which are left out."""
    special = min(server.tokenizer.vocabulary.special)
    parts = server.tokenizer.encode("a🦜b🦜")
    assert any(server.tokenizer.token_text(token_id) == "\ufffd" for token_id in parts)
    cut = parts[1]  # the first part of a character, which is broken off
    output = [*parts, special, cut, *server.tokenizer.encode(" end")]

    def says(server: HttpServer, request: GenerateRequest) -> None:
        text = RequestText(request.text, server.tokenizer.vocabulary.token_bytes, {special})
        for token_id in output:
            taken = text.take(TokensItem(request.id, [token_id], [logprobs_of(token_id, 1)]))
            scores = [logprobs_of(token_id, 1) for token_id in tokens_of(request)[1:]]
            asks = request.sampling.prompt_logprobs is not None and token_id is output[0]
            taken = msgspec.structs.replace(taken, prompt_logprobs=scores if asks else None)
            server.send(TextOut([taken]))
        usage = Usage(1, len(output), 0, 1.0, 2.0, 4.0)
        server.send(TextOut([TextItem(request.id, "", [], finish_reason="length", usage=usage)]))

    server.answer = says
    prompt = "x🦜y"
    body = {
        "prompt": prompt,
        "max_tokens": 20,
        "logprobs": 1,
        "skip_special_tokens": skips,
        "echo": echo,
        "n": 2,
    }
    whole = server.post("/v1/completions", body).json()["choices"]
    ids = [*(server.tokenizer.encode(prompt) if echo else []), *output]
    shown = [b"" if skips and one == special else server.tokenizer.token_bytes(one) for one in ids]
    goes_on = [0x80 <= (one or b" ")[0] < 0xC0 for one in shown]
    places = [len(b"".join(shown[:i]).decode(errors="replace")) - goes_on[i] for i in range(len(ids))]
    for choice in whole:
        assert choice["text"] == b"".join(shown).decode(errors="replace")
        assert choice["logprobs"]["text_offset"] == places
    streamed: list[list[int]] = [[], []]
    for event in events(server, "/v1/completions", body | {"stream": True}):
        (choice,) = event["choices"]
        streamed[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    assert streamed == [places, places]


def test_scoring_a_prompt_alone(server: HttpServer) -> None:
    """max_tokens 0 with echo; tokens as ids, since two tokens may have one text."""
    ids = list(range(4, CONTEXT + 4))
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 20, "return_tokens_as_token_ids": True}
    answer = server.post("/v1/completions", body).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in ids]
    assert all(len(top) == 20 for top in logprobs["top_logprobs"][1:])
    assert answer["choices"][0]["text"] == server.tokenizer.decode(ids, skip_special=False)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["timings"]["decode_tokens_per_second"] == 0.0


def test_the_chosen_token_is_in_top_logprobs_though_unlikely(server: HttpServer) -> None:
    def unlikely(server: HttpServer, request: GenerateRequest) -> None:
        logprob = TokenLogprob(3, float("-inf"), 900, (5, 6), (-0.1, -0.2))
        usage = Usage(1, 1, 0, 0.0, 0.0, 0.0)
        item = TextItem(request.id, "x", [3], [logprob], finish_reason="length", usage=usage)
        server.send(TextOut([item]))

    server.answer = unlikely
    body = {"prompt": [3], "max_tokens": 1, "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"token_id:5": -0.1, "token_id:6": -0.2, "token_id:3": -9999.0}]


def test_streamed_completion_in_pieces_with_usage(client: OpenAI, server: HttpServer) -> None:
    stream = client.completions.create(
        model=NAME, prompt=TEXT, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = list(stream)
    ids = server.tokenizer.encode(TEXT)
    assert [piece.choices[0].text for piece in pieces] == [server.tokenizer.token_text(i) for i in ids[:6]]
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 5 + ["length"]
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6
    assert last.model_extra is not None
    assert last.model_extra["timings"]["completion_tokens"] == 6
    assert len({piece.id for piece in [*pieces, last]}) == 1


def test_streamed_echo_and_logprobs_are_the_whole_answers(server: HttpServer) -> None:
    body = {"prompt": [TEXT, "Hello"], "max_tokens": 4, "echo": True, "logprobs": 1, "n": 2}
    whole = server.post("/v1/completions", body).json()["choices"]
    texts = [""] * 4
    offsets: list[list[int]] = [[] for _ in range(4)]
    for event in events(server, "/v1/completions", body | {"stream": True}):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [choice["text"] for choice in whole]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in whole]


def test_a_prompt_is_scored_once_for_all_its_choices(server: HttpServer) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2, "echo": True, "logprobs": 2, "n": 3}
    whole = server.post("/v1/completions", body).json()["choices"]
    assert [request.sampling.prompt_logprobs for request in server.requests] == [2, None, None] * 2
    assert [len(choice["logprobs"]["tokens"]) for choice in whole] == [5] * 3 + [4] * 3
    assert whole[1]["logprobs"] == whole[0]["logprobs"]
    assert None not in whole[1]["logprobs"]["token_logprobs"][1:]
    more = server.post("/v1/completions", body | {"echo": False, "prompt_logprobs": 1}).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in more] == [3] * 3 + [2] * 3


def test_best_of_returns_the_candidates_with_the_highest_logprob_a_token(server: HttpServer) -> None:
    """The longest is not the last for its length; one without tokens is."""
    logprobs = [[], [-1.0, -1.0], [-0.1, -0.2, -0.3, -0.1], [-0.4]]
    asked: list[GenerateRequest] = []

    def scored(server: HttpServer, request: GenerateRequest) -> None:
        candidate = len(asked)
        asked.append(request)
        found = [TokenLogprob(7, one, 1, (), ()) for one in logprobs[candidate]]
        usage = Usage(2, len(found), 0, 0.0, 0.0, 0.0)
        text = f"candidate {candidate}"
        server.send(
            TextOut([TextItem(request.id, text, [7] * len(found), found, None, "length", usage=usage)])
        )

    server.answer = scored
    body = {"prompt": [5, 6], "max_tokens": 4, "seed": 3, "n": 3, "best_of": 4}
    answer = server.post("/v1/completions", body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["candidate 2", "candidate 3", "candidate 1"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 3
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 7)
    assert [(one.sampling.seed, one.sampling.logprobs) for one in asked] == [(3, 0), (4, 0), (5, 0), (6, 0)]


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"n": 3, "best_of": 2}, "best_of: must be at least n, 3, got 2"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of: above n cannot be streamed"),
        ({"best_of": 2, "use_beam_search": True}, "best_of: cannot be combined with use_beam_search"),
    ],
)
def test_a_best_of_that_cannot_be_is_refused(server: HttpServer, more: dict[str, Any], cause: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "Hi"} | more)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "best_of"
    assert error["message"].startswith(cause)


def test_token_ids_of_prompt_and_answer(server: HttpServer) -> None:
    """Also of a token whose text is held back, for which there would be no piece otherwise."""

    def half_a_character_first(server: HttpServer, request: GenerateRequest) -> None:
        usage = Usage(2, 2, 0, 0.0, 0.0, 0.0)
        server.send(TextOut([TextItem(request.id, "", [7])]))
        server.send(TextOut([TextItem(request.id, "é", [8], finish_reason="length", usage=usage)]))

    server.answer = half_a_character_first
    body = {"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True}
    (whole,) = server.post("/v1/completions", body).json()["choices"]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == ([5, 6], [7, 8])
    pieces = [event["choices"][0] for event in events(server, "/v1/completions", body | {"stream": True})]
    assert [(piece["text"], piece["token_ids"]) for piece in pieces] == [("", [7]), ("é", [8])]
    assert [piece["prompt_token_ids"] for piece in pieces] == [[5, 6], None]
    plain = [
        event["choices"][0]
        for event in events(server, "/v1/completions", body | {"stream": True, "return_token_ids": False})
    ]
    assert [piece["text"] for piece in plain] == ["é"]
    assert "token_ids" not in plain[0]
    assert "prompt_token_ids" not in plain[0]


def test_continuous_usage_counts_up(server: HttpServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": TEXT, "max_tokens": 4, "stream": True, "stream_options": options}
    counts = [event["usage"]["completion_tokens"] for event in events(server, "/v1/completions", body)]
    assert counts == [1, 2, 3, 4, 4]


def test_clients_at_once_get_their_own_answers(client: OpenAI, server: HttpServer) -> None:
    prompts = [f"Number {i} of many" for i in range(32)]

    def ask(prompt: str) -> str:
        stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=40, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = server.tokenizer.encode(prompt)
        assert answer == server.tokenizer.decode((ids * 40)[:40])


def test_a_refusal_of_the_router_is_an_http_error(server: HttpServer) -> None:
    server.answer = lambda server, request: server.send(RequestError(request.id, 503, "the queue is full"))
    for stream in (False, True):
        response = server.post("/v1/completions", {"prompt": TEXT, "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["message"] == "the queue is full"


def test_request_id_is_echoed_or_given(server: HttpServer) -> None:
    given = server.post("/v1/completions", {"prompt": TEXT}, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "cmpl-abc-1"
    other = server.post("/v1/completions", {"prompt": TEXT}, headers={"x-request-id": "no spaces here"})
    assert other.headers["x-request-id"] != "no spaces here"
    assert other.headers["x-request-id"] in other.json()["id"]
