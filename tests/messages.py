"""Messages of the service with every field set, for tests of what is made from them."""

from __future__ import annotations

from collections.abc import Sequence

from loader_service.errors import CLASS_KEY
from loader_service.v1 import coordinator_pb2, types_pb2

RANKS = (
    types_pb2.RankProgress(
        rank=0,
        worker_id="host-0",
        tensor_count=3,
        resident_bytes=5_000_000_000,
        total_bytes=4_999_999_999,
        done_bytes=4_999_999_999,
        transport="posix/memory,cma/memory",
        bytes_by_source=types_pb2.BytesBySource(coordinator_bytes=4_999_999_999),
        verified=True,
        state=types_pb2.RANK_STATE_COMMITTED,
    ),
    types_pb2.RankProgress(
        rank=1,
        replica=1,
        worker_id="host-1",
        tensor_count=2,
        resident_bytes=10,
        total_bytes=8,
        done_bytes=8,
        bytes_per_second=2.5,
        transport="tcp/eth0",
        bytes_by_source=types_pb2.BytesBySource(coordinator_bytes=5, local_bytes=2, peer_bytes=1),
        state=types_pb2.RANK_STATE_COMMITTED,
    ),
)


def succeeded() -> types_pb2.Load:
    load = types_pb2.Load(
        load_id="load-0a1b2c3d",
        state=types_pb2.LOAD_STATE_SUCCEEDED,
        path="/models/wörter",
        architecture="LlamaForCausalLM",
        tp=2,
        replicas=1,
        source_bytes=9_007_199_254_740_993,
        wire_bytes=5_000_000_007,
        resident_bytes=5_000_000_010,
        ranks=RANKS,
        warnings=["3 bytes follow the last tensor"],
        revision=17,
        progress=1.0,
        owner="anna",
    )
    load.create_time.FromJsonString("2026-12-01T05:06:07.250Z")
    load.transfer_duration.FromMilliseconds(1250)
    load.total_duration.FromMilliseconds(2000)
    return load


def streaming(
    shares: Sequence[float] = (0.75, 0.25), stalled: Sequence[int] = (), tp: int = 2
) -> types_pb2.Load:
    """A load on the way; `shares` is how far each rank has come."""
    total = 4 << 30
    load = types_pb2.Load(
        load_id="load-5e5e5e5e",
        state=types_pb2.LOAD_STATE_STREAMING,
        path="/models/llama",
        architecture="LlamaForCausalLM",
        tp=tp,
        replicas=1,
        source_bytes=total,
        wire_bytes=total * tp,
        resident_bytes=total * tp,
        revision=9,
        progress=min(shares),
        slowest_rank=min(range(tp), key=lambda rank: shares[rank]),
        owner="anna",
    )
    for rank in range(tp):
        message = load.ranks.add(
            rank=rank,
            worker_id=f"w{rank}",
            tensor_count=120,
            resident_bytes=total,
            total_bytes=total,
            done_bytes=int(total * shares[rank]),
            bytes_per_second=0.0 if rank in stalled else 256 << 20,
            transport="tcp/eth0",
            state=types_pb2.RANK_STATE_RECEIVING,
            stalled=rank in stalled,
        )
        message.bytes_by_source.coordinator_bytes = message.done_bytes
        message.idle_duration.FromMilliseconds(4000 if rank in stalled else 10)
    if not stalled:
        load.eta_duration.FromSeconds(12)
    load.create_time.FromJsonString("2026-12-01T05:00:00Z")
    load.transfer_duration.FromSeconds(6)
    load.total_duration.FromSeconds(8)
    return load


def failed() -> types_pb2.Load:
    load = types_pb2.Load(
        load_id="load-ffffffff",
        state=types_pb2.LOAD_STATE_FAILED,
        path="m",
        tp=1,
        replicas=1,
        failure=types_pb2.Failure(
            reason="DIGEST_MISMATCH",
            message="tensor 't' on rank 0: the landed bytes are not the bytes that were read",
            metadata={"tensor": "t", "rank": "0", CLASS_KEY: "DigestMismatch"},
        ),
    )
    load.create_time.FromJsonString("2026-12-01T00:00:00Z")
    return load


def worker() -> types_pb2.Worker:
    message = types_pb2.Worker(
        worker_id="host-0",
        address="10.0.0.1:4000",
        host="host",
        device="numpy",
        state=types_pb2.WORKER_STATE_BUSY,
        incarnation="0123456789abcdef",
        memory=types_pb2.MemoryUsage(
            resident_bytes=1,
            loaded_bytes=2,
            allocated_bytes=3,
            free_bytes=4,
            total_bytes=80 << 30,
        ),
        load_id="load-0a1b2c3d",
        rank=1,
        transport="tcp/eth0",
        package_version="0.1.0",
    )
    message.heartbeat_time.FromJsonString("2026-12-01T05:06:08Z")
    return message


SLICES = {
    1: [types_pb2.TensorSlice(name="a", dtype="F8_E4M3", shape=[0, 4])],
    0: [
        types_pb2.TensorSlice(name="b", dtype="I64", bytes=8, sha256="ab" * 32),
        types_pb2.TensorSlice(
            name="a",
            dtype="BF16",
            shape=[19, 16],
            bytes=608,
            padding_rows=1,
            aliases=["lm_head.weight"],
            sha256="00" * 32,
        ),
    ],
}

PLAN = coordinator_pb2.PlanLoadResponse(
    path="/models/m",
    architecture="BertModel",
    tp=2,
    source_bytes=100,
    tied_head_present=True,
    warnings=["'lm_head.weight' is tied and stands in the file"],
    ranks=[
        coordinator_pb2.RankPlan(
            rank=rank,
            source_bytes=60 + rank,
            wire_bytes=50 + rank,
            resident_bytes=52,
            replicated_bytes=10,
            staging_peak_bytes=400,
            deferred_bytes=rank,
            tensor_count=7,
        )
        for rank in range(2)
    ],
    admission=coordinator_pb2.Admission(
        refusal=types_pb2.Failure(
            reason="OUT_OF_MEMORY",
            message="rank 1 needs 452 bytes on worker 'host-1', 4 are free",
            metadata={"rank": "1", "worker_id": "host-1", CLASS_KEY: "OutOfMemory"},
        ),
        ranks=[
            coordinator_pb2.RankAdmission(
                rank=rank,
                worker_id=f"host-{rank}",
                needed_bytes=452,
                free_bytes=free,
                fits=free > 452,
            )
            for rank, free in enumerate((1000, 4))
        ],
    ),
    tensors=[
        coordinator_pb2.TensorPlan(
            name="encoder.weight",
            role="query",
            storage="dense",
            cut="column",
            reason="whole heads go to ranks",
        )
    ],
)

CHECKPOINT = coordinator_pb2.InspectCheckpointResponse(
    path="/models/m",
    architecture="BertModel",
    tensor_count=1,
    payload_bytes=24,
    files=["model.safetensors"],
    warnings=["odd"],
    tensors=[
        coordinator_pb2.CatalogTensor(
            name="w",
            dtype="F32",
            shape=[2, 3],
            bytes=24,
            file="model.safetensors",
            offset_bytes=128,
        )
    ],
)
