"""The fixtures of models that see: Qwen3.5-MoE with Qwen3-VL's tower and a dense Gemma 4 with its own, each with three
pictures, and what transformers and llama.cpp make of them."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from tests.support.measuring.accuracy import log_softmax

FIXTURES: Final = Path(__file__).resolve().parents[2] / "fixtures" / "pictures"
NAME: Final = "tiny-qwen35moe-vision"
MODEL: Final = FIXTURES / f"{NAME}-f16.gguf"
TOWER: Final = FIXTURES / f"{NAME}-mmproj-f16.gguf"
GEMMA_FIXTURES: Final = FIXTURES.with_name("gemma4_pictures")
GEMMA_NAME: Final = "tiny-gemma4-vision"
GEMMA_MODEL: Final = GEMMA_FIXTURES / f"{GEMMA_NAME}-f16.gguf"
GEMMA_TOWER: Final = GEMMA_FIXTURES / f"{GEMMA_NAME}-f16-mmproj-f16.gguf"
GEMMA_TOKENS: Final = 70  # of a picture, at most
PICTURES: Final = ("square", "landscape", "wide")
# Fields of a chat request whose answer `check_first_token` reads.
FIRST_TOKEN: Final = {
    "max_tokens": 1,
    "logprobs": True,
    "top_logprobs": 5,
    "return_tokens_as_token_ids": True,
}


class PictureCase(NamedTuple):
    name: str
    path: Path
    size: tuple[int, int]  # height and width as the processor resizes it
    tokens: list[int]  # of the prompt, a placeholder for each of the picture's
    is_picture: list[bool]  # of each token
    truth: dict[str, np.ndarray]  # pixel_values, embeddings, position_ids, logits: transformers', float32
    llama_cpp: dict[str, np.ndarray]  # embeddings, text_logits

    @property
    def start(self) -> int:
        return self.is_picture.index(True)

    @property
    def num_tokens(self) -> int:
        return sum(self.is_picture)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def positions(self) -> bytes:
        """EmbeddingSpan.positions"""
        if "position_ids" not in self.truth:
            return b""
        ids = self.truth["position_ids"][:, self.start : self.start + self.num_tokens]
        return ids.astype(np.int32).tobytes()

    def resized(self) -> np.ndarray:
        """uint8 [height, width, 3]"""
        height, width = self.size
        with Image.open(self.path) as picture:
            return np.array(picture.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))


def errors(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns the relative error of each row."""
    difference = np.linalg.norm(found - truth, axis=1)
    return np.asarray(difference / np.linalg.norm(truth, axis=1))


def check_first_token(answer: dict[str, Any], case: PictureCase) -> None:
    """answer: a chat completion of the case's prompt, with FIRST_TOKEN. Its five likeliest tokens and their
    log-probabilities are those of transformers' logits."""
    assert answer["usage"]["prompt_tokens"] == len(case.tokens)
    truth = log_softmax(case.truth["logits"])[-1]
    (first,) = answer["choices"][0]["logprobs"]["content"]
    top = {int(one["token"].removeprefix("token_id:")): one["logprob"] for one in first["top_logprobs"]}
    assert set(top) == set(np.argsort(-truth)[:5].tolist())
    assert all(math.isclose(logprob, truth[token], abs_tol=0.02) for token, logprob in top.items())


@cache
def picture_cases() -> dict[str, PictureCase]:
    """Qwen's."""
    return _cases(FIXTURES, NAME)


@cache
def gemma_picture_cases() -> dict[str, PictureCase]:
    return _cases(GEMMA_FIXTURES, GEMMA_NAME)


def _cases(folder: Path, model: str) -> dict[str, PictureCase]:
    content = json.loads((folder / f"{model}-f16.golden.json").read_text())
    truth = _by_picture(folder / f"{model}-f16.truth.npz")
    llama_cpp = _by_picture(folder / f"{model}-f16.golden.npz")
    return {
        name: PictureCase(
            name,
            folder / case["picture"],
            tuple(case["resized"]) if "resized" in case else (case["height"], case["width"]),
            case["tokens"],
            [kind == 1 for kind in case["mm_token_type_ids"]],
            truth[name],
            llama_cpp[name],
        )
        for name, case in zip(PICTURES, content["cases"], strict=True)
    }


def _by_picture(path: Path) -> dict[str, dict[str, Any]]:
    with np.load(path) as arrays:
        return {
            name: {key.removeprefix(f"{name}_"): arrays[key] for key in arrays if key.startswith(f"{name}_")}
            for name in PICTURES
        }
