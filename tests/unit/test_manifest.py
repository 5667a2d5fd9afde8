"""Manifests: what the coordinator writes is what a worker reads, and nothing else is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_kernels.digest import BLOCK_BYTES
from loader_service.errors import InvalidRequest
from loader_service.plan.cuts import Even, Vocab
from loader_service.plan.slices import LoadPlan
from loader_service.stream.chunks import Chunk, plan_steps, rank_chunks
from loader_service.stream.manifests import manifest_pages
from loader_service.v1 import worker_pb2
from loader_worker.manifest import parse_manifest
from tests.checkpoints import random_tensor
from tests.plans import Part, plan_of_many, random_parts, sized, write_plan

CHUNK = 2 * BLOCK_BYTES
GRPC_LIMIT = 4 << 20

Messages = tuple[worker_pb2.ManifestHeader, list[worker_pb2.ManifestPage]]


def written(plan: LoadPlan, rank: int, chunk_bytes: int = CHUNK) -> tuple[Messages, list[Chunk]]:
    """The messages of one rank after a journey in bytes, and the chunks they were made of."""
    chunks = rank_chunks(plan_steps(plan, chunk_bytes), rank)
    sent = [
        worker_pb2.PrepareLoadRequest.FromString(page.SerializeToString())
        for page in manifest_pages("load-1", plan, rank, chunks)
    ]
    return (sent[0].header, [page.body for page in sent[1:]]), chunks


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_parsed_manifest_is_the_plan_of_its_rank(tp: int, tmp_path: Path) -> None:
    parts = [
        Part(random_tensor("embed", "F32", (7, 900)), Vocab(), aliases=("head", "other")),
        Part(random_tensor("q", "BF16", (6, 9000)), Even("column", 0)),
        Part(random_tensor("empty", "I64", (0, 3))),
        Part(random_tensor("scalar", "F16", ())),
        Part(random_tensor("packed", "F4", (3, 2))),
    ]
    plan = write_plan(tmp_path, parts, tp)
    for rank in range(tp):
        (header, pages), chunks = written(plan, rank)
        manifest = parse_manifest(header, pages)
        assert (manifest.load_id, manifest.rank, manifest.tp) == ("load-1", rank, tp)
        assert manifest.chunks == tuple(chunks)
        for piece, cut in zip(manifest.slices, plan.rank_slices(rank), strict=True):
            for field in ("name", "dtype", "shape", "nbytes", "wire_bytes", "padding_rows"):
                assert getattr(piece, field) == getattr(cut, field)
            assert piece.aliases == cut.aliases
        totals = plan.totals(rank)
        assert manifest.resident_bytes == totals.resident_bytes
        assert manifest.wire_bytes == totals.wire_bytes


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tp=st.integers(1, 4))
def test_every_plan_survives_the_journey(
    data: st.DataObject, tp: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = write_plan(tmp_path_factory.mktemp("plan"), data.draw(random_parts(tp)), tp)
    for rank in range(tp):
        (header, pages), chunks = written(plan, rank)
        manifest = parse_manifest(header, pages)
        assert manifest.chunks == tuple(chunks)
        assert [piece.name for piece in manifest.slices] == [
            piece.name for piece in plan.rank_slices(rank)
        ]


# ---------------------------------------------------------------- malformed manifests


@pytest.fixture
def valid(tmp_path: Path) -> Messages:
    """Slices `big` (two chunks), `small` and `tiny` (one bundle), and `void` without payload."""
    parts = [sized("big", 3 * BLOCK_BYTES), sized("small", 10), sized("tiny", 4), sized("void", 0)]
    messages, chunks = written(write_plan(tmp_path, parts, 1), 0)
    assert [len(chunk.extents) for chunk in chunks] == [1, 1, 3]
    parse_manifest(*messages)
    return messages


def extent(
    pages: list[worker_pb2.ManifestPage], chunk: int, number: int
) -> worker_pb2.ManifestExtent:
    return pages[0].chunks[chunk].extents[number]


def swap_chunks(header: worker_pb2.ManifestHeader, pages: list[worker_pb2.ManifestPage]) -> None:
    chunks = list(pages[0].chunks)
    del pages[0].chunks[:]
    pages[0].chunks.extend([chunks[1], chunks[0], *chunks[2:]])


Damage = Callable[[worker_pb2.ManifestHeader, list[worker_pb2.ManifestPage]], object]


def both(*damages: Damage) -> Damage:
    """Several damages at once."""

    def damage(header: worker_pb2.ManifestHeader, pages: list[worker_pb2.ManifestPage]) -> None:
        for part in damages:
            part(header, pages)

    return damage


DAMAGES: dict[str, Damage] = {
    "unknown digest": lambda h, p: setattr(h, "digest_algorithm", "loader-slice-v2"),
    "no digest": lambda h, p: h.ClearField("digest_algorithm"),
    "negative rank": lambda h, p: setattr(h, "rank", -1),
    "rank beyond the group": lambda h, p: setattr(h, "rank", 1),
    "no group": lambda h, p: setattr(h, "tp", 0),
    "a slice less than announced": lambda h, p: p[0].slices.pop(),
    "a slice more announced": lambda h, p: setattr(h, "slice_count", 5),
    "a chunk less than announced": lambda h, p: p[0].chunks.pop(),
    "a chunk more announced": lambda h, p: setattr(h, "chunk_count", 4),
    "other resident bytes": lambda h, p: setattr(h, "resident_bytes", h.resident_bytes + 1),
    "no pages": lambda h, p: p.clear(),
    "unknown dtype": lambda h, p: setattr(p[0].slices[1], "dtype", "F7"),
    "dtype of another size": lambda h, p: setattr(p[0].slices[1], "dtype", "F32"),
    "dtype that does not fill bytes": both(
        lambda h, p: setattr(p[0].slices[1], "dtype", "F4"),
        lambda h, p: p[0].slices[1].shape.__setitem__(0, 9),
    ),
    "negative shape": lambda h, p: p[0].slices[1].shape.__setitem__(0, -10),
    "two negative dims": both(
        lambda h, p: p[0].slices[1].shape.__setitem__(0, -10),
        lambda h, p: p[0].slices[1].shape.append(-1),
    ),
    "more wire than resident bytes": lambda h, p: setattr(p[0].slices[1], "wire_bytes", 11),
    "negative wire bytes": lambda h, p: setattr(p[0].slices[1], "wire_bytes", -1),
    "fewer wire bytes than chunks": lambda h, p: setattr(p[0].slices[1], "wire_bytes", 9),
    "two slices of one name": lambda h, p: setattr(p[0].slices[1], "name", "big"),
    "alias of another's name": lambda h, p: p[0].slices[1].aliases.append("big"),
    "a slice number too large": lambda h, p: setattr(extent(p, 2, 0), "slice_index", 4),
    "a negative slice number": lambda h, p: setattr(extent(p, 2, 0), "slice_index", -1),
    "a gap": lambda h, p: setattr(extent(p, 1, 0), "offset_bytes", 2 * BLOCK_BYTES + BLOCK_BYTES),
    "an overlap": lambda h, p: setattr(extent(p, 1, 0), "offset_bytes", BLOCK_BYTES),
    "a start behind the first byte": lambda h, p: setattr(
        extent(p, 0, 0), "offset_bytes", BLOCK_BYTES
    ),
    "an offset inside a block": both(
        lambda h, p: setattr(extent(p, 0, 0), "length_bytes", CHUNK - 1),
        lambda h, p: setattr(extent(p, 1, 0), "offset_bytes", CHUNK - 1),
        lambda h, p: setattr(extent(p, 1, 0), "length_bytes", BLOCK_BYTES + 1),
    ),
    "a negative length": lambda h, p: setattr(extent(p, 2, 0), "length_bytes", -1),
    "an end that is missing": lambda h, p: setattr(extent(p, 2, 0), "length_bytes", 9),
    "bytes beyond the end": lambda h, p: setattr(extent(p, 2, 0), "length_bytes", 11),
    "a slice filled twice": lambda h, p: p[0].chunks[2].extents.append(extent(p, 2, 0)),
    "a slice that nothing fills": lambda h, p: p[0].chunks[2].extents.pop(1),
    "a slice without payload that no chunk ends": lambda h, p: p[0].chunks[2].extents.pop(2),
    "a slice without payload that ends twice": lambda h, p: (
        p[0].chunks[2].extents.append(extent(p, 2, 2))
    ),
    "an empty extent before the payload": lambda h, p: (
        p[0].chunks[2].extents.insert(0, worker_pb2.ManifestExtent(slice_index=1))
    ),
    "an empty extent after the payload": lambda h, p: (
        p[0].chunks[2].extents.append(worker_pb2.ManifestExtent(slice_index=1, offset_bytes=10))
    ),
    "a chunk without extents": both(
        lambda h, p: p[0].chunks.add(),
        lambda h, p: setattr(h, "chunk_count", 4),
    ),
    "chunks out of order": swap_chunks,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_malformed_manifest_is_refused(damage: Damage, valid: Messages) -> None:
    header, pages = valid
    damage(header, pages)
    with pytest.raises(InvalidRequest, match="bad manifest") as caught:
        parse_manifest(header, pages)
    assert caught.value.reason == "INVALID_MANIFEST"


# ---------------------------------------------------------------- sizes


def test_pages_of_a_hundred_thousand_tensors_stay_below_the_limit_of_grpc() -> None:
    plan = plan_of_many(100_000)
    chunks = rank_chunks(plan_steps(plan, 16 << 20), 0)
    header, *pages = manifest_pages("load-1", plan, 0, chunks)
    assert header.header.slice_count == sum(len(page.body.slices) for page in pages) == 100_000
    assert header.header.chunk_count == sum(len(page.body.chunks) for page in pages) == len(chunks)
    assert max(page.ByteSize() for page in pages) < GRPC_LIMIT / 2
    assert len(pages) > 2


def test_a_manifest_of_many_pages_is_put_together_in_order() -> None:
    plan = plan_of_many(16_000)
    (header, pages), chunks = written(plan, 0)
    assert len(pages) > 1
    manifest = parse_manifest(header, pages)
    assert [piece.name for piece in manifest.slices] == [
        tensor.source.name for tensor in plan.tensors
    ]
    assert manifest.chunks == tuple(chunks)
