"""Hugging Face folders: what GGUF's keys say of them, tokens as transformers gives them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from moeserve.errors import ConfigError
from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder, open_model
from moeserve.models.registry import read_checked_shape, read_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.splits import BY_EXPRESSIONS, GPT2, QWEN2, Split
from moeserve.models.tensors import check_tensors
from moeserve.tokenizer import ChatRenderer, TextTokenizer
from tests.support.chats.rendering import render_now
from tests.support.models.hugging_face_model import write_qwen2_moe
from tests.support.models.hugging_face_settings import VOCAB_ROWS

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    " \n'sé1aB<|im_end|>", max_size=40
)


@pytest.fixture(scope="module")
def tokenizer(written: Path) -> TextTokenizer:
    return TextTokenizer.from_gguf(open_model(written))


@pytest.fixture(scope="module")
def reference(written: Path) -> Qwen2Tokenizer:
    from transformers import AutoTokenizer, Qwen2Tokenizer

    found = AutoTokenizer.from_pretrained(written)
    assert isinstance(found, Qwen2Tokenizer)
    return found


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# ---------------------------------------------------------------- what is read


def test_config_and_tensors_are_the_models(written: Path) -> None:
    source = open_model(written)
    config = read_shape(source)
    assert (config.num_experts, config.top_k, config.expert_width, config.head_dim) == (8, 2, 96, 64)
    assert (config.rope_theta, config.rms_eps, config.vocab_size) == (1e6, 1e-6, VOCAB_ROWS)
    check_tensors(config, source)
    stored: dict[str, torch.Tensor] = {}
    for file in written.glob("*.safetensors"):
        stored |= load_file(file)
    assert source.file_bytes > sum(tensor.nbytes for tensor in stored.values())
    # In, out and the number of experts all differ: [E, out, in].
    name = n.of_layer(1, n.FFN_DOWN_EXPS)
    assert source.tensors[name].shape == (8, 128, 96)
    expected = torch.stack([stored[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(8)])
    for _ in range(2):  # the second time from pages that were given back
        assert source.data(name).tobytes() == expected.view(torch.uint8).numpy().tobytes()
        source.advise_done(name)


def test_names_of_before_transformers_5_are_known_too(folder: Path) -> None:
    def rename(config: dict[str, Any]) -> None:
        config["num_experts"] = config.pop("num_local_experts")
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = {"type": "yarn", "factor": 4, "attention_factor": 1.5}

    edit(folder / "config.json", rename)
    config = read_shape(open_model(folder))
    assert (config.num_experts, config.rope_theta, config.rope_scaling.factor) == (8, 1e6, 4.0)
    own = 0.1 * np.log(4) + 1
    assert config.rope_scaling.attn_factor * own == pytest.approx(1.5)


@given(text=TEXT)
@example(text="\uf900")  # another ideograph in NFC
def test_ids_are_transformers(tokenizer: TextTokenizer, reference: Qwen2Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)


def test_special_tokens_ends_and_template_are_the_folders(written: Path, reference: Qwen2Tokenizer) -> None:
    source = open_model(written)
    vocabulary = TextTokenizer.from_gguf(source).vocabulary
    assert vocabulary.eos_ids == (4089, 4087)
    assert vocabulary.special == {4087, 4088, 4089}
    assert vocabulary.user_defined == set(range(4090, 4096))
    assert vocabulary.unused == set(range(4096, VOCAB_ROWS))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    renderer = ChatRenderer.from_gguf(source, vocabulary)
    try:
        assert render_now(renderer, messages) == reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    finally:
        renderer.close()


def test_the_normalizer_is_obeyed(folder: Path, tokenizer: TextTokenizer) -> None:
    """transformers 5 writes none, and its Qwen2Tokenizer has NFC all the same; the published tokenizer.json has it."""
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"

    def another_class(content: dict[str, Any]) -> None:
        content["tokenizer_class"] = "PreTrainedTokenizerFast"

    edit(folder / "tokenizer_config.json", another_class)
    plain = TextTokenizer.from_gguf(open_model(folder))
    assert plain.decode(plain.encode("e\u0301")) == "e\u0301"
    edit(folder / "tokenizer.json", lambda content: content.update(normalizer={"type": "NFC"}))
    nfc = TextTokenizer.from_gguf(open_model(folder))
    assert nfc.decode(nfc.encode("e\u0301")) == "é"


def test_merges_as_texts_and_templates_in_their_older_places(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(
        folder / "tokenizer_config.json",
        lambda settings: settings.update(
            chat_template=[
                {"name": "rag", "template": "x"},
                {"name": ["y"], "template": "y"},
                {"name": "default", "template": template},
                {"name": "tool_use", "template": "z"},
            ],
            eos_token={"content": "<|im_end|>"},
        ),
    )
    (folder / "generation_config.json").unlink()
    before = TextTokenizer.from_gguf(open_model(folder)).encode("The quick brown fox")
    edit(
        folder / "tokenizer.json",
        lambda content: content["model"].update(
            merges=[" ".join(pair) for pair in content["model"]["merges"]]
        ),
    )
    source = open_model(folder)
    tokenizer = TextTokenizer.from_gguf(source)
    assert tokenizer.encode("The quick brown fox") == before
    assert tokenizer.vocabulary.eos_ids == (4089, 4087)
    assert source.metadata.require_str("tokenizer.chat_template") == template
    assert source.metadata.require_str("tokenizer.chat_template.tool_use") == "z"


def test_a_template_for_tools_beside_the_other(folder: Path) -> None:
    others = folder / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text("z")
    metadata = open_model(folder).metadata
    assert metadata.require_str("tokenizer.chat_template") == (folder / "chat_template.jinja").read_text()
    assert metadata.require_str("tokenizer.chat_template.tool_use") == "z"


def test_generation_config_names_the_only_end_of_a_text(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 4089}')
    assert TextTokenizer.from_gguf(open_model(folder)).vocabulary.eos_ids == (4089,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4087]}')
    assert TextTokenizer.from_gguf(open_model(folder)).vocabulary.eos_ids == (4087, 4089)


# ---------------------------------------------------------------- what is refused


def open_and_check(folder: Path) -> None:
    source = open_model(folder)
    read_checked_shape(source)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are qwen3_moe, qwen2_moe"),
        ({"hidden_act": "gelu"}, "'hidden_act'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "'partial_rotary_factor'",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config of 'hqq'"),
        ({"quantization_config": {"quant_method": []}}, r"quantization_config of \[\]"),
        ({"quantization_config": {"quant_method": {}}}, r"quantization_config of \{\}"),
        ({"quantization_config": []}, r"quantization_config is \[\]; an object is expected"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; an object is expected"),
        ({"quantization_config": 5}, "quantization_config is 5; an object is expected"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope_type 'llama3'"),
        ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e6}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2, "mscale": 1}}, "'mscale'"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}},
            "'factor' of rope_type 'linear' is None",
        ),
        ({"rope_parameters": None}, "'rope_theta' is missing"),
        ({"rope_parameters": 5}, "an object is expected"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "big"}, r"config\.json: 'hidden_size' is 'big', an integer is expected"),
        ({"num_experts_per_tok": 9}, r"'num_experts_per_tok' is 9; 1 to 8"),
        ({"num_local_experts": 9}, "experts.8.gate_proj.weight' is missing"),
        ({"num_local_experts": 7}, "experts.7.*has no place"),
        ({"num_hidden_layers": 2}, "model.layers.2.*has no place"),
        ({"num_hidden_layers": 1 << 40}, "'num_hidden_layers'"),
        ({"moe_intermediate_size": 64}, "shape"),
        ({"vocab_size": 4095}, "has id 4095; the model's embedding has 4095 rows"),
        ({"vocab_size": 1 << 40}, "'vocab_size'"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps'"),
    ],
)
def test_a_config_that_we_would_compute_wrongly_is_refused(
    folder: Path, change: dict[str, Any], cause: str
) -> None:
    edit(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(ModelError, match=cause):
        open_and_check(folder)


@pytest.fixture(scope="module")
def written_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder") / "tiny-qwen2-moe"
    write_qwen2_moe(folder)
    return folder


def test_a_qwen2_moe_is_read(written_qwen2: Path) -> None:
    source = open_model(written_qwen2)
    (layer,) = set(read_checked_shape(source).layers)
    assert isinstance(layer.attention, AttentionShape)
    assert (layer.attention.head_dim, layer.attention.qkv_bias, layer.attention.qk_norm) == (32, True, "none")
    assert layer.moe is not None
    assert (layer.moe.num_experts, layer.moe.top_k, layer.moe.width) == (8, 2, 96)
    assert layer.moe.shared is not None
    assert (layer.moe.shared.width, layer.moe.shared.is_gated) == (160, True)
    assert not layer.moe.router.normalize
    assert source.tensors["blk.1.ffn_gate_inp_shexp.weight"].shape == (128,)  # [1, 128] in the folder


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; only 'silu'"),
        ({"shared_expert_intermediate_size": None}, "'shared_expert_intermediate_size' is missing"),
        ({"shared_expert_intermediate_size": 96}, "ffn_gate_shexp.weight' has shape"),
        ({"model_type": "qwen3_moe"}, "q_norm.weight' is missing"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ", ".join(value),
)
def test_a_qwen2_moe_that_we_would_compute_wrongly_is_refused(
    written_qwen2: Path, tmp_path: Path, change: dict[str, Any], cause: str
) -> None:
    folder = Path(shutil.copytree(written_qwen2, tmp_path / "tiny-qwen2-moe"))
    edit(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(ModelError, match=cause):
        open_and_check(folder)


@pytest.mark.parametrize(
    ("split", "step"),
    [*((split, ("Isolated", False)) for split in BY_EXPRESSIONS.values()), (QWEN2, ("Removed", True))],
    ids=lambda given: given.names[0] if isinstance(given, Split) else given[0],
)
def test_ids_of_other_splits_are_the_tokenizers_librarys_own(
    folder: Path, split: Split, step: tuple[str, bool]
) -> None:
    def change(tokenizer: dict[str, Any]) -> None:
        behavior, invert = step if len(split.expressions) == 1 else ("Isolated", False)
        steps = tokenizer["pre_tokenizer"]["pretokenizers"]
        steps[:1] = [
            steps[0] | {"pattern": {"Regex": e}, "behavior": behavior, "invert": invert}
            if e != r"\p{N}"
            else {"type": "Digits", "individual_digits": True}  # as DeepSeek-V2's file has it
            for e in split.expressions
            if e != GPT2.expression
        ]
        # GPT-2's is the byte level's own, which may be all that there is.
        steps[-1]["use_regex"] = split.expression == GPT2.expression
        if len(steps) == 1:
            tokenizer["pre_tokenizer"] = steps[0]
        tokenizer["model"]["ignore_merges"] = invert
        if not split.nfc:
            tokenizer["normalizer"] = {"type": "Sequence", "normalizers": []} if split.before else None

    edit(folder / "tokenizer.json", change)
    # transformers' Qwen2Tokenizer would have NFC whatever the file says.
    edit(folder / "tokenizer_config.json", lambda config: config.update(tokenizer_class="TokenizersBackend"))
    source = open_folder(folder)
    assert source.metadata["tokenizer.ggml.pre"] == split.names[0]
    ours, theirs = TextTokenizer.from_gguf(source), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (
        "I'LL sum camelCases // 12345\n\n",
        "e\u0301 caf\u00e9 \u0e17\u0e35\u0e48",
        "<|im_start|>x  y",
        "print(x) \u4e16\u754c 1234",
    ):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t: t["model"].update(type="Unigram"), "byte-level BPE"),
        (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda t: t["model"].update(vocab=5), "'vocab' is not an object"),
        (lambda t: t["model"].update(merges=None), "no list of merges"),
        (lambda t: t["model"].update(merges=[5]), "not a pair of strings"),
        (lambda t: t.update(model=[]), "'model' is not an object"),
        (lambda t: t.update(normalizer={"type": "NFKC"}), "NFKC"),
        (lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\s+"}), "pre_tokenizer"),
        (lambda t: t["added_tokens"][0].update(id=1), "have the same id, 1"),
        (lambda t: t["added_tokens"][0].update(id=-1), "has id -1"),
        (lambda t: t["added_tokens"][0].update(id="x"), "has id 'x'"),
        (lambda t: t["added_tokens"][0].update(lstrip=True), "lstrip"),
        (lambda t: t["added_tokens"].append("x"), "not a token"),
        (lambda t: t.update(added_tokens=5), "not a list"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], cause: str
) -> None:
    edit(folder / "tokenizer.json", change)
    with pytest.raises(ModelError, match=cause):
        open_folder(folder)


def test_weights_in_place_need_a_gguf(written: Path) -> None:
    from moeserve.config import ServerConfig
    from moeserve.worker.loading.load import load_runner

    config = ServerConfig(model=str(written), weight_layout="file", threads=1)
    with pytest.raises(ConfigError, match="needs a GGUF file"):
        load_runner(config, lambda stage, done, total: None)
