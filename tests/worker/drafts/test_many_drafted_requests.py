"""Ten thousand requests, by night: with drafts each has the tokens and logprobs that it has without, whatever it asks
for, whoever is served beside it, and whatever happens to the worker.

MOESERVE_DRAFTED_REQUESTS: how many, of all models together.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import GenerateRequest
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner
from moeserve.worker.runner import Runner
from tests.conftest import OWN_FIXTURES
from tests.support.models.eagle3_head import Head
from tests.support.models.glm5next_block import Glm5NextFolder
from tests.support.models.next_token_folder import COHERE, NextTokenFolder
from tests.support.router.router_world import request
from tests.support.worker.foreseen_drafts import Foreseen, whole_texts
from tests.support.worker.served_answers import load, lose_at, serve

MOST, BATCH = 4, 50
DRAFTS = '{"method": "%s", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'
# Attention alone; windows; recurrent states (five kinds), without and with a next-token block; ones that begin dense;
# latent attention, with a choice of keys; inputs of layers. Those in folders are of the wider fixtures.
MODELS = {
    "qwen3moe": ("tiny-qwen3moe-q4_k_m.gguf", "ngram"),
    "gptoss": ("families/tiny-gptoss-mxfp4.gguf", "ngram"),
    "qwen35moe": ("families/tiny-qwen35moe-f16.gguf", "auto"),
    "qwen35": ("next/tiny-qwen35-f16.gguf", "auto"),
    "glm4moe": ("families/tiny-glm4moe-f16.gguf", "auto"),
    "glmdsa": ("next/tiny-glmdsa-f16.gguf", "auto"),
    "hyv3": ("next/tiny-hyv3-f16.gguf", "auto"),
    "gemma4": ("families/tiny-gemma4-f16.gguf", "ngram"),
    "mimo2": ("tiny-mimo2-q4_k_m.gguf", "ngram"),
    "kimilinear": ("tiny-kimilinear-f16.gguf", "ngram"),
    "nemotronh": ("tiny-nemotronhmoe-f16.gguf", "ngram"),
    "qwen3next": ("tiny-qwen3next-q4_k_m.gguf", "ngram"),
    "gemma4e": ("tiny-gemma4e-f16.gguf", "ngram"),
    "falconh1": ("tiny-falconh1norm-f16.gguf", "ngram"),
    "granitehybrid": ("tiny-granitehybrid-f16.gguf", "ngram"),
    "lfm2moe": ("tiny-lfm2moe-f16.gguf", "ngram"),
    "step35": ("tiny-step35-q4_k_m.gguf", "ngram"),
    "llama4": ("tiny-llama4-q4_k_m.gguf", "ngram"),
    "bailing2": ("tiny-bailing2-q4_k_m.gguf", "ngram"),
    "demonstration": ("../../moeserve/assets/moeserve-demo-q8_0.gguf", "ngram"),  # the one that was trained
}
# Folders with next-token blocks, which are made here.
MADE: dict[str, Callable[[Path], Path]] = {
    "glm5next": lambda folder: Glm5NextFolder(folder).path,
    "cohere2moe": lambda folder: NextTokenFolder(folder, "cohere2_moe", **COHERE).path,
}
# A small model for which an EAGLE-3 head drafts.
EAGLE = {"eagle3": OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.gguf"}
BATCHES = -(
    -int(os.environ.get("MOESERVE_DRAFTED_REQUESTS", "10000")) // (BATCH * len(MODELS | MADE | EAGLE))
)

WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
OBJECT = json.dumps({"grammars": [{"json_schema": WEATHER}]})
NAME = json.dumps('<tool_call>{"name": "weather", "arguments": ')
CALL = json.dumps(
    {
        "grammars": [
            {"lark_grammar": f'start: {NAME} args "}}</tool_call>"\nargs: %json {json.dumps(WEATHER)}'}
        ]
    }
)
FEATURES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": dict.fromkeys((5, 7, 9), 100.0)},  # so that the text repeats itself
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"bad_sequences": ((7, 5), (9, 11, 5)), "logit_bias": {5: 3.0, 7: 3.0, 9: 3.0, 11: 3.0}},
    {"stop_token_ids": tuple(range(3, 60)), "min_tokens": 5},
    {"dry_multiplier": 0.8, "logit_bias": dict.fromkeys((5, 7, 9), 8.0)},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"grammar": OBJECT},
    {"grammar": CALL},
]


@pytest.fixture(scope="module", params=[*MODELS, *MADE, *EAGLE])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    if request.param in EAGLE:
        path = EAGLE[request.param]
        shape = read_shape(open_model(path))
        taps = [1, shape.num_layers // 2, shape.num_layers]
        head = Head(shape.hidden_size, shape.vocab_size, taps, scored=64)
        file = head.write_gguf(tmp_path_factory.mktemp("head") / "head.gguf")
        return load(path, speculative_config=json.dumps(json.loads(DRAFTS % "auto") | {"model": str(file)}))
    if request.param in MADE:
        path = MADE[request.param](tmp_path_factory.mktemp("made"))
        return load(path, speculative_config=DRAFTS % "auto")
    name, method = MODELS[request.param]
    path = OWN_FIXTURES / name
    if not path.exists():
        path = Path(request.getfixturevalue("wide_fixtures")) / name
    return load(path, speculative_config=DRAFTS % method)


@pytest.fixture(scope="module")
def runner(model: CpuModel) -> Runner:
    return build_cpu_runner(model)


@pytest.fixture(scope="module")
def plain(model: CpuModel) -> Runner:
    return build_cpu_runner(
        dataclasses.replace(model, config=dataclasses.replace(model.config, speculative_config=None))
    )


def some(rng: random.Random, vocab: int) -> list[GenerateRequest]:
    """A batch; a third goes on from prompts of others, so that the prefix cache has them."""
    messages: list[GenerateRequest] = []
    prompts: list[list[int]] = []
    for id in range(BATCH):
        phrase = [rng.randrange(3, vocab) for _ in range(rng.randint(3, 12))]
        prompt = (phrase * 9)[: rng.randint(2, 60)] + [
            rng.randrange(3, vocab) for _ in range(rng.randint(1, 4))
        ]
        if prompts and rng.random() < 0.3:
            prompt = rng.choice(prompts)[:70] + prompt[:20]
        prompts.append(prompt)
        length = rng.randint(1, 30)
        sampling = {
            "max_tokens": length,
            "temperature": rng.choice([0.0, 0.7, 1.5]),
            "seed": rng.randrange(1 << 40),
            "logprobs": rng.choice([None, 0, 3]),
        }
        message = request(id, prompt, length)
        params = SamplingParams(**(sampling | rng.choice(FEATURES)))
        messages.append(msgspec.structs.replace(message, sampling=params))
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BATCHES))
def test_as_without_drafts(model: CpuModel, runner: Runner, plain: Runner, seed: int) -> None:
    rng = random.Random(f"{Path(model.config.model).name} {seed}")
    ready = runner.ready()
    requests = some(rng, ready.vocab_size)
    expected, _ = serve(plain, requests, 0)
    rows = runner._drafts
    assert rows is not None
    own = rows._drafter
    if seed % 2:
        rows._drafter = Foreseen(
            rows._sequences.tokens, whole_texts(requests, expected), rng.choice([0.5, 0.9])
        )
    limits: dict[str, Any] = rng.choice(
        [{}, {"num_kv_slots": 400}, {"max_num_seqs": 1}, {"reuse_prefixes": False}]
    )
    chunks = rng.choice([24, 60, 256])
    found, report = serve(
        runner, requests, MOST, lose_at(*rng.choice([(), (3, 17)])), max_num_batched_tokens=chunks, **limits
    )
    rows._drafter = own
    assert found.keys() == expected.keys()
    for message in requests:
        assert found[message.id] == expected[message.id], message
    assert report.draft_tokens > 0
