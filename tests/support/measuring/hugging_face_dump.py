"""A dump of Hugging Face's own forward pass over the tokens of one of ours, to be compared with it.

    python launch.py --model DIR --debug-dump OURS ...
    python -m tests.support.measuring.hugging_face_dump DIR OURS THEIRS
    moeserve compare-dumps OURS THEIRS

DIR: a folder that transformers can load, or a GGUF file that it can dequantise. A step of the dump is a text: the
longest runs of tokens that OURS computed, from their first token on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moeserve.cli.compare_dumps.reader import Dump
from moeserve.worker.recording.dump_format import (
    CONTEXTS,
    EMBEDDING,
    LOGITS,
    POSITIONS,
    PREVIOUS,
    SAMPLED,
    SAMPLED_ROWS,
    SLOTS,
    TOKENS,
    DumpShape,
    StepFile,
    context_hashes,
    of_layer,
    step_path,
    step_tensors,
    write_description,
)


def texts_of(dump: Dump) -> list[list[int]]:
    """Token ids of the dump's sequences: each row that no other comes after, with all that come before it."""
    rows = dump.rows
    known = dict(
        zip(
            rows.context.tolist(),
            zip(rows.previous.tolist(), rows.token.tolist(), rows.position.tolist(), strict=True),
            strict=True,
        )
    )
    texts = []
    for last in sorted(set(known) - set(rows.previous.tolist())):
        text: list[int] = []
        context, position = last, 1
        while position > 0 and context in known:
            context, token, position = known[context]
            text.append(token)
        if position == 0:  # else its beginning was not dumped
            texts.append(text[::-1])
    return texts


def write_dump(model: Any, texts: Iterable[list[int]], folder: Path, name: str) -> None:
    """model: a Qwen3MoeForCausalLM. Every row has its logits. Raises OSError where `folder` exists."""
    c = model.config
    shape = DumpShape(
        c.num_hidden_layers, c.hidden_size, c.num_experts, c.num_experts_per_tok, model.lm_head.out_features
    )
    folder.mkdir(mode=0o700)
    write_description(folder, {"model": name, "engine": f"transformers, {model.dtype}"})
    for step, text in enumerate(texts):
        n = len(text)
        tensors = row_tensors(text) | {
            name: t.float().numpy() for name, t in activations(model, text).items()
        }
        forms = step_tensors(shape, n, n)
        file = StepFile(step_path(folder, step), forms, {})
        for tensor in forms:
            file.write(tensor, tensors[tensor])
        file.close()


def row_tensors(text: list[int]) -> dict[str, npt.NDArray[Any]]:
    """The row tensors of a step that is a whole text. Every row is marked as sampled, but no request takes the
    token."""
    tokens, n = np.array(text, np.int32), len(text)
    hashes = context_hashes(tokens, 0)
    return {
        CONTEXTS: hashes[1:],
        PREVIOUS: hashes[:-1],
        TOKENS: tokens,
        POSITIONS: np.arange(n),
        SLOTS: np.zeros(n),
        SAMPLED_ROWS: np.arange(n),
        SAMPLED: np.full(n, -1),
    }


@torch.no_grad()
def activations(model: Any, text: list[int]) -> dict[str, Tensor]:
    """The text's tensors by our names, seen by hooks on transformers' modules."""
    found: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        found[name] = value.reshape(len(text), -1).cpu()

    def output(module: nn.Module, name: str) -> Any:
        return module.register_forward_hook(lambda _, __, out: keep(name, out))

    body = model.model
    hooks = [output(body.embed_tokens, EMBEDDING)]
    for i, layer in enumerate(body.layers):
        hooks.append(_norm_hook(layer.post_attention_layernorm, i, keep))
        hooks.append(_router_hook(layer.mlp.gate, i, keep))
        hooks.append(output(layer.mlp, of_layer(i, "expert_output")))
    keep(LOGITS, model(torch.tensor([text], device=model.device)).logits)
    for hook in hooks:
        hook.remove()
    return found


def _norm_hook(norm: nn.Module, layer: int, keep: Any) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        keep(of_layer(layer, "after_attention"), inputs[0])
        keep(of_layer(layer, "expert_input"), out)

    return norm.register_forward_hook(hook)


def _router_hook(router: nn.Module, layer: int, keep: Any) -> Any:
    def hook(_: nn.Module, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        for name, value in zip(("router_logits", "expert_weights", "expert_ids"), out, strict=True):
            keep(of_layer(layer, name), value)

    return router.register_forward_hook(hook)


def main() -> None:
    from transformers import AutoModelForCausalLM  # its import takes seconds, of who takes `write_dump`, too

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("ours", type=Path, help="a dump, whose tokens are taken")
    parser.add_argument("theirs", type=Path, help="the folder to be written")
    parser.add_argument("--dtype", default="float32", help="of the computation (default: %(default)s)")
    arguments = parser.parse_args()
    folder, options = arguments.model, {"dtype": getattr(torch, arguments.dtype)}
    if folder.is_file():
        folder, options = folder.parent, options | {"gguf_file": folder.name}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    write_dump(model.eval(), texts_of(Dump(arguments.ours)), arguments.theirs, str(arguments.model))


if __name__ == "__main__":
    main()
