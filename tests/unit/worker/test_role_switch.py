import asyncio

from baton.core.messages import Role
from worker import events as e
from worker.role_switch import RoleSwitcher

SWITCHED = e.SetRole(Role.DECODE, resumes=True)


class World:
    def __init__(self):
        self.posted, self.idle, self.tasks = [], asyncio.Event(), []
        self.switch_role = RoleSwitcher(self.posted.append, self.idle, spawn=self.spawn)

    def spawn(self, coroutine):
        self.tasks.append(asyncio.create_task(coroutine))
        return self.tasks[-1]

    async def until_done(self):
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_what_is_held_is_finished_before_the_role_changes_and_then_it_serves_again():
    world = World()
    world.switch_role.ask(Role.DECODE, 60)
    await asyncio.sleep(0)
    assert world.posted == [e.Drain()]
    world.idle.set()
    await world.until_done()
    assert world.posted == [e.Drain(), SWITCHED]


async def test_what_is_not_finished_in_time_runs_beside_the_new_role():
    world = World()
    world.switch_role.ask(Role.DECODE, 0.01)
    await world.until_done()
    assert world.posted == [e.Drain(), SWITCHED]


async def test_without_a_drain_it_changes_at_once():
    world = World()
    world.switch_role.ask(Role.DECODE, 0)
    assert world.posted == [SWITCHED]


async def test_the_last_role_asked_for_counts():
    world = World()
    world.switch_role.ask(Role.DECODE, 60)
    await asyncio.sleep(0)
    world.switch_role.ask(Role.AGGREGATED, 60)
    world.idle.set()
    await world.until_done()
    assert [p for p in world.posted if isinstance(p, e.SetRole)] == [e.SetRole(Role.AGGREGATED, resumes=True)]


async def test_a_worker_that_leaves_does_not_begin_to_serve_again():
    world = World()
    world.switch_role.ask(Role.DECODE, 60)
    await asyncio.sleep(0)
    world.switch_role.close()
    world.idle.set()
    world.switch_role.ask(Role.DECODE, 0)
    await world.until_done()
    assert world.posted == [e.Drain()]
