"""Templates and grammars are handled in processes of httpserver's own: what becomes of a request that needs one."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import psutil

from tests.support.servers.http_harness import echo, http_server
from tests.support.servers.server import REPOSITORY
from tests.support.servers.suspending import suspend

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def test_a_chat_is_answered_although_the_process_for_templates_was_stopped() -> None:
    with http_server() as server:
        server.answer = echo
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
        children = psutil.Process(server.process.pid).children()
        (template,) = [child for child in children if child.cmdline()[:1] == ["moeserve: template"]]
        suspend(template)
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
        assert not template.is_running()


def test_a_grammar_that_no_process_can_check_is_not_the_clients_fault(tmp_path: Path) -> None:
    """Here it cannot import what it needs."""
    (tmp_path / "llguidance.py").write_text("import there_is_no_such_module\n")
    with patch.dict(os.environ, PYTHONPATH=f"{tmp_path}:{REPOSITORY}"), http_server() as server:
        server.answer = echo
        refused = server.post("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}})
        assert refused.status_code == 503, refused.text
        assert refused.headers["retry-after"]
        error = refused.json()["error"]
        assert error["code"] == "unavailable"
        cause = "the process for grammars ended at once (exit code 1): its own lines say why; try again later"
        assert error["message"] == cause
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
