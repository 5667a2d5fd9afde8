"""WeightStore, items WS-1, WS-5 to WS-9, WS-15 and WS-16 of the contract, on a counting device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from loader_kernels.device import Buffer
from loader_kernels.testing import CountingDevice
from loader_worker.store import WeightNotFoundError, WeightStore, WeightTensor


@pytest.fixture
def device() -> CountingDevice:
    return CountingDevice()


def tensor(
    device: CountingDevice, name: str, nbytes: int = 4, aliases: tuple[str, ...] = ()
) -> WeightTensor:
    return WeightTensor(name, "U8", (nbytes,), device.allocate(nbytes), 0, aliases)


def store_of(device: CountingDevice, *sizes: int) -> WeightStore:
    """A store with the tensors t0, t1, ... of the given sizes."""
    tensors = [tensor(device, f"t{number}", nbytes) for number, nbytes in enumerate(sizes)]
    return WeightStore.from_map({each.name: each for each in tensors}, device)


# ---------------------------------------------------------------- WS-1, WS-5, WS-6


def test_ws1_a_new_store_is_empty(device: CountingDevice) -> None:
    store = WeightStore(device)
    assert (store.is_empty, len(store), store.names()) == (True, 0, [])
    assert store.prepartitioned_tp is None  # WS-15
    assert "t0" not in store


def test_ws1_names_are_sorted_whatever_the_order_of_insertion(device: CountingDevice) -> None:
    names = ["b", "a.10", "a.2", "B"]
    store = WeightStore.from_map({name: tensor(device, name) for name in names}, device)
    assert store.names() == sorted(names)
    assert (len(store), store.is_empty) == (4, False)
    assert all(name in store for name in names)


def test_ws1_readers_in_other_threads_see_whole_states_while_tensors_are_freed(
    device: CountingDevice,
) -> None:
    store = store_of(device, *[8] * 200)
    faults: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for name in store.names():
                try:
                    if store.get(name).nbytes != 8:
                        faults.append(f"{name} was seen without its memory")
                except WeightNotFoundError:
                    continue
            if store.resident_bytes() % 8:
                faults.append("a part of a tensor was counted")

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        store.free_matching(lambda name, number=number: name == f"t{number}")  # type: ignore[misc]
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert (store.is_empty, device.live) == (True, [])


def test_ws5_from_map_copies_the_mapping_and_sets_no_partition(device: CountingDevice) -> None:
    weights = {"a": tensor(device, "a")}
    store = WeightStore.from_map(weights, device)
    weights["b"] = tensor(device, "b")
    del weights["a"]
    assert store.names() == ["a"]
    assert store.prepartitioned_tp is None


def test_ws5_from_map_refuses_a_key_that_is_not_the_name(device: CountingDevice) -> None:
    with pytest.raises(ValueError, match="'key' holds the tensor 'name'"):
        WeightStore.from_map({"key": tensor(device, "name")}, device)


def test_ws6_get_returns_the_tensor_itself(device: CountingDevice) -> None:
    kept = tensor(device, "a")
    assert WeightStore.from_map({"a": kept}, device).get("a") is kept


def test_ws6_get_of_an_unknown_name_raises_a_key_error_that_names_it(
    device: CountingDevice,
) -> None:
    with pytest.raises(KeyError) as caught:
        store_of(device, 4).get("model.norm.weight")
    assert str(caught.value) == "the store has no weight 'model.norm.weight'"


def test_ws6_get_of_a_freed_name_or_alias_says_that_it_was_freed(device: CountingDevice) -> None:
    store = WeightStore.from_map({"a": tensor(device, "a", 4, ("head",))}, device)
    store.free_matching(lambda name: True)
    for name in ("a", "head"):
        with pytest.raises(WeightNotFoundError, match=f"'{name}' has been freed"):
            store.get(name)


# ---------------------------------------------------------------- WS-7, WS-8


def test_ws7_ws8_resident_and_total_fall_by_exactly_what_was_freed(device: CountingDevice) -> None:
    store = store_of(device, 100, 20, 3)
    assert (store.resident_bytes(), store.total_bytes(), store.loaded_bytes) == (123, 123, 123)
    store.free_matching(lambda name: name == "t1")
    assert (store.resident_bytes(), store.total_bytes()) == (103, 103)
    assert (store.loaded_bytes, store.freed_bytes) == (123, 20)


def test_ws7_a_tied_pair_is_counted_once(device: CountingDevice) -> None:
    store = WeightStore.from_map({"embed": tensor(device, "embed", 64, ("head",))}, device)
    assert (store.resident_bytes(), len(store), store.names()) == (64, 1, ["embed"])
    assert "head" in store
    assert store.get("head") is store.get("embed")


def test_ws7_a_tensor_without_bytes_is_there_and_counts_nothing(device: CountingDevice) -> None:
    store = store_of(device, 0, 5)
    assert (store.resident_bytes(), len(store)) == (5, 2)
    assert store.free_matching(lambda name: name == "t0") == (1, 0)
    assert store.names() == ["t1"]


# ---------------------------------------------------------------- WS-9


@pytest.mark.parametrize(
    ("predicate", "freed"),
    [
        (lambda name: False, (0, 0)),
        (lambda name: name != "t1", (2, 101)),
        (lambda name: True, (3, 121)),
    ],
)
def test_ws9_free_matching_frees_what_matches_once(
    device: CountingDevice, predicate: Callable[[str], bool], freed: tuple[int, int]
) -> None:
    store = store_of(device, 100, 20, 1)
    assert store.free_matching(predicate) == freed
    assert device.memory().allocated_bytes == store.resident_bytes() == 121 - freed[1]
    assert store.free_matching(predicate) == (0, 0)
    assert set(device.frees.values()) <= {1}
    assert sum(device.frees.values()) == freed[0]


def test_ws9_the_predicate_sees_own_names_only_and_the_alias_goes_too(
    device: CountingDevice,
) -> None:
    store = WeightStore.from_map({"embed": tensor(device, "embed", 8, ("head",))}, device)
    assert store.free_matching(lambda name: name == "head") == (0, 0)
    assert store.free_matching(lambda name: name == "embed") == (1, 8)
    assert "head" not in store


def test_ws9_an_error_of_the_predicate_frees_nothing(device: CountingDevice) -> None:
    store = store_of(device, 4, 4)

    def predicate(name: str) -> bool:
        if name == "t1":
            raise LookupError("no idea")
        return True

    with pytest.raises(LookupError):
        store.free_matching(predicate)
    assert (store.resident_bytes(), sum(device.frees.values())) == (8, 0)


def test_ws9_a_failing_free_forgets_the_name_first_and_leaves_the_others(
    device: CountingDevice,
) -> None:
    store = store_of(device, 4, 8, 16)
    device.failing = [store.get("t1").buffer]
    with pytest.raises(RuntimeError, match="freeing weight 't1' failed: the driver says no"):
        store.free_matching(lambda name: True)
    assert store.names() == ["t2"]
    assert store.resident_bytes() == 16
    with pytest.raises(WeightNotFoundError, match="freed"):
        store.get("t1")
    device.failing = []
    assert store.free_matching(lambda name: True) == (1, 16)
    assert sum(device.frees.values()) == 3


def test_ws9_releasing_after_freeing_frees_nothing_twice(device: CountingDevice) -> None:
    store = store_of(device, 4, 8)
    store.free_matching(lambda name: name == "t0")
    store.release()
    assert (device.live, sorted(device.frees.values())) == ([], [1, 1])


def test_ws9_two_tensors_in_one_buffer_are_refused_at_insertion(device: CountingDevice) -> None:
    first = tensor(device, "a")
    second = WeightTensor("b", "U8", (4,), first.buffer)
    with pytest.raises(ValueError, match="'b' shares its buffer"):
        WeightStore.from_map({"a": first, "b": second}, device)


# ---------------------------------------------------------------- WS-15


def test_ws15_publishing_a_whole_load_sets_the_partition(device: CountingDevice) -> None:
    store = WeightStore(device)
    store.publish([tensor(device, "b", 3), tensor(device, "a", 4)], rank=1, tp=2)
    assert store.prepartitioned_tp == (1, 2)
    assert (store.names(), store.loaded_bytes) == (["a", "b"], 7)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((("a", ()), ("a", ())), "'a'"),
        ((("a", ("x",)), ("b", ("x",))), "'x'"),
        ((("a", ("b",)), ("b", ())), "'b'"),
        ((("b", ()), ("a", ("b",))), "'b'"),
        ((("a", ("a",)),), "'a'"),
    ],
)
def test_ws15_ambiguous_names_publish_nothing(
    device: CountingDevice, names: tuple[tuple[str, tuple[str, ...]], ...], text: str
) -> None:
    store = WeightStore(device)
    tensors = [tensor(device, name, 4, aliases) for name, aliases in names]
    with pytest.raises(ValueError, match=f"two tensors are called {text}"):
        store.publish(tensors, rank=0, tp=1)
    assert (store.is_empty, store.prepartitioned_tp, store.loaded_bytes) == (True, None, 0)
    assert len(device.live) == len(tensors)


def test_ws15_a_second_load_is_refused_and_the_first_stays(device: CountingDevice) -> None:
    store = WeightStore(device)
    store.publish([tensor(device, "a")], rank=0, tp=2)
    with pytest.raises(ValueError, match="already holds"):
        store.publish([tensor(device, "b")], rank=1, tp=2)
    assert (store.names(), store.prepartitioned_tp) == (["a"], (0, 2))


def test_ws15_a_released_store_takes_another_load(device: CountingDevice) -> None:
    store = WeightStore(device)
    store.publish([tensor(device, "a")], rank=0, tp=1)
    store.release()
    store.publish([tensor(device, "a", 9)], rank=1, tp=3)
    assert (store.prepartitioned_tp, store.resident_bytes()) == ((1, 3), 9)
    assert store.freed_bytes == 0


# ---------------------------------------------------------------- WS-16


def test_ws16_release_frees_every_tensor_and_repeating_it_is_harmless(
    device: CountingDevice,
) -> None:
    store = WeightStore(device)
    store.publish([tensor(device, f"t{size}", size) for size in range(8)], rank=0, tp=1)
    store.release()
    store.release()
    assert store.prepartitioned_tp is None
    assert (device.live, len(store), store.resident_bytes()) == ([], 0, 0)
    assert (store.loaded_bytes, set(device.frees.values())) == (0, {1})


def test_ws16_release_goes_on_after_a_failing_free_and_raises_the_first(
    device: CountingDevice,
) -> None:
    store = store_of(device, 1, 2, 3, 4)
    bad = [store.get("t1").buffer, store.get("t2").buffer]
    device.failing = list(bad)
    with pytest.raises(RuntimeError, match="'t1'"):
        store.release()
    assert store.is_empty
    assert all(left is kept for left, kept in zip(device.live, bad, strict=True))
    device.failing = []
    store.release()  # the failed ones are not tried again: nobody knows what state they are in
    assert sum(device.frees.values()) == 4


def test_ws16_leaving_the_block_releases(device: CountingDevice) -> None:
    with store_of(device, 4, 4) as store:
        assert device.memory().allocated_bytes == store.resident_bytes() == 8
    assert device.live == []


def test_ws16_leaving_the_block_by_an_error_releases_too(device: CountingDevice) -> None:
    with pytest.raises(KeyError), store_of(device, 4, 4) as store:
        store.get("nothing")
    assert device.live == []


# ---------------------------------------------------------------- slow devices


class SlowDevice(CountingDevice):
    """Frees when the test lets it.

    Attributes:
        begun: set when a free has begun.
        go_on: lets frees end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def free(self, buffer: Buffer) -> None:
        self.begun.set()
        assert self.go_on.wait(5)
        super().free(buffer)


@pytest.mark.parametrize("free", [WeightStore.release, lambda store: store.free_matching(bool)])
def test_readers_do_not_wait_for_a_device_that_frees_slowly(
    free: Callable[[WeightStore], object],
) -> None:
    device = SlowDevice()
    store = store_of(device, 8, 8)
    freeing = threading.Thread(target=free, args=(store,))
    freeing.start()
    assert device.begun.wait(5)
    asked = threading.Thread(target=lambda: ("t0" in store, store.names(), store.loaded_bytes))
    asked.start()
    asked.join(5)
    assert not asked.is_alive()
    assert "t0" not in store
    assert store.resident_bytes() == device.memory().allocated_bytes == 16  # not freed yet
    device.go_on.set()
    freeing.join(5)
    assert (store.resident_bytes(), device.live) == (0, [])


def test_a_load_published_while_the_last_is_freed_counts_beside_it() -> None:
    device = SlowDevice()
    store = store_of(device, 8)
    releasing = threading.Thread(target=store.release)
    releasing.start()
    assert device.begun.wait(5)
    store.publish([tensor(device, "next", 4)], rank=0, tp=1)
    assert (store.resident_bytes(), store.loaded_bytes) == (12, 4)
    device.go_on.set()
    releasing.join(5)
    assert (store.resident_bytes(), store.loaded_bytes, store.names()) == (4, 4, ["next"])


def test_freeing_waits_for_who_reads_and_nobody_begins_to_read_what_goes(
    device: CountingDevice,
) -> None:
    store = store_of(device, 8)
    weight = store.get("t0")
    releasing = threading.Thread(target=store.release)
    with store.reading(weight), store.reading(weight):
        releasing.start()
        while "t0" in store:
            time.sleep(0.001)
        with pytest.raises(WeightNotFoundError, match="'t0' has been freed"), store.reading(weight):
            pass
        releasing.join(0.05)
        assert (releasing.is_alive(), device.live) == (True, [weight.buffer])
    releasing.join(5)
    assert device.live == []


def test_another_tensor_of_the_same_name_is_not_read_in_its_place(device: CountingDevice) -> None:
    store = store_of(device, 8)
    weight = store.get("t0")
    store.release()
    store.publish([tensor(device, "t0", 8)], rank=0, tp=1)
    with pytest.raises(WeightNotFoundError), store.reading(weight):
        pass
