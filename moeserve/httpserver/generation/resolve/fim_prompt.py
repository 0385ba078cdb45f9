"""Fill-in-the-middle: the token ids of a prompt whose answer is the text between two texts.

The texts are users' code, so control tokens that are spelled out in them stay text. The layout with files of a
repository is llama-server's, and so is the choice of the parts that are left out of a prompt that is too long. Sources:
llama-server's README (/infill), and the Qwen2.5-Coder report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.request.asked import Asked, FimFile, FimPrompt
from moeserve.httpserver.transport.errors import ApiError
from moeserve.tokenizer.fill_in_middle import FimTokens
from moeserve.tokenizer.text_tokenizer import TextTokenizer

ANSWER_TOKENS: Final = 256  # tokens that are left for the answer if the request sets no limit
_REPOSITORY: Final = "myproject\n"
_CURRENT_FILE: Final = "filename\n"
# Written before each file, for vocabularies without a token that separates files.
_SNIPPET: Final = "\n\n--- snippet ---\n\n"


def _require_fim(text: ModelText, param: str) -> FimTokens:
    """Returns the model's tokens for fill-in-the-middle. Raises ApiError 400 if it has none."""
    if text.fim is None:
        message = (
            f"{param}: this model's vocabulary has no tokens for fill-in-the-middle; use a model for code"
        )
        raise ApiError(400, message, param=param, code="unsupported")
    return text.fim


async def encode_fim(
    text: ModelText, limit: int, asked: Asked, bound: int | None, prompt: FimPrompt
) -> list[int]:
    """Returns the prompt's token ids. limit: the most tokens of prompt and answer together; bound: the most tokens of
    the answer. Raises ApiError 400."""
    fim = _require_fim(text, prompt.param)
    if not prompt.is_cut_to_fit:
        for one in (prompt.prefix, prompt.suffix):
            if isinstance(one, str):
                text.check_length(one, limit, asked.prompt_param)
    reserved = min(asked.max_tokens or bound or ANSWER_TOKENS, limit // 4)
    head = [text.tokenizer.vocabulary.bos_id] if text.adds_bos else []
    ids = await asyncio.to_thread(_encode, text.tokenizer, fim, prompt, limit - reserved - len(head))
    return [*(token for token in head if token is not None), *ids]


def _encode(tokenizer: TextTokenizer, fim: FimTokens, prompt: FimPrompt, most: int) -> list[int]:
    """Returns the prompt's token ids. most: the number of tokens to which the prompt is cut."""
    prefix = prompt.prefix
    if isinstance(prefix, str):
        (prefix,) = tokenizer.encode_batch([prefix], parse_special=False)
    suffix = tokenizer.encode_rest(prompt.suffix, parse_special=False)
    begun = tokenizer.encode_rest(prompt.begun, parse_special=False) if prompt.begun else []
    files = _files(tokenizer, fim, prompt.files) if prompt.is_cut_to_fit else []
    if prompt.is_cut_to_fit:
        room = max(most - len(begun) - 3, 4)
        if len(prefix) + len(suffix) > room:
            suffix = suffix[: max(room // 4, room - len(prefix))]
            prefix = prefix[-(room - len(suffix)) :]
        files = files[max(len(files) - (room - len(prefix) - len(suffix)), 0) :]
    return [*files, fim.prefix, *prefix, fim.suffix, *suffix, fim.middle, *begun]


def _files(tokenizer: TextTokenizer, fim: FimTokens, files: Sequence[FimFile]) -> list[int]:
    def encoded(text: str) -> list[int]:
        return tokenizer.encode_rest(text, parse_special=False)

    if fim.repository is None or fim.separator is None:
        return [token for file in files for token in encoded(f"{_SNIPPET}{file.text}")]
    ids = [fim.repository, *encoded(_REPOSITORY)]
    for file in files:
        ids += [fim.separator, *encoded(f"{file.name}\n{file.text}\n")]
    return [*ids, fim.separator, *encoded(_CURRENT_FILE)]
