"""What `moeserve plan` says of an EAGLE-3 head on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moeserve.cli.plan import command
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from tests.support.models.eagle3_head import HEAD_DIM, KV_HEADS, Head
from tests.support.router.plan_command import RATES, fails, run


def test_a_head_that_drafts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> None:
    """An EAGLE-3 head's weights, buffers and keys are in GPU memory, and no tier in RAM keeps its keys."""
    monkeypatch.setattr(command, "measure_cpu", lambda *_: RATES)
    shape = read_shape(open_gguf(tiny_model))
    taps = [1, shape.num_layers // 2, shape.num_layers]
    head = Head(shape.hidden_size, shape.vocab_size, taps, scored=64).write_gguf(tmp_path / "head.gguf")
    flags = ["--model", str(tiny_model), "--gpu-memory", "1.2", "--max-num-seqs", "2"]
    flags += ["--max-num-batched-tokens", "64", "--max-total-tokens", "4000", "--max-model-len", "512"]
    plain = run(capsys, *flags)["memory"]
    drafts = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    memory = run(capsys, *flags, "--speculative-config", drafts)["memory"]
    of_head = 2 * 2 * KV_HEADS * HEAD_DIM  # bytes of a token's key and value, float16
    assert memory["gpu_kv"] - plain["gpu_kv"] == 4000 * of_head
    weights = sum(tensor.nbytes for name, tensor in open_gguf(head).tensors.items() if name != "d2t")
    copies = 2 * 64 * len(taps) * shape.hidden_size
    assert memory["gpu_other"] - plain["gpu_other"] > weights + copies
    assert (plain["ram_tier"] > 0, memory["ram_tier"], memory["ram_draft_model"]) == (True, 0, 0)
    refused = fails(capsys, *flags, "--kv-ram", "1", "--speculative-config", drafts)
    assert "--kv-ram: an EAGLE-3 head's keys are not kept in RAM" in refused
    on_cpu = ["--model", str(tiny_model), "--device", "cpu", "--max-total-tokens", "4000"]
    refused = fails(capsys, *on_cpu, "--kv-ram", "1", "--speculative-config", drafts)
    assert "--kv-ram: there is no RAM tier on the CPU engine" in refused
    beyond = Head(shape.hidden_size, shape.vocab_size, taps, scored=64)
    beyond.ids = torch.arange(64) + shape.vocab_size - 63
    drafts = json.dumps(
        {
            "method": "eagle3",
            "model": str(beyond.write_gguf(tmp_path / "beyond.gguf")),
            "num_speculative_tokens": 3,
        }
    )
    assert "'d2t' does not map to the model's" in fails(capsys, *flags, "--speculative-config", drafts)
