"""The window: the limit holds, who asks first is served first, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from loader_service.stream.window import HostWindow

KIB = 1 << 10


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def places(buffers: list[memoryview]) -> set[int]:
    return {id(buffer.obj) for buffer in buffers}


async def test_buffers_have_the_size_asked_for_and_can_be_written() -> None:
    buffers = await HostWindow(4 * KIB).acquire(KIB, 3)
    assert [len(buffer) for buffer in buffers] == [KIB] * 3
    assert len(places(buffers)) == 3
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number]) * KIB
    assert [buffer[-1] for buffer in buffers] == [0, 1, 2]


async def test_nothing_is_held_before_somebody_asks() -> None:
    window = HostWindow(KIB)
    assert (window.held_bytes, window.limit_bytes) == (0, KIB)
    assert await window.acquire(KIB, 0) == []
    assert window.held_bytes == 0


@pytest.mark.parametrize(("size", "count"), [(KIB + 1, 1), (KIB // 2, 3), (1, KIB + 1)])
async def test_what_can_never_fit_is_refused_at_once(size: int, count: int) -> None:
    with pytest.raises(ValueError, match="do not fit the window"):
        await HostWindow(KIB).acquire(size, count)


async def test_a_full_window_waits_until_a_buffer_comes_back() -> None:
    window = HostWindow(2 * KIB)
    held = await window.acquire(KIB, 2)
    waiting = asyncio.create_task(window.acquire(KIB, 1))
    await settle()
    assert not waiting.done()
    window.release(held[:1])
    assert places(await waiting) == places(held[:1])
    assert window.held_bytes == 2 * KIB


async def test_the_buffer_given_back_last_is_handed_out_first() -> None:
    window = HostWindow(4 * KIB)
    first, second, third = await window.acquire(KIB, 3)
    window.release([first])
    window.release([third])
    window.release([second])
    assert places(await window.acquire(KIB, 1)) == places([second])
    assert places(await window.acquire(KIB, 1)) == places([third])


async def test_who_asks_first_is_served_first_even_for_more() -> None:
    window = HostWindow(4 * KIB)
    held = await window.acquire(KIB, 4)
    order: list[str] = []

    async def ask(name: str, count: int) -> None:
        await window.acquire(KIB, count)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(ask("large", 3))
        await settle()
        group.create_task(ask("small", 1))
        for buffer in held:
            await settle()
            assert order == []  # the small one must not overtake
            window.release([buffer])
            if buffer is held[2]:
                break
        await settle()
        assert order == ["large"]
        window.release(held[3:])
    assert order == ["large", "small"]


async def test_idle_buffers_of_another_size_make_room() -> None:
    window = HostWindow(4 * KIB)
    window.release(await window.acquire(KIB, 4))
    large = await window.acquire(4 * KIB, 1)
    assert window.held_bytes == 4 * KIB
    window.release(large)
    assert len(await window.acquire(KIB, 4)) == 4
    assert window.held_bytes == 4 * KIB


async def test_idle_buffers_of_another_size_stay_while_there_is_room() -> None:
    window = HostWindow(4 * KIB)
    small = await window.acquire(KIB, 2)
    window.release(small)
    await window.acquire(2 * KIB, 1)
    assert places(await window.acquire(KIB, 2)) == places(small)


async def test_a_cancelled_waiter_does_not_block_the_next() -> None:
    window = HostWindow(KIB)
    held = await window.acquire(KIB, 1)
    first = asyncio.create_task(window.acquire(KIB, 1))
    await settle()
    second = asyncio.create_task(window.acquire(KIB, 1))
    await settle()
    first.cancel()
    await settle()
    window.release(held)
    assert len(await second) == 1
    assert first.cancelled()


async def test_many_loads_of_different_sizes_all_end_within_the_limit() -> None:
    window = HostWindow(64 * KIB)
    chance = random.Random(7)
    used = peak = 0

    async def load(size: int, count: int) -> None:
        nonlocal used, peak
        for _ in range(20):
            buffers = await window.acquire(size, count)
            used += size * count
            peak = max(peak, used)
            assert used <= window.held_bytes <= window.limit_bytes
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            used -= size * count
            window.release(buffers)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for size in (KIB, 3 * KIB, 8 * KIB, 16 * KIB):
            for count in (1, 2, 4):
                group.create_task(load(size, count))
    assert used == 0
    assert peak > 32 * KIB
