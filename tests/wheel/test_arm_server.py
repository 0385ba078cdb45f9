"""A whole server of the wheel for AArch64, under qemu-aarch64, answers as a server on x86-64 does.

`make test-serve-arm` prepares that wheel's Python, MOESERVE_ARM_PYTHON. Each of the server's processes is emulated, so
that a start takes minutes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.servers.server import Server

ARM_PYTHON = os.environ.get("MOESERVE_ARM_PYTHON")
START_S = 3600.0
ANSWER_S = 1800.0
# The time that emulated steps take is no sign of a worker that hangs.
FLAGS = ("--device", "cpu", "--threads", "1", "--step-timeout", "1800")
QUESTION = {
    "messages": [{"role": "user", "content": "What is 27 + 15?"}],
    "temperature": 0,
    "logprobs": True,
    "max_tokens": 200,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
if ARM_PYTHON is None:
    pytest.skip("make test-serve-arm prepares a Python for AArch64", allow_module_level=True)


def choice(server: Server) -> dict[str, Any]:
    """What the server answers; it is ended by a failure, and stopped after an answer, with exit code 0."""
    try:
        answer = server.post("/v1/chat/completions", QUESTION, timeout=ANSWER_S)
    except BaseException:
        server.kill()
        raise
    assert server.stop(ANSWER_S) == 0, server.log
    found: dict[str, Any] = answer["choices"][0]
    return found


def test_a_chat_has_the_text_and_log_probabilities_of_x86_64() -> None:
    assert ARM_PYTHON is not None
    expected = choice(Server(None, *FLAGS, "--isa", "avx2"))
    arm = Server(
        None,
        *FLAGS,
        "--isa",
        "neon_i8mm",
        ready_timeout=START_S,
        program=(ARM_PYTHON, "-P", "-m", "moeserve"),
    )
    try:
        assert "neon_i8mm" in arm.log
        found = choice(arm)
    finally:
        arm.kill()
    assert "42" in expected["message"]["content"]
    assert found == expected
