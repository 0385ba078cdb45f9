"""A template is a program from an untrusted file: it is stopped, and the next request is served."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from moeserve.processes.sandbox.parent import SandboxUnavailable
from moeserve.tokenizer import ChatRenderer, TemplateError, TemplateTimeout
from tests.support.chats.rendering import render_now
from tests.support.servers.server import REPOSITORY
from tests.support.servers.suspending import suspend

GO = [{"role": "user", "content": "go"}]
FINE = [{"role": "user", "content": "fine"}]
LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
Make = Callable[..., ChatRenderer]


@pytest.fixture
def make() -> Iterator[Make]:
    """A renderer whose template misbehaves when asked to "go" and is fine otherwise."""
    made: list[ChatRenderer] = []

    def build(hostile: str, timeout: float = 2.0, max_output_chars: int = 1 << 20) -> ChatRenderer:
        source = "{% if messages[0].content == 'go' %}" + hostile + "{% else %}ok{% endif %}"
        made.append(ChatRenderer(source, {}, timeout=timeout, max_output_chars=max_output_chars))
        return made[-1]

    yield build
    for renderer in made:
        renderer.close()


def _children(name: str = "moeserve: template") -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.status() != "zombie" and p.cmdline()[:1] == [name]]


@pytest.mark.parametrize(
    "hostile",
    [LOOP, "{{ (7 + messages | length) ** 1000000000 % 10 }}"],
    ids=["nested loops", "one operation, which no signal or thread of Python's could stop"],
)
def test_an_endless_render_is_killed_in_time(make: Make, hostile: str) -> None:
    renderer = make(hostile, timeout=0.5)
    (first,) = _children()
    with pytest.raises(TemplateTimeout, match=r"did not finish within 0\.5 s"):
        render_now(renderer, GO)
    assert not first.is_running()
    assert render_now(renderer, FINE) == "ok"  # by a new process
    (second,) = _children()
    assert second.pid != first.pid


def test_a_stopped_process_is_replaced_at_once(make: Make) -> None:
    """It was waited for, for 20 s, and then the harmless render was the client's fault."""
    renderer = make("x")
    (child,) = _children()
    suspend(child)
    assert render_now(renderer, FINE) == "ok"
    assert not child.is_running()
    (other,) = _children()
    suspend(other)
    long = "fine" + " " * (4 << 20)  # more than the line holds
    assert render_now(renderer, [{"role": "user", "content": long}]) == "ok"


def test_a_process_that_is_stopped_again_and_again_is_nobodys_fault(make: Make) -> None:
    renderer = make(LOOP, timeout=60)
    done = threading.Event()

    def stop_all() -> None:
        while not done.wait(0.05):
            for child in _children():
                with suppress(psutil.NoSuchProcess):
                    child.suspend()

    stopping = threading.Thread(target=stop_all)
    stopping.start()
    try:
        with pytest.raises(SandboxUnavailable, match="the process for chat templates was stopped"):
            render_now(renderer, GO)
    finally:
        done.set()
        stopping.join()
    assert render_now(renderer, FINE) == "ok"


def test_files_of_the_working_directory_are_not_run(tmp_path: Path) -> None:
    """They are found first, where Python has this folder on its path."""
    (tmp_path / "types.py").write_text("open('ran', 'w').close()\nraise SystemExit('a foreign file ran')\n")
    script = (
        "from moeserve.tokenizer import ChatRenderer\n"
        "from tests.support.chats.rendering import render_now\n"
        "renderer = ChatRenderer('ok', {})\n"
        "print(render_now(renderer, []))\n"
        "renderer.close()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-P", "-c", script]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (run.stdout, run.returncode) == ("ok\n", 0), run.stderr
    assert not (tmp_path / "ran").exists()


def test_a_process_that_cannot_import_says_so(tmp_path: Path) -> None:
    """As where a file of a library's name is on PYTHONPATH. It was the template's fault, which took too much memory."""
    (tmp_path / "setproctitle.py").write_text("import there_is_no_such_module\n")
    with (
        patch.dict(os.environ, PYTHONPATH=f"{tmp_path}:{REPOSITORY}"),
        pytest.raises(
            SandboxUnavailable, match=r"chat templates ended at once \(exit code 1\): its own lines"
        ),
    ):
        ChatRenderer("x", {})
    assert _children() == []


def test_an_endless_compilation_is_found_at_the_start() -> None:
    """Jinja folds constants while it compiles."""
    with pytest.raises(TemplateTimeout, match=r"did not compile within 0\.5 s"):
        ChatRenderer("{{ 7 ** (10 ** 9) }}", {}, timeout=0.5)
    assert _children() == []


@pytest.mark.parametrize(
    ("hostile", "cause"),
    [
        ("{{ messages[0].content * 10 ** 10 }}", "needs more memory than a template is given"),
        (
            "{% set n = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "needs more memory than a template is given",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "wrote more than 1048576 characters"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ (messages | attr('__class__')).__base__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{{ messages.clear() }}", "SecurityError"),
        ("{{ messages[0].update({'role': 'x'}) }}", "SecurityError"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "may not begin with an underscore"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ],
)
def test_a_hostile_render_fails_with_its_cause(make: Make, hostile: str, cause: str) -> None:
    renderer = make(hostile)
    with pytest.raises(TemplateError) as caught:
        render_now(renderer, GO)
    assert cause in str(caught.value)
    assert not isinstance(caught.value, TemplateTimeout)
    assert render_now(renderer, FINE) == "ok"


def test_a_list_that_grows_while_it_is_walked_is_stopped(make: Make) -> None:
    renderer = make("{% for m in messages %}{% set _ = messages.append(m) %}{% endfor %}")
    with pytest.raises(TemplateError, match=r"did not finish|needs more memory"):
        render_now(renderer, GO)
    assert render_now(renderer, FINE) == "ok"


def test_internal_attributes_are_simply_not_there(make: Make) -> None:
    assert render_now(make("[{{ messages.__class__ }}{{ '{0.__class__}'.format(messages) }}]"), GO) == "[]"


@pytest.mark.parametrize(
    "source", ["{{" + "(" * 5000 + ")" * 5000 + "}}", "{% for i in x %}" * 30, "{{ 1 | nosuch }}"]
)
def test_a_template_that_cannot_be_compiled_is_an_error(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template"):
        ChatRenderer(source + "{% endfor %}" * source.count("{% for"), {})
    assert _children() == []


def test_the_process_has_no_memory_files_or_secrets_to_use(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESERVE_API_KEY", "secret")
    make("x")
    (child,) = _children()
    assert child.rlimit(psutil.RLIMIT_NOFILE) == (3, 3)
    assert child.num_fds() == 3
    assert child.rlimit(psutil.RLIMIT_AS)[0] < 2 << 30
    assert "MOESERVE_API_KEY" not in child.environ()
    assert child.memory_info().rss < 64 << 20


def test_a_killed_process_is_replaced_and_nobody_notices(make: Make) -> None:
    renderer = make("x")
    (child,) = _children()
    child.kill()
    child.wait()
    assert render_now(renderer, FINE) == "ok"
    (other,) = _children()
    assert other != child


def test_the_event_loop_goes_on_during_an_endless_render(make: Make) -> None:
    renderer = make(LOOP, timeout=0.5)

    async def run() -> int:
        endless = asyncio.create_task(renderer.render(GO))
        ticks = 0
        while not endless.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(TemplateTimeout):
            endless.result()
        assert await renderer.render(FINE) == "ok"
        return ticks

    assert asyncio.run(run()) > 10


def test_tenants_take_turns(make: Make) -> None:
    """Thirty long renders of one key, and then one of another: it waits for one of them at most."""
    renderer = make("{% for a in range(20000) %}{% endfor %}x")

    async def run() -> list[str]:
        ended: list[str] = []

        async def render(tenant: str) -> None:
            await renderer.render(GO, tenant=tenant)
            ended.append(tenant)

        crowd = [asyncio.create_task(render("one")) for _ in range(30)]
        await asyncio.sleep(0)
        left = asyncio.create_task(render("another"))
        other = asyncio.create_task(render("another"))
        await asyncio.sleep(0)
        left.cancel()
        crowd[7].cancel()
        await asyncio.gather(*crowd, left, other, return_exceptions=True)
        return ended

    ended = asyncio.run(run())
    assert ended.index("another") <= 2
    assert ended.count("one") == 29
    assert ended.count("another") == 1
    assert render_now(renderer, FINE) == "ok"


def test_close_leaves_no_process() -> None:
    renderer = ChatRenderer("x", {})
    (child,) = _children()
    renderer.close()
    assert not child.is_running()


def test_the_process_dies_with_its_parent_even_in_an_endless_render(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, psutil\n"
        "from moeserve.tokenizer import ChatRenderer\n"
        f"renderer = ChatRenderer({LOOP!r}, {{}}, timeout=60)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "asyncio.run(renderer.render([]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.1)  # the render is under way
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([child], timeout=30)[0] == [child]


def test_a_sandboxed_process_can_do_nothing_to_others(tmp_path: Path) -> None:
    """What Jinja would have to keep a template from, tried in Python itself."""
    victim = tmp_path / "victim"
    victim.touch()
    script = f"""
import os, resource, socket, sys, threading
from moeserve.processes.sandbox import child

def attempt(name, act):
    try:
        act()
    except OSError as error:
        print(name, error.errno)
    except ValueError:  # resource's word for EPERM
        print(name, 1)
    else:
        print(name, "done")

tried, go = threading.Event(), threading.Event()
def other_thread():
    go.wait()
    attempt("remove in another thread", lambda: os.unlink({str(victim)!r}))
    tried.set()
threading.Thread(target=other_thread, daemon=True).start()
child.confine(1 << 28)
attempt("remove", lambda: os.unlink({str(victim)!r}))
attempt("truncate", lambda: os.truncate({str(victim)!r}, 0))
attempt("signal", lambda: os.kill(os.getppid(), 0))
attempt("fork", os.fork)
attempt("execute", lambda: os.execv("/bin/true", ["true"]))
attempt("connect", socket.socket)
attempt("loosen", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)))
go.set(); tried.wait()
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=30
    )
    attempts = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())
    assert len(attempts) == 8, run.stdout + run.stderr
    assert set(attempts.values()) == {"1"}, attempts  # EPERM
    assert victim.exists()
