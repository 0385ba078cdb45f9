"""Sizes of pictures, against the processor of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moeserve.cli.command_line import find_tower
from moeserve.errors import ConfigError
from moeserve.visualserver.picture_size import LargestRule, StretchRule
from moeserve.visualserver.tower_file import open_tower
from tests.support.pictures.picture_fixture import GEMMA_TOWER, MODEL, TOWER

RULES = (StretchRule(32, 8192, 4194304), StretchRule(32, 65536, 16777216), StretchRule(32, 8192, 256 * 1024))


# Sizes that transformers' processors give (the tests below compare hundreds, but importing them takes 5 s).
PICTURES = (
    (1, 1),
    (1, 200),
    (80, 400),
    (112, 176),
    (333, 4021),
    (2160, 4096),
    (16384, 16384),
    (37, 59),
    (2048, 3000),
)
STRETCHED = (
    (
        (96, 96),
        (32, 1280),
        (64, 384),
        (128, 192),
        (320, 4032),
        (1472, 2816),
        (2048, 2048),
        (96, 128),
        (1664, 2464),
    ),
    (
        (256, 256),
        (32, 3648),
        (128, 576),
        (224, 352),
        (320, 4032),
        (2176, 4096),
        (4096, 4096),
        (224, 352),
        (2048, 3008),
    ),
    ((96, 96), (32, 1280), (64, 384), (128, 192), (128, 1760), (352, 704), (512, 512), (96, 128), (416, 608)),
)
GEMMA_PICTURES = ((1, 1), (1, 200), (5000, 3), (7, 2000), (2160, 4096), (336, 432), (37, 59))
FITTED = {
    70: ((384, 384), (48, 3360), (3360, 48), (48, 3360), (288, 528), (336, 432), (288, 480)),
    280: ((768, 768), (48, 11328), (13440, 48), (48, 13440), (576, 1104), (672, 864), (624, 1008)),
    1120: ((1584, 1584), (96, 22704), (53760, 48), (48, 27120), (1152, 2208), (1392, 1776), (1248, 2016)),
}


def test_sizes_of_the_processors() -> None:
    for rule, sizes in zip(RULES, STRETCHED, strict=True):
        assert tuple(rule.resized(*picture) for picture in PICTURES) == sizes, rule
    for most, fitted in FITTED.items():
        rule_of_gemma = LargestRule(48, most, most)
        assert tuple(rule_of_gemma.resized(*picture) for picture in GEMMA_PICTURES) == fitted, most


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_as_the_processor(rule: StretchRule) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = random.Random(3)
    sizes = [(rng.randrange(1, 5000), rng.randrange(1, 5000)) for _ in range(150)]
    sizes += [(rng.randrange(1, 60), rng.randrange(1, 60)) for _ in range(60)]
    sizes += [(1, 1), (16, 16), (48, 48), (1, 200), (40, 300), (2160, 4096), (16384, 16384)]
    for height, width in sizes:
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, rule.factor, rule.min_pixels, rule.max_pixels)
            assert rule.resized(height, width) == expected, (height, width)


@pytest.mark.slow
@pytest.mark.parametrize("most", [70, 140, 280, 560, 1120])
def test_as_gemma_s_processor(most: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    rng, rule = random.Random(4), LargestRule(48, most, most)
    sizes = [(rng.randrange(1, 5000), rng.randrange(1, 5000)) for _ in range(150)]
    sizes += [(rng.randrange(1, 60), rng.randrange(1, 60)) for _ in range(60)]
    sizes += [(1, 1), (48, 48), (1, 200), (1, 5000), (5000, 3), (7, 2000), (2160, 4096), (336, 432)]
    for height, width in sizes:
        expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * most, 3)
        assert rule.resized(height, width) == expected, (height, width)


def test_gemma_s_bounds_in_tokens() -> None:
    """The tiny tower has positions for 64 patches a side."""
    _, shape = open_tower(GEMMA_TOWER)
    assert shape.size_rule(None, None) == LargestRule(48, 280, 21)
    assert shape.size_rule(None, 4) == LargestRule(48, 4, 4)
    assert LargestRule(48, 280, 21).resized(10, 5000) == (48, 21 * 48)
    with pytest.raises(ConfigError, match="--image-min-tokens: Gemma 4's pictures are enlarged"):
        shape.size_rule(8, None)


def test_too_narrow() -> None:
    with pytest.raises(ValueError, match="at most 200 times"):
        RULES[0].resized(1, 201)


def test_bounds_in_tokens() -> None:
    _, shape = open_tower(TOWER)
    assert shape.size_rule(None, None) == RULES[0]
    assert shape.size_rule(None, 4) == StretchRule(32, 4096, 4096)
    assert shape.size_rule(256, 1024) == StretchRule(32, 262144, 1048576)


def test_the_flag(tmp_path: Path) -> None:
    assert find_tower("auto", MODEL) == find_tower(str(TOWER), MODEL) == str(TOWER)
    assert find_tower(None, MODEL) is None
    for flag, words in (("auto", "no \\*mmproj\\*.gguf in"), (str(tmp_path / "x"), "there is no file")):
        with pytest.raises(ConfigError, match=words):
            find_tower(flag, tmp_path / "model.gguf")
    for name in ("a-mmproj-F16.gguf", "mmproj-a.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"several, a-mmproj-F16.gguf, mmproj-a.gguf; name one"):
        find_tower("auto", tmp_path / "a.gguf")
