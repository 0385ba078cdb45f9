"""XTC, DRY, top-n-sigma, typical-p and orders of samplers, from a client's body to the engine's message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.servers.http_harness import HttpServer, tokens_of

CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
BODIES: dict[str, Any] = {
    "/completion": {"prompt": "Hi", "n_predict": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": CHAT,
}
LAST = ("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "top_n_sigma": 1.5,
    "typical_p": 0.8,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
}


@pytest.mark.parametrize("path", BODIES)
def test_settings_reach_the_engine(server: HttpServer, path: str) -> None:
    assert server.post(path, BODIES[path] | EVERYTHING).status_code == 200
    sampling = server.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in EVERYTHING} == EVERYTHING
    assert sampling.samplers == ()
    assert server.post(path, BODIES[path] | {"top_n_sigma": -1}).status_code == 200
    assert server.requests[-1].sampling.top_n_sigma == 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ("edskypmxt", LAST),
        (["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], LAST),
        (["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], LAST[1:2] + LAST[3:]),
        (["temperature", "top-k", "nucleus"], ("temperature", "top_k", "top_p")),
        ("t", ("temperature",)),
        # As SillyTavern sends it, and its preset of an earlier year, with names that llama-server drops.
        ([*LAST[:4], "typ_p", *LAST[5:], "adaptive_p"], LAST),
        (["top_k", "tfs_z", "typ_p", "typical_p", "min_p"], ("top_k", "typical_p", "min_p")),
        ([], ()),
    ],
)
def test_an_order_reaches_the_engine_and_what_it_leaves_out_is_off(
    server: HttpServer, path: str, asked: Any, order: tuple[str, ...]
) -> None:
    assert server.post(path, BODIES[path] | EVERYTHING | {"samplers": asked}).status_code == 200
    sampling = server.requests[-1].sampling
    assert sampling.samplers == order
    off = {"temperature": 1.0, "top_k": 0, "presence_penalty": 0.0, "top_n_sigma": 0.0}
    samplers = {"presence_penalty": "penalties"}
    for name, value in off.items():
        runs = samplers.get(name, name) in (order or LAST)
        assert getattr(sampling, name) == (EVERYTHING[name] if runs else value), name


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (["top_k", "fill"], "there is no sampler 'fill'; there are penalties, dry, "),
        ("kz", "there is no letter 'z'; there are e, d, "),
        (["top_k", "top_k"], "each sampler may be named only once"),
        (["top_k", "penalties"], "penalties must come first, then dry"),
        (["dry", "penalties"], "penalties must come first, then dry"),
        (5, "must be a list of samplers' names"),
        ([5], "must be a list of samplers' names"),
        ("k" * 33, "names too many samplers"),
    ],
)
def test_an_order_that_cannot_be_had_is_refused(
    server: HttpServer, path: str, asked: Any, sentence: str
) -> None:
    refused = server.post(path, BODIES[path] | {"samplers": asked})
    assert refused.status_code == 400
    assert "samplers" in refused.json()["error"]["message"]
    assert sentence in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "field",
    [
        *({"xtc_probability": 1.1}, {"xtc_threshold": -0.1}, {"typical_p": 1.1}, {"top_n_sigma": -1.5}),
        *({"dry_multiplier": -1}, {"dry_base": 0.9}, {"dry_allowed_length": -1}, {"dry_penalty_last_n": -2}),
        *(
            {"dry_sequence_breakers": [""]},
            {"dry_sequence_breakers": "x"},
            {"dry_sequence_breakers": ["x"] * 17},
        ),
        {"dry_sequence_breakers": ["x" * 41]},
    ],
)
def test_values_out_of_range_are_refused_by_name(
    server: HttpServer, path: str, field: dict[str, Any]
) -> None:
    refused = server.post(path, BODIES[path] | field)
    if path == "/completion" and "typical_p" in field:
        assert refused.status_code == 200  # as in llama-server: above 1 it is off
        return
    assert refused.status_code == 400
    assert next(iter(field)) in refused.json()["error"]["message"]


def sequences_of(server: HttpServer) -> set[tuple[int, ...]]:
    words = np.frombuffer(server.requests[-1].sampling.dry_breakers, np.int32)
    ends = np.flatnonzero(words == -1)
    assert len(words) == 0 or ends[-1] == len(words) - 1
    return {tuple(part[part >= 0].tolist()) for part in np.split(words, ends + 1)[:-1]}


def test_breakers_are_the_tokens_that_have_them_or_begin_them(server: HttpServer) -> None:
    path, body = "/completion", BODIES["/completion"]
    ids = {}
    for text in (":", "r:", "or", "\n"):
        server.post(path, body | {"prompt": text})
        ids[text] = tuple(tokens_of(server.requests[-1]))
    assert server.post(path, body).status_code == 200
    assert sequences_of(server) == set(), "only with DRY"
    assert server.post(path, body | {"dry_multiplier": 0.8}).status_code == 200
    assert {ids[":"], ids["\n"]} <= sequences_of(server)
    server.post(path, body | {"dry_multiplier": 0.8, "dry_sequence_breakers": ["r:"]})
    found = sequences_of(server)
    assert ids["r:"] in found
    assert (ids["or"][-1], *ids[":"]) in found, "a token that ends in r, then a colon"
    assert ids[":"] not in found
    server.post(path, body | {"dry_multiplier": 0.8, "dry_sequence_breakers": '["r:"]'})
    assert sequences_of(server) == found, "text-generation-webui's clients send the list as a text"


def test_beams_do_not_sample(server: HttpServer) -> None:
    for field in ({"xtc_probability": 0.5}, {"typical_p": 0.5}, {"dry_multiplier": 1}, {"top_n_sigma": 1}):
        refused = server.post("/v1/completions", {"prompt": "Hi", "use_beam_search": True} | field)
        assert refused.status_code == 400
        assert next(iter(field)) in refused.json()["error"]["message"]
    fine = {"prompt": "Hi", "use_beam_search": True, "top_n_sigma": -1, "xtc_threshold": 0.3}
    assert server.post("/v1/completions", fine).status_code == 200


def test_what_llama_servers_own_page_sends(server: HttpServer) -> None:
    """Every field that its settings have, as they stand at its defaults, but for those that change an answer here."""
    body = CHAT | {
        "reasoning_format": "auto",
        "temperature": 0.8,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "typ_p": 1,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "samplers": "edskypmxt",
        "timings_per_token": True,
        "cache_prompt": True,
    }
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert server.requests[-1].sampling.samplers == LAST
