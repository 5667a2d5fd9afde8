"""Small checkpoints that are cut as a test says, what every rank must end up with, what it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from loader_service.checkpoint.catalog import TensorInfo
from loader_service.checkpoint.files import read_checkpoint
from loader_service.plan.cuts import Cut, Even, Fused, Heads, Replicated, Vocab, cut_tensor
from loader_service.plan.planner import plan_load
from loader_service.plan.slices import LoadPlan, Slice, StridedRun, TensorPlan
from tests.checkpoints import BITS, RawTensor, payload_bytes, random_tensor, safetensors_file
from tests.oracle import ExpectedSlice, apply_runs

FILE = "model.safetensors"
MAX_TP = 4
_HEAD_SIZE = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor and its cut.

    Attributes:
        tensor: the tensor.
        cut: how it goes to the ranks.
        aliases: other names of its slices.
        twin: name of the tensor that must hold the same bytes; it is not loaded itself.
    """

    tensor: RawTensor
    cut: Cut = dataclasses.field(default_factory=Replicated)
    aliases: tuple[str, ...] = ()
    twin: str = ""

    def local_bytes(self, rank: int, tp: int) -> bytes:
        """The bytes that a rank keeps, zero rows included, cut by NumPy."""
        if isinstance(self.cut, Replicated):
            return self.tensor.data
        item = BITS[self.tensor.dtype] // 8
        array = np.frombuffer(self.tensor.data, np.uint8).reshape(*self.tensor.shape, item)
        return _local_array(array, self.cut, rank, tp).tobytes()


def _local_array(
    array: npt.NDArray[np.uint8], cut: Cut, rank: int, tp: int
) -> npt.NDArray[np.uint8]:
    if isinstance(cut, Fused):
        edges = np.cumsum([size for size, _ in cut.parts])[:-1]
        parts = zip(np.split(array, edges, cut.dim), cut.parts, strict=True)
        return np.concatenate(
            [_local_array(part, inner, rank, tp) for part, (_, inner) in parts], cut.dim
        )
    if isinstance(cut, Vocab):
        filler = -array.shape[0] % tp
        array = np.concatenate([array, np.zeros((filler, *array.shape[1:]), np.uint8)])
    if isinstance(cut, Heads) and cut.count < tp:
        return np.split(array, cut.count, cut.dim)[rank * cut.count // tp]
    return np.split(array, tp, cut.dim)[rank]


def write_plan(folder: Path, parts: Sequence[Part], tp: int) -> LoadPlan:
    """Write one file with the tensors in the given order and plan it."""
    (folder / FILE).write_bytes(safetensors_file([part.tensor for part in parts]))
    catalog = read_checkpoint(str(folder), str(folder)).catalog
    twins = {part.twin for part in parts}
    tensors = []
    for part in parts:
        source = catalog.get(part.tensor.name)
        assert source is not None
        if source.name in twins:
            continue
        slices = cut_tensor(source, part.cut, tp, part.aliases)
        twin = catalog.get(part.twin)
        tensors.append(TensorPlan(source, "weight", "dense", part.cut.name, "", slices, twin))
    return LoadPlan(
        str(folder), "unknown", tp, tuple(tensors), catalog.files, bool(twins - {""}), ()
    )


def plan_folder(folder: Path, tp: int) -> LoadPlan:
    """Plan the checkpoint in `folder`."""
    return plan_load(read_checkpoint(str(folder), str(folder)), tp)


def payload_of(plan: LoadPlan, tensor: TensorInfo) -> bytes:
    """A tensor's bytes, from its file."""
    content = Path(plan.files[tensor.file].path).read_bytes()
    return content[tensor.offset : tensor.offset + tensor.nbytes]


def slices_of(plan: LoadPlan) -> list[dict[str, ExpectedSlice]]:
    """What every rank would hold if it copied exactly the planned bytes."""
    ranks: list[dict[str, ExpectedSlice]] = [{} for _ in range(plan.tp)]
    for tensor in plan.tensors:
        payload = payload_of(plan, tensor.source)
        for rank, piece in enumerate(tensor.slices):
            data = apply_runs(payload, piece.runs, piece.nbytes)
            assert piece.wire_bytes == sum(run.nbytes for run in piece.runs)
            assert not any(data[piece.wire_bytes :])
            ranks[rank][piece.name] = ExpectedSlice(
                piece.dtype, piece.shape, data, piece.padding_rows, piece.aliases
            )
    return ranks


def plan_of_many(count: int) -> LoadPlan:
    """A plan of many small tensors with long names, for one rank, made without a file."""
    runs = (StridedRun(0, 64, 0, 64, 64, 1),)
    tensors = []
    for number in range(count):
        name = f"model.layers.{number // 1000}.mlp.experts.{number % 1000}.down_proj.weight_scale"
        source = TensorInfo(name, "BF16", (8, 4), FILE, number * 64, 64)
        piece = Slice(name, "BF16", (8, 4), 64, 64, 0, (), runs)
        tensors.append(TensorPlan(source, "weight", "dense", "replicated", "", (piece,)))
    return LoadPlan("many", "unknown", 1, tuple(tensors), {}, False, ())


def sized(name: str, nbytes: int) -> Part:
    """A replicated tensor of `nbytes` bytes."""
    return Part(random_tensor(name, "U8", (nbytes,)))


@st.composite
def random_parts(draw: st.DrawFn, tp: int, max_rows: int = 6) -> list[Part]:
    """Tensors of random shapes, dtypes and cuts; some without any byte."""
    parts = []
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(("U8", "BF16", "F32", "C64")))
        rows, columns = draw(st.integers(0, max_rows)), draw(st.integers(0, 5))
        query = Heads("q", 0, tp, _HEAD_SIZE, replicable=False)
        key_value = Heads("kv", 0, 1, _HEAD_SIZE, replicable=True)
        sizes = (_HEAD_SIZE * tp, _HEAD_SIZE, _HEAD_SIZE)
        qkv = Fused("qkv", 0, tuple(zip(sizes, (query, key_value, key_value), strict=True)))
        choices: tuple[tuple[Cut, tuple[int, ...]], ...] = (
            (Replicated(), (rows, columns)),
            (Replicated(), ()),
            (Even("column", 0), (rows * tp, columns)),
            (Even("row", 1), (rows, columns * tp)),
            (Even("row", 1), (rows, columns * tp, 3)),
            (Vocab(), (rows * 3 + 1, columns)),
            (key_value, (_HEAD_SIZE, columns)),
            (query, (_HEAD_SIZE * tp, columns)),
            (qkv, (sum(sizes), columns)),
        )
        cut, shape = draw(st.sampled_from(choices))
        parts.append(Part(random_tensor(f"t{number}", dtype, shape), cut))
        assert len(parts[-1].tensor.data) == payload_bytes(dtype, shape)
    return parts
