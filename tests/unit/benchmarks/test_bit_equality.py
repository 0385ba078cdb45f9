"""What `tests.support.measuring.bit_equality` calls different: one bit of a tensor, a missing row, a
logprob of an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeserve.cli.compare_dumps.reader import Dump
from moeserve.worker.recording.dump_format import (
    CONTEXTS,
    EMBEDDING,
    LOGITS,
    DumpShape,
    StepFile,
    step_path,
    step_tensors,
    write_description,
)
from tests.conftest import OWN_FIXTURES
from tests.support.measuring.bit_equality import Seen, differences, models_in, prompts_of, report, tensors_of

SHAPE = DumpShape(layers=1, hidden=4, experts=2, top_k=1, vocab=3)


def write_dump(folder: Path, logits: list[float], contexts: list[int]) -> Dump:
    """Two rows, the second sampled; every tensor zero but these."""
    folder.mkdir()
    forms = step_tensors(SHAPE, rows=2, sampled=1)
    file = StepFile(step_path(folder, 0), forms, {})
    dtypes = {"F32": np.float32, "I32": np.int32, "I64": np.int64}
    for name, form in forms.items():
        values = np.zeros(form.shape, dtypes[form.dtype])
        if name == LOGITS:
            values[0] = logits
        elif name == CONTEXTS:
            values[:] = contexts
        elif name == "sampled_rows":
            values[:] = 1
        file.write(name, values)
    file.close()
    write_description(folder, {"model": "m"})
    return Dump(folder)


def seen(folder: Path, logits: list[float], contexts: list[int], logprob: float = -0.5) -> Seen:
    return Seen(tensors_of(write_dump(folder, logits, contexts)), [{"text": "a", "logprobs": [logprob]}])


def test_equal_dumps_and_answers_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = (seen(tmp_path / name, [1.0, 2.0, 3.0], [7, 8]) for name in ("a", "b"))
    assert differences(base, new) == []
    assert report(Path("m.gguf"), base, new)
    assert "equal (" in capsys.readouterr().out


def test_the_last_bit_of_one_logit_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = seen(tmp_path / "a", [1.0, 2.0, 3.0], [7, 8])
    new = seen(tmp_path / "b", [1.0, 2.0, float(np.nextafter(np.float32(3), np.float32(4)))], [7, 8])
    assert differences(base, new) == ["logits: 1 of 1 rows differ"]
    assert not report(Path("m.gguf"), base, new)
    assert "DIFFERENT" in capsys.readouterr().out


def test_rows_are_matched_by_their_context(tmp_path: Path) -> None:
    base, new = seen(tmp_path / "a", [1.0] * 3, [7, 8]), seen(tmp_path / "b", [1.0] * 3, [7, 9])
    found = differences(base, new)
    assert f"{EMBEDDING}: 2 rows are in one dump only" in found
    assert "logits: 2 rows are in one dump only" in found


def test_the_answers_floats_count(tmp_path: Path) -> None:
    base, new = (seen(tmp_path / str(p), [1.0] * 3, [7, 8], p) for p in (-0.5, -0.5000001))
    assert differences(base, new) == ["answer 0: logprobs differ"]


def test_one_context_with_two_results_is_an_error(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "a", [1.0] * 3, [7, 8])
    again = write_dump(tmp_path / "b", [2.0] * 3, [7, 8])
    dump.steps += again.steps
    with pytest.raises(ValueError, match="not batch invariant"):
        tensors_of(dump)


def test_models_are_those_with_prompts() -> None:
    models = models_in(OWN_FIXTURES, ["*.gguf", "tiny-*"])
    assert models == sorted(OWN_FIXTURES.glob("*.gguf"))
    assert all(all(prompts_of(model)) for model in models)
