"""The table of architectures."""

from __future__ import annotations

from moeserve.models.registry import FAMILIES


def test_each_architecture_has_its_own_family() -> None:
    assert [family.architecture for family in FAMILIES.values()] == list(FAMILIES)
    assert "qwen3moe" in FAMILIES
    assert "grok" not in FAMILIES
