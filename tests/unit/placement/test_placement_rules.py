"""The rules file: the first match wins, and whatever it cannot mean is an error that quotes the rule."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeserve.config.units import MIB
from moeserve.errors import ConfigError
from moeserve.placement import Gpu, Placement, PlacementOptions, place
from moeserve.placement.rules import Rules
from tests.support.router.placement_world import gpu, model, rules

GPU = gpu(4096)


def placed(tmp_path: Path, text: str, **options: Any) -> Placement:
    return place(model(), PlacementOptions(rules=rules(tmp_path, text), most_kv_tokens=1000, **options), GPU)


def test_experts_by_layer_by_id_and_the_rest(tmp_path: Path) -> None:
    placement = placed(
        tmp_path,
        r"""
        - match: '^blk\.0\.experts\.[0-2]$'
          device: cuda
        - match: '^blk\.[01]\.experts'
          device: cpu
        - match: '\.ffn_(gate|up|down)_exps\.'
          decode: cpu
          prefill: cuda
        """,
    )
    assert [layer.gpu_experts for layer in placement.layers] == [(0, 1, 2), (), (), ()]
    assert [layer.prefill for layer in placement.layers] == ["auto", "auto", "cuda", "cuda"]


def test_what_no_rule_matches_follows_the_flags(tmp_path: Path) -> None:
    text = "[{match: '^blk\\.2\\.experts\\.7$', device: cpu}, {match: '^blk.3.experts.[67]$', device: cuda}]"
    placement = placed(tmp_path, text, num_gpu_experts=8)
    assert [layer.gpu_experts for layer in placement.layers] == [tuple(range(8))] * 2 + [
        tuple(range(7)),
        tuple(range(8)),
    ]
    placement = placed(tmp_path, text, num_gpu_experts=1)
    assert placement.layers[3].gpu_experts == (0, 6, 7)


def test_the_embedding_alone(tmp_path: Path) -> None:
    placement = placed(tmp_path, "[{match: token_embd, device: cpu}]")
    assert (placement.embedding, placement.layers_in_ram) == ("cpu", 0)


def test_what_rules_hold_on_the_gpu_stays_when_memory_is_short(tmp_path: Path) -> None:
    """Without the rule, the embedding and two layers would leave."""
    for text, layers_in_ram in (
        ("[{match: '^blk.2.dense', device: cuda}]", 2),
        ("[{match: '^blk.1.dense', device: cuda}]", None),
        ("[{match: '^blk.1.experts.3$', device: cuda}]", None),
        ("[{match: token_embd, device: cuda}]", None),
        ("[{match: '^blk.1.experts', decode: cpu, prefill: cuda}]", None),
    ):
        options = PlacementOptions(rules=rules(tmp_path, text), gpu_memory_budget=48 * MIB)
        if layers_in_ram is None:
            with pytest.raises(ConfigError, match="GiB of GPU memory do not suffice"):
                place(model(), options, GPU)
        else:
            assert place(model(), options, GPU).layers_in_ram == layers_in_ram


def test_dense_parts(tmp_path: Path) -> None:
    placement = placed(tmp_path, "[{match: '^blk\\.[01]\\.', device: cpu}, {match: token_embd, device: cpu}]")
    assert [layer.dense for layer in placement.layers] == ["cpu", "cpu", "cuda", "cuda"]
    assert (placement.embedding, placement.head) == ("cpu", "cuda")
    assert placement.layers[0].gpu_experts == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 7), st.sampled_from(["cpu", "cuda"])),
        min_size=1,
        max_size=10,
        unique_by=lambda rule: rule[:2],
    ),
    last=st.sampled_from(["cpu", "cuda"]),
)
def test_the_first_match_wins(tmp_path: Path, data: list[tuple[int, int, str]], last: str) -> None:
    lines = [f"- {{match: '^blk.{layer}.experts.{e}$', device: {where}}}" for layer, e, where in data]
    lines.append(f"- {{match: '_exps', device: {last}}}")
    placement = placed(tmp_path, "\n".join(lines))
    first = {(layer, e): where for layer, e, where in data}
    for index, layer in enumerate(placement.layers):
        for expert in range(8):
            wanted = first.get((index, expert), last)
            assert (expert in layer.gpu_experts) == (wanted == "cuda")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "- {match: 'blk.9.experts', device: cpu}",
            r"rule 1 \(match: 'blk.9.experts', device: cpu\) matches nothing",
        ),
        (
            "- {match: exps, device: cpu}\n- {match: gate_exps, device: cuda}",
            r"rule 2 \(match: 'gate_exps', device: cuda\) never applies",
        ),
        ("- {match: '(', device: cpu}", r"rule 1 \(match: '\(', device: cpu\): .*unclosed group"),
        (r"- {match: '(?=x)', device: cpu}", "look-around"),
        (r"- {match: '(a)\\1', device: cpu}", "rule 1"),
        ("- {match: '(a{1000}){1000}', device: cpu}", "exceeds size limit"),
        ("- {match: exps, device: tpu}", r"rule 1 .*tpu"),
        ("- {match: exps}", "names no device"),
        ("- {match: exps, device: cpu, prefill: cuda}", "`device` stands for both"),
        ("- {match: exps, dvice: cpu}", "unknown field `dvice`"),
        ("- {match: exps, device: cpu, device: cuda}", "a key is given twice"),
        ("- {match: 7, device: cpu}", r"rule 1 .*Expected `str`"),
        ("match: exps", "must be a list"),
        ("[]", "must be a list"),
        ("- [", "expected the node content"),
        ("- !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        (
            "- {match: gate_exps, device: cpu}",
            "can only be placed as a whole; match 'blk.0.experts.0' instead",
        ),
        ("- {match: attn_q, device: cpu}", "can only be placed as a whole; match 'blk.0.dense' instead"),
        (
            "- {match: exps, decode: cuda, prefill: cpu}",
            "is impossible: the GPU computes the experts that are in its memory",
        ),
        (
            "- {match: '^output', decode: cuda, prefill: cpu}",
            "is impossible: the head is computed where its weights are",
        ),
        (
            "- {match: 'blk.0.dense', device: cpu}\n- {match: 'blk.0.experts', device: cuda}",
            "is impossible: the experts of layer 0 follow its dense part, which is in RAM",
        ),
        (
            "- {match: 'blk.2.dense', device: cpu}",
            r"rule 1 \(match: 'blk.2.dense', device: cpu\) is impossible: layer 2 would be in RAM after layer 0",
        ),
        (
            "- {match: 'blk.[12].dense', device: cpu}\n- {match: 'blk.0.dense', device: cuda}",
            r"rule 1 .* is impossible: layer 1 would be in RAM after layer 0 on the GPU",
        ),
        (
            "- {match: token_embd, device: cuda}\n- {match: 'blk.0.dense', device: cpu}",
            r"rule 1 \(match: 'token_embd', device: cuda\) is impossible: layer 0 is in RAM",
        ),
        (
            "- {match: '^output', device: cpu}",
            "rule 1 .* is impossible: the head follows the last layers, so it is always on the GPU",
        ),
        (
            "- {match: 'blk.0.dense', decode: cpu, prefill: cuda}",
            "is impossible: the dense part of layer 0 is computed where its weights are",
        ),
        (
            "- {match: 'blk.0.experts.1$', decode: cpu, prefill: cpu}\n"
            "- {match: 'blk.0.experts', decode: cpu, prefill: cuda}",
            "must have the same `prefill`",
        ),
    ],
)
def test_a_rule_that_cannot_be_is_quoted(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"--placement-rules .*rules.yaml: ") as caught:
        placed(tmp_path, text)
    assert re.search(said, str(caught.value), re.DOTALL), caught.value


def test_a_gpu_without_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--placement-rules leaves no layer on the GPU"):
        placed(tmp_path, "- {match: dense, device: cpu}")


def test_the_example_of_the_documentation_works_today(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "placement-files.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    placement = place(
        model(48, 128), PlacementOptions(rules=rules(tmp_path, example)), Gpu(64 << 30, 1 << 30)
    )
    assert {index for index, layer in enumerate(placement.layers) if layer.prefill == "auto"} == {0, 1, 2, 3}
    assert [layer.gpu_experts for layer in placement.layers] == [()] * 47 + [(3, 17, 90)]


def test_a_rule_between_the_flags_layers_is_quoted(tmp_path: Path) -> None:
    text = "- {match: 'blk.0.dense', device: cuda}"
    with pytest.raises(ConfigError, match=r"rule 1 .* is impossible: layer 1 would be in RAM after layer 0"):
        placed(tmp_path, text, n_gpu_layers=2)
    assert placed(tmp_path, text.replace("0", "1"), n_gpu_layers=2).layers_in_ram == 1


def test_an_engine_that_cannot_stream(tmp_path: Path) -> None:
    text = "- {match: exps, decode: cpu, prefill: cuda}"
    today = dataclasses.replace(GPU, can_stream=False)
    with pytest.raises(ConfigError, match=r"rule 1 .* is impossible: .*does not stream experts yet"):
        place(model(), PlacementOptions(rules=rules(tmp_path, text)), today)
    placement = place(model(), PlacementOptions(num_gpu_experts=0), today)
    assert {layer.prefill for layer in placement.layers} == {"cpu"}
    assert placement.stream_bytes == 0


def test_files_that_are_no_rules(tmp_path: Path) -> None:
    for text, said in (
        ("x" * (300 << 10), "larger than 256 KiB"),
        ("- {match: a, device: cpu}\n" * 257, "1 to 256 rules"),
        ("[\n" * 50_000, "recursion"),
    ):
        with pytest.raises(ConfigError, match=said):
            rules(tmp_path, text)
    with pytest.raises(ConfigError, match="No such file"):
        Rules.read(tmp_path / "nowhere")


def test_patterns_that_would_take_for_ever_elsewhere(tmp_path: Path) -> None:
    start = time.thread_time()
    pattern = "(e|e)*" * 20 + "(x+x+)+y"
    with pytest.raises(ConfigError, match="matches nothing"):
        placed(tmp_path, f"- {{match: '{pattern}', device: cpu}}")
    assert time.thread_time() - start < 5


def test_pinned_experts_count_in_the_budget(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="move experts to the CPU"):
        placed(tmp_path, "- {match: experts, device: cuda}", gpu_memory_budget=120 * MIB)
