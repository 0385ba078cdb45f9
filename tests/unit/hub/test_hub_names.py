"""What counts as a name on the hub, and which files it stands for."""

from __future__ import annotations

import pytest

from moeserve.hub import HubError, HubName, name_of, parse_name
from moeserve.hub.choice import choose

BOTH = {"a-Q4_K_M.gguf": 1, "a-Q8_0.gguf": 2}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B-GGUF", "without it: Qwen/Qwen3-30B-A3B-GGUF"),
        ("https://huggingface.co/a/b/tree/main?x=1", "without it: a/b"),
        ("http://www.huggingface.co/a/b/blob/main/sub/c-Q8_0.gguf?download=true", ": a/b:sub/c-Q8_0.gguf"),
        ("hf.co/a/b:Q4_K_M", "without it: a/b:Q4_K_M"),
        ("https://example.com/model.gguf", "name a path, or a model of the Hub as org/repo"),
        ("file:///models/a.gguf", "name a path, or a model of the Hub as org/repo"),
    ],
)
def test_addresses_say_how_their_model_is_named(text: str, meant: str) -> None:
    with pytest.raises(HubError) as error:
        name_of(text)
    assert str(error.value).startswith(f"{text} is an address; ")
    assert str(error.value).endswith(meant)


def test_what_is_no_address_is_a_name_or_a_path() -> None:
    assert name_of("a/b:Q8_0") == HubName("a/b", "Q8_0")
    assert name_of("huggingface.co/model.gguf") is None
    assert name_of("/models/a.gguf") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", HubName("Qwen/Qwen3-30B-A3B-GGUF", "Q4_K_M")),
        ("a/b:sub/c-Q8_0.gguf", HubName("a/b", "sub/c-Q8_0.gguf")),
        ("a/b", HubName("a/b", None)),
        ("a/b@v1.0", HubName("a/b", None, "v1.0")),
        ("a/b@refs/pr/3:Q8_0", HubName("a/b", "Q8_0", "refs/pr/3")),
        ("a/b@", None),
        ("a/b@-x", None),
        ("a/b@x y", None),
        ("models/x.gguf", None),
        ("./a/b", None),
        ("/a/b", None),
        ("a/b/c", None),
        ("~/b", None),
        ("model.gguf", None),
        ("a/b:", None),
        ("a/b:c d", None),
        ("../b", None),
    ],
)
def test_names_and_paths(text: str, name: HubName | None) -> None:
    assert parse_name(text) == name
    assert name is None or str(name) == text


@pytest.mark.parametrize(
    ("files", "wanted", "chosen"),
    [
        (BOTH, None, ["a-Q4_K_M.gguf"]),
        (BOTH, "q8_0", ["a-Q8_0.gguf"]),
        (BOTH, "a-Q8_0.gguf", ["a-Q8_0.gguf"]),
        ({"only-IQ4_XS.gguf": 1, "README.md": 1}, None, ["only-IQ4_XS.gguf"]),
        ({"a.Q4_K_M.gguf": 1, "a.Q4_K_S.gguf": 1}, "q4_k_m", ["a.Q4_K_M.gguf"]),
        ({"a-Q4_K.gguf": 1, "a-Q4_K_M.gguf": 1}, "Q4_K", ["a-Q4_K.gguf"]),
        ({"a-UD-Q4_K_XL.gguf": 1, "a-Q4_K_M.gguf": 1}, "UD-Q4_K_XL", ["a-UD-Q4_K_XL.gguf"]),
        (
            {"Q8_0/a-00002-of-00002.gguf": 1, "Q8_0/a-00001-of-00002.gguf": 1, "Q4_0/a.gguf": 1},
            "Q8_0",
            ["Q8_0/a-00001-of-00002.gguf", "Q8_0/a-00002-of-00002.gguf"],
        ),
        (
            {"a-00001-of-00002.gguf": 1, "a-00002-of-00002.gguf": 1, "b.gguf": 1},
            "a-00002-of-00002.gguf",
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
        ),
        ({"a-BF16.gguf": 1, "mmproj-BF16.gguf": 1, "a.imatrix.gguf": 1}, "BF16", ["a-BF16.gguf"]),
        ({"a-BF16.gguf": 1, "mmproj-BF16.gguf": 1}, None, ["a-BF16.gguf"]),
        ({"a-BF16.gguf": 1, "mmproj/a-BF16.gguf": 1, "a-BF16-LoRA.gguf": 1}, "BF16", ["a-BF16.gguf"]),
        ({"a-BF16.gguf": 1, "mmproj-BF16.gguf": 1}, "mmproj-BF16.gguf", ["mmproj-BF16.gguf"]),
        (
            {"tokenizer.json": 1, "config.json": 1, "m.safetensors": 1, "x/y.safetensors": 1, "z.bin": 1},
            None,
            ["config.json", "tokenizer.json", "m.safetensors"],
        ),
    ],
)
def test_a_name_stands_for_these_files(files: dict[str, int], wanted: str | None, chosen: list[str]) -> None:
    assert choose(HubName("o/r", wanted), files) == chosen


@pytest.mark.parametrize(
    ("files", "wanted", "cause"),
    [
        ({"a-Q8_0.gguf": 1, "a-Q6_K.gguf": 1}, None, "which model is meant"),
        ({"a-Q4_K_M.gguf": 1, "b-Q4_K_M.gguf": 1}, None, "which model is meant"),
        ({"a-Q8_0.gguf": 1, "a-UD-Q8_0.gguf": 1}, "Q8_0", r"fits 2 models.*\n.*a-Q8_0.*\n.*a-UD-Q8_0"),
        (BOTH, "Q4_K", r"nothing fits 'Q4_K'.*\n +0\.00 GB  a-Q4_K_M\.gguf"),
        (BOTH, "b.gguf", "nothing fits"),
        ({"a-00001-of-00003.gguf": 1, "a-00003-of-00003.gguf": 1}, None, "has only 2 of the 3 parts of a"),
        ({"config.json": 1, "m.safetensors": 1}, "Q8_0", "no .gguf file, but safetensors: leave out :Q8_0"),
        ({"model.bin": 1}, None, r"nor a config\.json with"),
        ({f"{i}.gguf": 1 for i in range(100)}, None, "and 60 more"),
    ],
)
def test_a_name_that_stands_for_none(files: dict[str, int], wanted: str | None, cause: str) -> None:
    with pytest.raises(HubError, match=cause):
        choose(HubName("o/r", wanted), files)


@pytest.mark.parametrize(
    "file",
    ["../x.gguf", "a/../../x.gguf", "/etc/x.gguf", "a//x.gguf", "./x.gguf", "a\\x.gguf", "x\x1b[2J.gguf", ""],
)
def test_a_name_that_leads_elsewhere_is_refused(file: str) -> None:
    with pytest.raises(HubError, match="which is not a name of a file") as caught:
        choose(HubName("acme/m", None), {"m-Q4_K_M.gguf": 10, file: 10})
    assert "\x1b" not in str(caught.value)
