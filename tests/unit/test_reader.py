"""The reader: the right bytes, every source byte once, and typed errors for what files do meanwhile."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader_kernels import digest
from loader_kernels.digest import BLOCK_BYTES
from loader_service.checkpoint.catalog import CheckpointFile, TensorInfo
from loader_service.errors import DataLoss, TiedHeadDiffers
from loader_service.plan.cuts import Even, Fused, Heads, Replicated, Vocab
from loader_service.plan.slices import LoadPlan, Slice, StridedRun, TensorPlan
from loader_service.stream.chunks import plan_steps
from loader_service.stream.reader import OpenFiles, Target, read_tensor
from tests.checkpoints import RawTensor, random_tensor
from tests.plans import FILE, MAX_TP, Part, random_parts, sized, write_plan

KIB = 1 << 10
MIB = 1 << 20

Preadv = Callable[[int, Sequence[memoryview], int], int]


class PreadvSpy:
    """Counts how often each byte of the files was read.

    Attributes:
        counts: reads of each byte, by offset in the file.
        calls: system calls.
        widest: most buffers in one call.
        most: most bytes that one call returns; None leaves it to the system.
    """

    def __init__(self, real: Preadv) -> None:
        self._real = real
        self.counts = np.zeros(8 * MIB, np.uint8)
        self.calls = 0
        self.widest = 0
        self.most: int | None = None

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        self.widest = max(self.widest, len(buffers))
        if self.most is not None:
            buffers = [buffers[0][: self.most]]
        count = self._real(descriptor, buffers, offset)
        self.counts[offset : offset + count] += 1
        return count


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> PreadvSpy:
    spy = PreadvSpy(os.preadv)
    monkeypatch.setattr(os, "preadv", spy)
    return spy


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is empty again for every example of a property."""
    path = tmp_path_factory.mktemp("plan")
    yield path
    shutil.rmtree(path)


def read_plan(plan: LoadPlan, chunk_bytes: int) -> dict[tuple[int, int], bytearray]:
    """Read a plan step by step; returns the wire bytes of every (tensor, rank).

    The hashes that come with every part are checked on the way.
    """
    memory: dict[int, bytearray] = {}
    hashes: dict[int, bytes] = {}
    files = OpenFiles(plan.files)
    try:
        for step in plan_steps(plan, chunk_bytes):
            wanted: dict[int, dict[int, Target]] = {}
            for rank, chunk in enumerate(step.chunks):
                for extent in chunk.extents if chunk else ():
                    piece = plan.tensors[extent.slice_index].slices[rank]
                    local = memory.setdefault(id(piece), bytearray(b"\xaa" * piece.wire_bytes))
                    view = memoryview(local)[extent.offset : extent.offset + extent.length]
                    target = Target(piece, extent.offset, view)
                    wanted.setdefault(extent.slice_index, {})[id(piece)] = target
            for index, targets in wanted.items():
                parts = read_tensor(files, plan.tensors[index], list(targets.values()))
                for key, part in zip(targets, parts, strict=True):
                    hashes[key] = hashes.get(key, b"") + part
    finally:
        files.close()
    for tensor in plan.tensors:
        for piece in tensor.slices:
            whole = bytes(memory[id(piece)]) + bytes(piece.nbytes - piece.wire_bytes)
            assert hashes[id(piece)] == digest.hash_blocks(memoryview(whole))
    return {
        (index, rank): memory[id(piece)]
        for index, tensor in enumerate(plan.tensors)
        for rank, piece in enumerate(tensor.slices)
    }


def check_bytes(plan: LoadPlan, parts: Sequence[Part], chunk_bytes: int) -> None:
    """Reading equals cutting the tensors with NumPy."""
    read = read_plan(plan, chunk_bytes)
    by_name = {part.tensor.name: part for part in parts}
    for (index, rank), data in read.items():
        piece = plan.tensors[index].slices[rank]
        expected = by_name[piece.name].local_bytes(rank, plan.tp)
        assert data + bytes(piece.nbytes - piece.wire_bytes) == expected


def check_read_once(plan: LoadPlan, spy: PreadvSpy) -> None:
    """Every payload byte of the plan was read once, the rest of the file not at all."""
    wanted = np.zeros_like(spy.counts)
    for tensor in plan.tensors:
        for source in (tensor.source, tensor.twin):
            if source is not None:
                wanted[source.offset : source.offset + source.nbytes] = 1
    assert np.array_equal(spy.counts, wanted)
    assert int(spy.counts.sum()) == plan.source_bytes


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), tp=st.integers(1, MAX_TP))
def test_any_plan_reads_what_numpy_cuts_and_every_byte_once(
    data: st.DataObject, tp: int, folder: Path
) -> None:
    parts = data.draw(random_parts(tp, max_rows=data.draw(st.sampled_from((6, 3000)))))
    plan = write_plan(folder, parts, tp)
    spy = PreadvSpy(os.preadv)
    spy.counts = np.zeros(plan.files[FILE].size, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", spy)
        check_bytes(plan, parts, data.draw(st.integers(1, 3)) * BLOCK_BYTES)
    check_read_once(plan, spy)


SHAPED: dict[str, tuple[Part, int]] = {
    # Names say what is special; sizes cross the limits of a read, a chunk or a preadv.
    "rows of a matrix": (Part(random_tensor("t", "F32", (8, 70_000)), Even("column", 0)), 4),
    "short column pieces": (Part(random_tensor("t", "BF16", (3000, 64)), Even("row", 1)), 4),
    "long column pieces": (Part(random_tensor("t", "F32", (9, 120_000)), Even("row", 1)), 3),
    "tiny column pieces": (Part(random_tensor("t", "U8", (40_000, 2)), Even("row", 1)), 2),
    "one very long row": (Part(random_tensor("t", "U8", (2, 1 << 20)), Even("row", 1)), 2),
    "a middle dim": (Part(random_tensor("t", "BF16", (50, 12, 33)), Even("row", 1)), 3),
    "shared heads": (
        Part(random_tensor("t", "F32", (24, 5000)), Heads("kv", 0, 2, 12, replicable=True)),
        4,
    ),
    "padded vocabulary": (Part(random_tensor("t", "BF16", (10, 9001)), Vocab()), 4),
    "one chunk and a byte": (sized("t", 64 * KIB + 1), 1),
    "replicated": (sized("t", 300 * KIB), 3),
}


@pytest.mark.parametrize("chunk_bytes", [BLOCK_BYTES, 64 * KIB, 16 * MIB])
@pytest.mark.parametrize(("part", "tp"), SHAPED.values(), ids=SHAPED)
def test_shapes_around_the_limits_of_a_read(
    part: Part, tp: int, chunk_bytes: int, tmp_path: Path, spy: PreadvSpy
) -> None:
    plan = write_plan(tmp_path, [sized("before", 5), part, sized("after", 7)], tp)
    check_bytes(plan, [sized("before", 5), part, sized("after", 7)], chunk_bytes)
    check_read_once(plan, spy)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("other", [300, 20_000])
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_that_differing_slices_share_are_read_once(
    dim: int, other: int, heads: int, tmp_path: Path, spy: PreadvSpy
) -> None:
    # Ranks have query heads of their own and key and value heads in common, all in one tensor.
    # With one of these, the last rank keeps one stretch of rows from which others keep the end.
    query = Heads("q", dim, 4, 6, replicable=False)
    shared = Heads("kv", dim, heads, 6, replicable=True)
    rows = 24 + 2 * 6 * heads
    shape = (rows, other) if dim == 0 else (other, rows)
    cut = Fused("qkv", dim, ((24, query), (6 * heads, shared), (6 * heads, shared)))
    part = Part(random_tensor("t", "U8", shape), cut)
    plan = write_plan(tmp_path, [part], 4)
    check_bytes(plan, [part], 4 * BLOCK_BYTES)
    check_read_once(plan, spy)


def test_column_pieces_do_not_cost_a_system_call_each(tmp_path: Path, spy: PreadvSpy) -> None:
    part = Part(random_tensor("t", "BF16", (8000, 64)), Even("row", 1))
    check_bytes(write_plan(tmp_path, [part], 4), [part], 16 * MIB)
    assert spy.calls < 50


def test_no_call_takes_more_buffers_than_the_system_allows(tmp_path: Path, spy: PreadvSpy) -> None:
    # Chunks of unequal columns end in different rows, so the rows are read piece by piece.
    rows = BLOCK_BYTES
    raw = random_tensor("t", "U8", (rows, 4))
    source = write_plan(tmp_path, [Part(raw)], 1).tensors[0].source
    left = StridedRun(0, 4, 0, 3, 3, rows)
    right = StridedRun(3, 4, 0, 1, 1, rows)
    slices = (
        Slice("t", "U8", (rows, 3), 3 * rows, 3 * rows, 0, (), (left,)),
        Slice("t", "U8", (rows, 1), rows, rows, 0, (), (right,)),
    )
    tensor = TensorPlan(source, "", "dense", "row", "", slices)
    memory = [bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)]
    files = OpenFiles(write_plan(tmp_path, [Part(raw)], 1).files)
    read_tensor(
        files,
        tensor,
        [Target(piece, 0, memoryview(local)) for piece, local in zip(slices, memory, strict=True)],
    )
    files.close()
    array = np.frombuffer(raw.data, np.uint8).reshape(rows, 4)
    assert bytes(memory[0]) == array[:, :3].tobytes()[:BLOCK_BYTES]
    assert bytes(memory[1]) == array[:, 3].tobytes()
    assert spy.widest == os.sysconf("SC_IOV_MAX")
    assert spy.counts.max() == 1


@pytest.mark.parametrize("most", [1, 1000, 4096])
def test_short_reads_are_resumed_inside_a_buffer(most: int, tmp_path: Path, spy: PreadvSpy) -> None:
    spy.most = most
    size = 7 if most == 1 else 70
    parts = [
        Part(random_tensor("row", "F32", (size, 30)), Even("row", 1)),
        Part(random_tensor("column", "U8", (size * 3, 9)), Even("column", 0)),
        sized("whole", size * 100 + 3),
    ]
    plan = write_plan(tmp_path, parts, 3)
    check_bytes(plan, parts, BLOCK_BYTES)
    check_read_once(plan, spy)


# ---------------------------------------------------------------- files that change


def single_file_plan(path: Path) -> LoadPlan:
    """A plan that takes a whole file, whatever is in it, as one tensor."""
    status = path.stat()
    file = CheckpointFile(path.name, str(path), status.st_size, status.st_mtime_ns, status.st_ino)
    size = status.st_size
    source = TensorInfo("t", "U8", (size,), path.name, 0, size)
    piece = Slice("t", "U8", (size,), size, size, 0, (), (StridedRun(0, size, 0, size, size, 1),))
    tensor = TensorPlan(source, "", "dense", "replicated", "", (piece,))
    return LoadPlan(str(path), "unknown", 1, (tensor,), {path.name: file}, False, ())


def test_a_file_truncated_while_open_is_data_loss_a25(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 65536)
    plan = single_file_plan(path)
    files = OpenFiles(plan.files)
    os.truncate(path, 4096)
    (piece,) = plan.tensors[0].slices
    view = memoryview(bytearray(BLOCK_BYTES))
    with pytest.raises(DataLoss, match="ends at byte 49152") as caught:
        read_tensor(files, plan.tensors[0], [Target(piece, 3 * BLOCK_BYTES, view)])
    assert caught.value.reason == "FILE_TRUNCATED"
    assert caught.value.metadata == {"file": "model.safetensors", "tensor": "t"}
    # The recipe's own offset, through a slice that begins there.
    part = Slice("t", "U8", (16,), 16, 16, 0, (), (StridedRun(40960, 16, 0, 16, 16, 1),))
    tensor = TensorPlan(plan.tensors[0].source, "", "dense", "column", "", (part,))
    with pytest.raises(DataLoss, match="ends at byte 40960"):
        read_tensor(files, tensor, [Target(part, 0, view[:16])])
    with pytest.raises(DataLoss) as changed:
        files.check_unchanged()
    assert changed.value.reason == "FILE_CHANGED"
    files.close()


def test_a_file_truncated_inside_a_read_is_data_loss(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 65536)
    plan = single_file_plan(path)
    files = OpenFiles(plan.files)
    os.truncate(path, 20_000)
    (piece,) = plan.tensors[0].slices
    view = memoryview(bytearray(65536))
    with pytest.raises(DataLoss, match="ends at byte 20000"):
        read_tensor(files, plan.tensors[0], [Target(piece, 0, view)])
    files.close()


def test_a_file_that_cannot_be_read_is_data_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 10)
    plan = single_file_plan(path)
    files = OpenFiles(plan.files)

    def broken(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    (piece,) = plan.tensors[0].slices
    with pytest.raises(DataLoss, match="Input/output error") as caught:
        read_tensor(files, plan.tensors[0], [Target(piece, 0, memoryview(bytearray(10)))])
    assert caught.value.reason == "READ_FAILED"
    assert caught.value.metadata["file"] == "model.safetensors"
    files.close()


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def grow(path: Path) -> None:
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    status = path.stat()
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [touch, grow, replace])
def test_a_file_changed_between_planning_and_opening_is_refused(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    plan = write_plan(tmp_path, [sized("t", 10)], 1)
    before = open_descriptors()
    change(tmp_path / FILE)
    with pytest.raises(DataLoss, match=FILE) as caught:
        OpenFiles(plan.files)
    assert caught.value.reason == "FILE_CHANGED"
    assert caught.value.metadata == {"file": FILE}
    assert open_descriptors() == before


@pytest.mark.parametrize("change", [touch, grow])
def test_a_file_changed_while_it_is_open_is_noticed(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    files = OpenFiles(write_plan(tmp_path, [sized("t", 10)], 1).files)
    files.check_unchanged()
    change(tmp_path / FILE)
    with pytest.raises(DataLoss) as caught:
        files.check_unchanged()
    assert caught.value.reason == "FILE_CHANGED"
    files.close()


def test_a_file_that_is_gone_is_data_loss(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [sized("t", 10)], 1)
    (tmp_path / FILE).unlink()
    with pytest.raises(DataLoss, match="No such file") as caught:
        OpenFiles(plan.files)
    assert caught.value.reason == "READ_FAILED"


def test_a_failed_opening_leaves_no_file_open(tmp_path: Path) -> None:
    file = write_plan(tmp_path, [sized("t", 10)], 1).files[FILE]
    gone = CheckpointFile("z", str(tmp_path / "z"), 1, 1, 1)
    before = open_descriptors()
    with pytest.raises(DataLoss):
        OpenFiles({FILE: file, "z": gone})
    assert open_descriptors() == before


def test_closing_twice_is_harmless_and_gives_the_descriptors_back(tmp_path: Path) -> None:
    before = open_descriptors()
    files = OpenFiles(write_plan(tmp_path, [sized("t", 10)], 1).files)
    assert open_descriptors() != before
    files.close()
    files.close()
    assert open_descriptors() == before


def open_descriptors() -> list[int]:
    """Descriptors of this process that are open."""
    highest = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096)
    found = []
    for descriptor in range(highest):
        try:
            os.fstat(descriptor)
        except OSError:
            continue
        found.append(descriptor)
    return found


# ---------------------------------------------------------------- tied heads


def tied_parts(head: bytes, cut: Vocab | Replicated) -> list[Part]:
    embedding = random_tensor("embed", "BF16", (30, 20_000))
    return [
        Part(embedding, cut, aliases=("head",), twin="head"),
        Part(RawTensor("head", "BF16", (30, 20_000), head)),
    ]


@pytest.mark.parametrize("cut", [Vocab(), Replicated()])
def test_an_equal_head_is_read_once_along_with_the_embedding(
    cut: Vocab | Replicated, tmp_path: Path, spy: PreadvSpy
) -> None:
    parts = tied_parts(random_tensor("embed", "BF16", (30, 20_000)).data, cut)
    plan = write_plan(tmp_path, parts, 4)
    check_bytes(plan, parts, 64 * KIB)
    check_read_once(plan, spy)
    assert plan.source_bytes == 2 * len(parts[0].tensor.data)


@pytest.mark.parametrize("position", [0, 12_345, 600_000, -1])
@pytest.mark.parametrize("cut", [Vocab(), Replicated()])
def test_a_head_that_differs_in_one_byte_anywhere_is_refused(
    position: int, cut: Vocab | Replicated, tmp_path: Path
) -> None:
    head = bytearray(random_tensor("embed", "BF16", (30, 20_000)).data)
    head[position] ^= 1
    plan = write_plan(tmp_path, tied_parts(bytes(head), cut), 4)
    with pytest.raises(TiedHeadDiffers, match="'head' to 'embed'") as caught:
        read_plan(plan, 64 * KIB)
    assert caught.value.metadata == {"tensor": "head", "embedding": "embed"}
