"""The router's part of the tiers behind the pool: prompts that come from there, and when they are left alone."""

from __future__ import annotations

from array import array

from moeserve.messages.steps import StepResult
from moeserve.router.core.tiers.page_keys import page_keys
from tests.support.router.router_world import World, final_item, make_world, request
from tests.support.router.virtual_tiers import VirtualTiers

PAGE = 4
PROMPT = list(range(1000, 1103))


def restarted(world: World) -> World:
    """Another server on the same folder."""
    another = World(world.limits, world.step_ms)
    another.worker.tiers = world.worker.tiers
    another.worker.tiers.connect()
    return another


def served(page_tokens: int = PAGE, **limits: int) -> World:
    """A world that has answered PROMPT and was restarted."""
    world = make_world(page_tokens=page_tokens, **limits)  # type: ignore[arg-type]
    world.add(request(0, PROMPT, 4))
    world.run()
    return restarted(world)


def test_a_prompt_of_before_a_restart_comes_from_disk() -> None:
    world = served()
    world.add(request(1, PROMPT, 4))
    world.run()
    usage = final_item(world, 1).usage
    assert usage is not None
    assert usage.cached_tokens == usage.disk_tokens == 100
    assert world.worker.computed == 3 + 3
    assert world.scheduler.load_report().disk.tokens == 100
    world.check_all_free()


def test_what_the_tree_has_is_not_loaded() -> None:
    world = served()
    world.add(request(1, PROMPT[:50], 4))
    world.run()
    loaded = world.worker.tiers.num_loads
    world.add(request(2, PROMPT, 4))
    world.run()
    assert world.worker.tiers.num_loads - loaded == 25 - 12
    usage = final_item(world, 2).usage
    assert usage is not None
    assert (usage.cached_tokens, usage.disk_tokens) == (100, 100 - 50)


def test_prompts_that_need_the_same_pages_wait_for_one_load() -> None:
    world = served()
    for id in range(1, 5):
        world.add(request(id, PROMPT, 4))
    world.run()
    assert world.worker.tiers.num_loads == 25
    usages = [final_item(world, id).usage for id in range(1, 5)]
    assert all(usage is not None and usage.cached_tokens >= 100 for usage in usages)


def test_an_abort_leaves_a_load() -> None:
    world = served()
    world.add(request(1, PROMPT, 4))
    world.result()
    world.plan()  # the worker tells what is on disk
    world.result()
    world.plan()
    assert world.scheduler.load_report().num_waiting == 1
    world.abort(1)
    world.run()
    world.check_all_free()


def test_other_prompts_overtake_one_that_is_loaded() -> None:
    world = served()
    world.worker.tiers.is_instant = False
    world.add(request(1, PROMPT, 1))
    world.add(request(2, 10, 1))
    order: list[int] = []
    while len(order) < 2:
        while world.plan() is not None:
            pass
        world.result()
        order += [id for id in (1, 2) if world.seen[id].final is not None and id not in order]
    assert order == [2, 1]
    assert world.worker.tiers.num_loads


def test_a_disk_slower_than_computing_is_left_alone_within_ten_decisions() -> None:
    """A page of 4 tokens takes 100 ms, a step of 64 tokens 64 ms."""

    def step_ms(result: StepResult) -> float:
        return 64.0

    world = make_world(page_tokens=PAGE, num_kv_slots=300)
    world.step_ms = step_ms
    for id in range(20):
        world.add(request(id, [id * 1000 + i for i in range(100)], 4))
        world.run()
    world.worker.tiers.load_ms = 100.0
    disk = world.worker.tiers
    decisions: list[int] = []
    for id in range(12):
        before = disk.num_loads
        world.add(request(100 + id, [id * 1000 + i for i in range(100)], 4))
        world.run()
        decisions.append(disk.num_loads - before)
    assert sum(decisions[:10]) <= 8
    assert decisions[2:] == [0] * 10
    assert world.scheduler.load_report().disk.declined >= 8


# -------------------------------------------------------------------- recurrent state


def served_recurrent(num_state_slots: int = 16, max_num_seqs: int = 8) -> World:
    """A world of a recurrent model that has answered PROMPT and was restarted."""
    return served(num_state_slots=num_state_slots, max_num_seqs=max_num_seqs)


def test_a_prompt_of_a_recurrent_model_continues_from_a_state_on_disk() -> None:
    world = served_recurrent()
    world.add(request(1, PROMPT, 4))
    world.run()
    usage = final_item(world, 1).usage
    assert usage is not None
    # Its last snapshot point, 8 tokens before its end, is moved to the end of a page.
    assert usage.cached_tokens == usage.disk_tokens == 92
    assert world.worker.computed == 103 - 92 + 3
    assert world.scheduler.load_report().disk.tokens == 92
    world.check_all_free()


def test_a_state_alone_is_loaded_where_the_tree_has_the_pages() -> None:
    """With three state slots, other prompts' snapshots evict the state and leave the pages."""
    world = served_recurrent(num_state_slots=3, max_num_seqs=1)
    world.add(request(1, PROMPT, 4))
    world.run()
    pages = world.worker.tiers.num_loads
    for id in range(2, 6):
        world.add(request(id, 200, 4))
        world.run()
    world.add(request(6, PROMPT, 4))
    world.run()
    usage = final_item(world, 6).usage
    assert usage is not None
    assert usage.disk_tokens == 92
    assert world.worker.tiers.num_loads == pages
    world.check_all_free()


def test_prompts_of_a_recurrent_model_wait_for_one_load() -> None:
    world = served_recurrent()
    for id in range(1, 5):
        world.add(request(id, [*PROMPT[:100], id], 4))
    world.run()
    assert world.worker.tiers.num_loads == 92 // PAGE
    usages = [final_item(world, id).usage for id in range(1, 5)]
    assert all(usage is not None and usage.cached_tokens == 92 for usage in usages)


def test_prompts_that_depart_from_each_other_load_no_page_twice() -> None:
    other = [*PROMPT[:60], *range(5000, 5043)]
    first = make_world(page_tokens=PAGE, num_state_slots=16)
    for id, prompt in enumerate((PROMPT, other)):
        first.add(request(id, prompt, 4))
        first.run()
    world = restarted(first)
    for id, prompt in enumerate((PROMPT, other), start=10):
        world.add(request(id, prompt, 4))
    world.run()
    assert world.worker.tiers.num_loads == 92 // PAGE + (92 - 60) // PAGE
    usages = [final_item(world, id).usage for id in (10, 11)]
    assert all(usage is not None and usage.cached_tokens == 92 for usage in usages)


def test_without_a_spare_state_slot_nothing_is_loaded_and_all_is_computed() -> None:
    world = served_recurrent(num_state_slots=8)
    world.add(request(1, PROMPT, 4))
    world.run()
    usage = final_item(world, 1).usage
    assert usage is not None
    assert (usage.cached_tokens, usage.disk_tokens) == (0, 0)
    world.check_all_free()


def test_a_state_that_is_gone_is_computed_again() -> None:
    world = served_recurrent()
    disk = world.worker.tiers
    states = [key for key, held in disk.pages.items() if len(held) == 1]
    assert states
    world.add(request(1, PROMPT, 4))
    while not disk.num_loads:
        while world.plan() is not None:
            pass
        world.result()
    for key in states:
        disk.pages.pop(key, None)
    world.run()
    usage = final_item(world, 1).usage
    assert usage is not None
    assert usage.disk_tokens == 0
    world.check_all_free()


def test_without_room_in_the_pool_a_load_ends() -> None:
    world = served(num_kv_slots=110)
    world.add(request(1, PROMPT, 4))
    world.run()
    assert final_item(world, 1).finish_reason == "length"
    world.check_all_free()


# -------------------------------------------------------------------- RAM


def in_ram(num_kv_slots: int = 150, **limits: object) -> World:
    """A world with RAM behind a pool that holds little more than PROMPT, which it has answered and given up since."""
    world = make_world(page_tokens=PAGE, num_kv_slots=num_kv_slots, **limits)  # type: ignore[arg-type]
    world.add(request(0, PROMPT, 4))
    world.run()
    for id, length in ((1, num_kv_slots - 4), (9, 100)):
        world.add(request(id, length, 4))
        world.run()
    return world


def test_what_the_pool_has_given_up_comes_from_ram() -> None:
    world = in_ram(tiers=("ram",))
    assert not world.worker.tiers.pages
    world.add(request(2, PROMPT, 4))
    world.run()
    usage = final_item(world, 2).usage
    assert usage is not None
    assert (usage.cached_tokens, usage.ram_tokens, usage.disk_tokens) == (100, 100, 0)
    report = world.scheduler.load_report()
    assert (report.ram.tokens, report.ram.pages) == (100, len(world.worker.tiers.ram))
    assert report.disk.pages == 0
    world.check_all_free()


def test_the_first_load_from_ram_goes_at_once() -> None:
    """Page by page, its rate would be that of the steps between them, and it would be left alone."""
    world = in_ram(tiers=("ram",))
    world.add(request(3, PROMPT, 4))
    plan = world.plan()
    assert plan is not None
    assert plan.pages is not None
    assert len(plan.pages.loads) == 100 // PAGE


def test_what_is_in_ram_goes_to_disk_and_comes_from_where_it_is() -> None:
    """After a loss of RAM from disk; where RAM has given up the last pages, these from disk and the others from RAM."""
    world = in_ram(tiers=("ram", "disk"))
    tiers = world.worker.tiers
    assert tiers.pages.keys() == tiers.ram.keys()
    for key in list(tiers.ram)[:10]:  # of PROMPT, the last pages: the least recently used
        del tiers.ram[key]
    world.scheduler._memory.close()
    tiers.connect(is_new=False)
    world.add(request(2, PROMPT, 4))
    world.run()
    usage = final_item(world, 2).usage
    assert usage is not None
    assert (usage.ram_tokens, usage.disk_tokens) == (15 * PAGE, 10 * PAGE)
    again = restarted(world)
    again.add(request(3, PROMPT, 4))
    again.run()
    usage = final_item(again, 3).usage
    assert usage is not None
    assert (usage.ram_tokens, usage.disk_tokens) == (0, 100)
    world.check_all_free()


def test_ram_keeps_the_beginnings_of_conversations() -> None:
    """It gives up the last page of the one that was not used for longest, never a page whose successors it keeps."""
    world = make_world(page_tokens=PAGE, tiers=("ram",))
    world.worker.tiers = VirtualTiers(PAGE, ram_pages=40, has_disk=False)
    for id in range(4):
        world.add(request(id, [1000 * id + i for i in range(60)], 4))
        world.run()
        again = 0 if id == 2 else id  # the first is used again, from the pool
        world.add(request(10 + id, [1000 * again + i for i in range(60)], 4))
        world.run()
    kept = [
        [key in world.worker.tiers.ram for key in page_keys(("", ""), tokens, PAGE)]
        for tokens in (array("i", range(1000 * id, 1000 * id + 60)).tobytes() for id in range(4))
    ]
    assert [sum(each) for each in kept] == [15, 0, 10, 15]
    assert all(each == sorted(each, reverse=True) for each in kept)


def test_a_slow_disk_behind_ram_is_left_alone_and_ram_is_not() -> None:
    """A page of 4 tokens takes 1 ms from RAM; from disk it would take 100 ms, a step of 64 tokens 64 ms."""
    world = make_world(page_tokens=PAGE, num_kv_slots=300, tiers=("ram", "disk"))
    world.step_ms = lambda _: 64.0
    for id in range(20):
        world.add(request(id, [id * 1000 + i for i in range(100)], 4))
        world.run()
    tiers = world.worker.tiers
    tiers.load_ms = 1.0
    for key in list(tiers.ram)[::2]:
        del tiers.ram[key]
    world.scheduler._memory.close()
    world.scheduler._memory._tiers._rates.bytes_per_ms[1] = 1 / 100.0  # type: ignore[attr-defined]
    tiers.connect(is_new=False)
    for id in range(10):
        world.add(request(100 + id, [id * 1000 + i for i in range(100)], 4))
        world.run()
    report = world.scheduler.load_report()
    assert report.disk.tokens == 0
    assert report.disk.declined == 10


def test_the_disk_behind_ram_may_fail() -> None:
    """It is left alone for a while, and RAM goes on."""
    world = make_world(page_tokens=PAGE, tiers=("ram", "disk"))
    world.worker.tiers = VirtualTiers(PAGE, faults=20.0, ram_pages=1000)
    world.worker.tiers._fails = lambda: False  # type: ignore[method-assign]
    for id in range(3):
        world.add(request(id, 100, 4))
        world.run()
    report = world.scheduler.load_report()
    assert report.ram.pages == 3 * (103 // PAGE)
    assert report.disk.pages == 0
    world.check_all_free()
