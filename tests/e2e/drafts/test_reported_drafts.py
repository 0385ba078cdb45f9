"""What users of other servers reported of speculative decoding in 2026, asked of a server that drafts and of one that
does not: the answers must be the same. Each test names the report."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import jsonschema
import pytest

from tests.e2e.completions import TEXT
from tests.e2e.drafts.drafted_answers import FEW, drafting_server, same
from tests.e2e.survival.killed_answers import CHAT, text
from tests.support.servers.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine("answers are the same bit for bit on the CPU alone")]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def test_words_at_the_borders_of_bytes(plain: Server, drafting: Server) -> None:
    """vllm#52469: a stream drops words where several tokens make a character. Here most tokens are parts of some."""
    parts = plain.post("/tokenize", {"prompt": "é→😀", "add_special_tokens": False})["tokens"]
    bias = {str(token): 100 for token in (*parts, 300)}
    asked = [text(i, 80, temperature=1, seed=i, logit_bias=bias) for i in range(6)]
    whole = same(plain, drafting, asked)
    assert any("😀" in one["choices"][0]["text"] or "�" in one["choices"][0]["text"] for one in whole)


def test_biases_and_cuts_at_every_token(plain: Server, drafting: Server) -> None:
    """sglang#10617: logit_bias and min_p hold for some tokens only."""
    asked = [
        text(1, 60, temperature=1, seed=1, logit_bias=FEW | {"310": -100}),
        text(2, 60, temperature=1.5, seed=2, min_p=0.3, logit_bias=dict.fromkeys(FEW, 8)),
        text(3, 60, temperature=1, seed=3, logit_bias=FEW, min_p=0.1, presence_penalty=1.5),
    ]
    whole = same(plain, drafting, asked)
    banned = plain.post("/detokenize", {"tokens": [310]})["prompt"]
    assert banned not in whole[0]["choices"][0]["text"]


def test_lengths_inside_a_draft(plain: Server, drafting: Server) -> None:
    """Answers end at max_tokens and at a stop string, wherever in a draft that is."""
    asked = [text(7, length, temperature=1, seed=7, logit_bias=FEW) for length in range(20, 29)]
    whole = same(plain, drafting, asked)
    assert [one["usage"]["completion_tokens"] for one in whole] == list(range(20, 29))
    said = whole[-1]["choices"][0]["text"]
    same(
        plain, drafting, [(path, body | {"stop": [said[len(said) // 2 :][:3]]}) for path, body in asked[-2:]]
    )


def test_logprobs_of_several_choices(plain: Server, drafting: Server) -> None:
    """sglang#17349 fails with logprobs; 1Cat-vLLM#656 mixes up sampled requests once there are more than two."""
    asked = [text(i, 50, temperature=1, seed=i, n=3, logprobs=4, logit_bias=FEW) for i in range(5)]
    for whole in same(plain, drafting, asked):
        assert [len(one["logprobs"]["token_logprobs"]) for one in whole["choices"]] == [50] * 3


def test_forms_end(plain: Server, drafting: Server) -> None:
    """sglang#9187 and #21723, vllm#9423: an answer in a form does not end, or ends the server."""
    formats = (FORMAT, {"type": "json_object"})
    asked = [
        (
            CHAT,
            {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 400, "response_format": form}
            | how,
        )
        for form in formats
        for how in ({"temperature": 0}, {"temperature": 1, "seed": 2}, {"temperature": 1.5, "seed": 3})
    ]
    ended = [
        json.loads(whole["choices"][0]["message"]["content"])
        for whole, (_, body) in zip(same(plain, drafting, asked), asked, strict=True)
        if whole["choices"][0]["finish_reason"] == "stop" and body["response_format"] is FORMAT
    ]
    assert ended  # others write white space until they are cut
    for found in ended:
        jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize("budget", [1, 5, 12, 23])
def test_reasoning_ends_inside_a_draft(plain: Server, drafting: Server, budget: int) -> None:
    """vllm#39573: the budget of reasoning is not kept; vllm#36138: behind it, the answer has not its form."""
    ids = {tag: plain.post("/tokenize", {"prompt": tag})["tokens"][0] for tag in ("<think>", "</think>")}
    bias = FEW | {str(ids["<think>"]): 100, str(ids["</think>"]): -100}
    asked = [
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": f"{seed} Well?"}],
                "response_format": FORMAT,
                "chat_template_kwargs": {"thinking_budget": budget},
                "logit_bias": bias,
                "temperature": 1,
                "seed": seed,
                "max_tokens": 400,
            },
        )
        for seed in range(3)
    ]
    for whole in same(plain, drafting, asked):
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        # The budget, and the tags with the line ends beside them.
        assert budget < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 5


def test_behind_long_prompts(plain: Server, drafting: Server) -> None:
    """halo-box/strix-llama.cpp#76, llama.cpp#23658: no draft is right behind long prompts, or at some lengths of the
    context. Here the prompts take several steps, and the answers reach the end of the context."""
    (model,) = httpx.get(plain.base_url + "/v1/models").json()["data"]
    context = model["max_model_len"]
    asked = [
        text(9, 64, prompt=[300, 310, 320, 330] * 400, temperature=1, seed=1, logit_bias=FEW),
        text(9, 64, prompt=[300, 310, 320] * ((context - 64) // 3), temperature=1, seed=2, logit_bias=FEW),
    ]
    same(plain, drafting, asked, accepted=20)


def test_a_short_request_behind_a_long_one(plain: Server, drafting: Server) -> None:
    """llama.cpp#27852: drafts are taken from the request that had the slot before; #27296: answers of others leak."""
    for seed in range(3):
        long = text(seed, 60, prompt=[400 + seed, 410, 420] * 200, temperature=1, seed=seed, logit_bias=FEW)
        short = text(seed, 40, prompt=[300, 310], temperature=1, seed=seed, logit_bias=FEW)
        same(plain, drafting, [long, short])


@pytest.mark.parametrize("number", [1, 3, 16])
def test_any_number_of_drafts(plain: Server, tiny_model: Path, number: int) -> None:
    """llama.cpp#23302: the text changes with the number of drafts."""
    asked = [text(i, 120, temperature=i % 2, seed=i, logit_bias=FEW) for i in range(4)]
    with drafting_server(tiny_model, number) as server:
        same(plain, server, asked)
