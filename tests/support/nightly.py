"""Tables of cases of which CI runs the first, and the nightly job all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def nightly_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`; all but the first `count` are marked slow. Several arguments are a tuple."""
    found = []
    for number, case in enumerate(cases):
        if number < count:
            found.append(case)
        elif isinstance(case, ParameterSet):
            found.append(case._replace(marks=[*case.marks, pytest.mark.slow]))
        else:
            values = case if isinstance(case, tuple) else (case,)
            found.append(pytest.param(*values, marks=pytest.mark.slow))
    return found
