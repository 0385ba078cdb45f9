"""The examples of property tests do not depend on which modules the tests before them have imported."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers


def test_constants_of_sources_are_for_new_examples_alone() -> None:
    found = len(providers._get_local_constants())
    if settings.get_current_profile_name() == "random":
        pytest.skip(f"this run looks for new examples, with {found} constants")
    assert found == 0
