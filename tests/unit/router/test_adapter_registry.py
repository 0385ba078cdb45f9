"""AdapterRegistry beside a worker that reads at once or never: who is served, who is kept, who is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moeserve.messages.adapters import (
    AdapterAnswer,
    AdaptersReport,
    AdaptersServed,
    AdapterState,
    LoadAdapter,
    UnloadAdapter,
)
from moeserve.messages.steps import WorkerReady
from moeserve.router.adapter_registry import LINGER_S, AdapterRegistry


def ready(**adapters: str) -> WorkerReady:
    return WorkerReady(64, 4, 64, 100, 0, 0, "a test", adapters=adapters)


@dataclass
class World:
    """A registry, a worker and a clock. files: the key of what lies at each path; others are errors."""

    file: Path
    most: int = 4
    files: dict[str, str] = field(default_factory=lambda: {"/a": "key-a", "/b": "key-b", "/start": "key-0"})
    in_use: list[str] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A router; the worker before it lives on."""
        self.registry = AdapterRegistry(
            ready(start="key-0"), {"start": "/start"}, self.file, self.most, self.now
        )

    def turn(self) -> set[str]:
        """Asks the worker until it has all. Returns the keys that it has then."""
        has: set[str] = set()
        for _ in range(4):
            self.now += 1.0
            wanted = self.registry.due(self.now, lambda: self.in_use)
            if wanted is None:
                continue
            states = [
                AdapterState(source.order, self.files[source.path], 8)
                if source.path in self.files
                else AdapterState(source.order, error=f"{source.path} is bad")
                for source in wanted.sources
            ]
            self.registry.report(AdaptersReport(states))
            has = {state.key for state in states if state.key}
        return has

    def ask(self, order: LoadAdapter | UnloadAdapter) -> AdapterAnswer:
        if isinstance(order, LoadAdapter):
            self.registry.load(order)
        else:
            self.registry.unload(order)
        self.turn()
        (answer,) = (told for told in self.registry.take_messages() if isinstance(told, AdapterAnswer))
        assert answer.ticket == order.ticket
        return answer

    @property
    def served(self) -> dict[str, str]:
        return {adapter.name: adapter.key for adapter in self.registry.served}


def test_a_name_comes_and_goes_and_its_requests_keep_it(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    assert world.ask(LoadAdapter(1, "a", "/a")).status == 200
    assert world.served == {"start": "key-0", "a": "key-a"}
    world.in_use = ["key-a"]
    assert world.ask(UnloadAdapter(2, "a")).status == 200
    assert world.served == {"start": "key-0"}
    assert (world.registry.has("key-a"), world.registry.is_busy) == (True, True)
    world.in_use = []
    assert world.turn() == {"key-0"}
    assert (world.registry.has("key-a"), world.registry.is_busy) == (False, False)
    assert world.registry.due(world.now + 1, list) is None


def test_httpserver_is_told_of_a_change_before_it_is_answered(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    world.registry.load(LoadAdapter(1, "a", "/a"))
    world.turn()
    told, answer = world.registry.take_messages()
    assert isinstance(told, AdaptersServed)
    assert [adapter.name for adapter in told.adapters] == ["start", "a"]
    assert isinstance(answer, AdapterAnswer)


def test_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    answer = world.ask(LoadAdapter(1, "x", "/bad"))
    assert (answer.status, answer.message) == (400, "/bad is bad")
    assert world.served == {"start": "key-0"}
    assert not (tmp_path / "adapters.json").exists()


def test_one_takes_the_place_of_another(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    world.in_use = ["key-0"]
    assert world.ask(LoadAdapter(1, "start", "/a")).status == 400
    assert world.ask(LoadAdapter(2, "start", "/a", replaces=True)).status == 200
    assert world.served == {"start": "key-a"}
    assert world.registry.has("key-0")
    world.in_use = []
    assert world.turn() == {"key-a"}


def test_two_names_of_the_same_files_share_them(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    for ticket, name in enumerate(("a", "b")):
        assert world.ask(LoadAdapter(ticket, name, "/a")).status == 200
    assert world.ask(UnloadAdapter(3, "a")).status == 200
    assert world.turn() >= {"key-a"} or world.registry.has("key-a")
    assert world.served == {"start": "key-0", "b": "key-a"}


def test_no_more_than_the_limit(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json", most=2)
    assert world.ask(LoadAdapter(1, "a", "/a")).status == 200
    assert "--max-loras" in world.ask(LoadAdapter(2, "b", "/b")).message
    world.in_use = ["key-a"]
    world.ask(UnloadAdapter(3, "a"))
    assert world.ask(LoadAdapter(4, "b", "/b")).status == 400  # a request still has it
    world.in_use = []
    world.turn()
    assert world.ask(LoadAdapter(5, "b", "/b")).status == 200


def test_the_next_worker_gets_all_before_a_plan(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    world.ask(LoadAdapter(1, "a", "/a"))
    world.ask(UnloadAdapter(2, "start"))
    world.registry.load(LoadAdapter(3, "b", "/b"))
    world.registry.worker_lost("it crashed")
    (answer,) = (told for told in world.registry.take_messages() if isinstance(told, AdapterAnswer))
    assert (answer.ticket, answer.status) == (3, 503)  # it may be what has ended the worker
    world.registry.worker_found(ready(start="key-0"))
    assert (world.registry.is_restoring, world.registry.is_waiting) == (True, True)
    assert world.turn() == {"key-a"}
    assert (world.registry.is_restoring, world.registry.is_waiting) == (False, False)
    assert world.served == {"a": "key-a"}


def test_what_cannot_be_had_again_is_told(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    world.ask(LoadAdapter(1, "a", "/a"))
    world.ask(LoadAdapter(2, "b", "/b"))
    world.registry.worker_lost("it crashed")
    world.files = {"/start": "key-0", "/b": "key-other"}
    world.registry.worker_found(ready(start="key-0"))
    world.turn()
    assert dict(world.registry.take_failed()).keys() == {"key-a", "key-b"}
    assert world.served == {"start": "key-0", "b": "key-other"}  # what lies there now, under its own key
    assert not world.registry.is_restoring


def test_the_next_router_knows_all_and_waits_for_requests_to_come_again(tmp_path: Path) -> None:
    world = World(tmp_path / "adapters.json")
    world.ask(LoadAdapter(1, "a", "/a"))
    world.in_use = ["key-0"]
    world.ask(UnloadAdapter(2, "start"))
    world.in_use = []  # the router is lost, and its requests have not come again
    world.start()
    assert world.registry.is_restoring  # the worker may have been lost, too
    assert world.turn() == {"key-0", "key-a"}
    assert world.served == {"a": "key-a"}
    world.now += LINGER_S
    assert world.turn() == {"key-a"}


def test_a_file_that_is_no_list_is_reported_and_ignored(tmp_path: Path) -> None:
    (tmp_path / "adapters.json").write_text("[{}]")
    assert World(tmp_path / "adapters.json").served == {"start": "key-0"}


def test_without_a_file_nothing_is_said_to_the_worker(tmp_path: Path) -> None:
    registry = AdapterRegistry(ready(start="key-0"), {"start": "/start"})
    assert registry.due(1.0, list) is None
    assert not registry.is_busy
    registry.load(LoadAdapter(1, "a", "/a"))
    registry.unload(UnloadAdapter(2, "start"))
    statuses = [told.status for told in registry.take_messages() if isinstance(told, AdapterAnswer)]
    assert statuses == [400, 404]
    assert [adapter.path for adapter in registry.served] == ["/start"]
