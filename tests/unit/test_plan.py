"""Plans of checkpoints that transformers wrote, byte by byte against the independent cutter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from loader_service.errors import PlanRefused
from loader_service.plan.slices import LoadPlan
from tests.checkpoints import ModelOptions, save_model
from tests.oracle import (
    HEAD,
    ExpectedSlice,
    expected_slices,
    original_bytes,
    reassemble,
    shared_bytes,
)
from tests.plans import payload_of, plan_folder, slices_of

MODELS: dict[str, tuple[ModelOptions, tuple[int, ...]]] = {
    "llama-gqa-sharded": (ModelOptions(max_shard_size="3KB"), (1, 2, 4)),
    "llama-tied-biased-one-kv-head": (
        ModelOptions(
            dtype="F32",
            tied=True,
            heads=12,
            kv_heads=1,
            hidden=48,
            vocabulary=5,
            attention_bias=True,
            mlp_bias=True,
            layers=1,
        ),
        (1, 2, 3, 4),
    ),
    "llama-bare": (
        ModelOptions(heads=12, kv_heads=12, head_size=2, hidden=24, bare=True, layers=1),
        (1, 2, 3, 4),
    ),
    "mistral-three-kv-heads": (
        ModelOptions("mistral", "F16", heads=6, kv_heads=3, hidden=24, max_shard_size="2KB"),
        (1, 3),
    ),
    "qwen2-tied": (ModelOptions("qwen2", tied=True, kv_heads=4, vocabulary=38), (1, 2, 4)),
    "qwen2-one-kv-head": (ModelOptions("qwen2", "F32", kv_heads=1), (1, 2, 4)),
    "qwen3-wide-heads": (
        ModelOptions("qwen3", head_size=8, hidden=12, attention_bias=True),
        (1, 2, 4),
    ),
    "gemma2": (ModelOptions("gemma2", tied=True, head_size=8, attention_bias=True), (1, 2, 4)),
    "gemma2-bare": (ModelOptions("gemma2", "F32", bare=True, kv_heads=1, layers=1), (1, 2, 4)),
    "gemma3": (ModelOptions("gemma3", tied=True, head_size=12, vocabulary=38), (1, 2, 4)),
    "gemma3-bare-untied": (ModelOptions("gemma3", bare=True, layers=1), (1, 2, 4)),
    "phi3": (ModelOptions("phi3", kv_heads=4, max_shard_size="3KB"), (1, 2, 4)),
    "phi3-shared-key-value-heads": (ModelOptions("phi3", "F32", kv_heads=2), (1, 2, 4)),
    "phi3-three-kv-heads": (
        ModelOptions("phi3", "F16", heads=6, kv_heads=3, hidden=24, layers=1),
        (1, 3),
    ),
    "bert": (ModelOptions("bert", "F32", vocabulary=41), (1, 2, 4)),
}
"""Each model with the group sizes up to 4 that its heads and widths allow, worked out by hand."""

ALLOWED = [(name, tp) for name, (_, allowed) in MODELS.items() for tp in allowed]
REFUSED = [
    (name, tp) for name, (_, allowed) in MODELS.items() for tp in range(1, 5) if tp not in allowed
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(root / name, options) for name, (options, _) in MODELS.items()}


def describe(
    ranks: list[dict[str, ExpectedSlice]],
) -> list[dict[str, tuple[str, tuple[int, ...], int, tuple[str, ...], str]]]:
    """The same in a form whose differences can be read."""
    return [
        {
            name: (s.dtype, s.shape, s.padding_rows, s.aliases, s.sha256)
            for name, s in sorted(rank.items())
        }
        for rank in ranks
    ]


@pytest.mark.parametrize(("name", "tp"), ALLOWED)
def test_every_rank_gets_what_the_oracle_cuts(
    folders: Mapping[str, Path], name: str, tp: int
) -> None:
    plan = plan_folder(folders[name], tp)
    assert describe(slices_of(plan)) == describe(expected_slices(folders[name], tp))


@pytest.mark.parametrize(("name", "tp"), ALLOWED)
def test_ranks_together_hold_the_whole_checkpoint(
    folders: Mapping[str, Path], name: str, tp: int
) -> None:
    plan = plan_folder(folders[name], tp)
    assert reassemble(folders[name], slices_of(plan)) == original_bytes(folders[name])


@pytest.mark.parametrize(("name", "tp"), ALLOWED)
def test_totals_are_the_bytes_of_the_slices(
    folders: Mapping[str, Path], name: str, tp: int
) -> None:
    plan = plan_folder(folders[name], tp)
    ranks = expected_slices(folders[name], tp)
    assert plan.source_bytes == sum(map(len, original_bytes(folders[name]).values()))
    shared = shared_bytes(folders[name], tp)
    for rank, slices in enumerate(ranks):
        padding = [
            len(piece.data) // piece.shape[0] * piece.padding_rows
            for piece in slices.values()
            if piece.padding_rows
        ]
        totals = plan.totals(rank)
        assert totals.rank == rank
        assert totals.tensor_count == len(slices)
        assert totals.resident_bytes == sum(len(piece.data) for piece in slices.values())
        assert totals.wire_bytes == totals.resident_bytes - sum(padding)
        assert totals.replicated_bytes == shared[rank]


@pytest.mark.parametrize(("name", "tp"), REFUSED)
def test_other_group_sizes_are_refused_with_those_that_fit(
    folders: Mapping[str, Path], name: str, tp: int
) -> None:
    with pytest.raises(PlanRefused) as caught:
        plan_folder(folders[name], tp)
    assert caught.value.reason == "TP_NOT_DIVISIBLE"
    assert tuple(size for size in caught.value.valid_tp if size <= 4) == MODELS[name][1]
    assert caught.value.metadata["tp"] == str(tp)


def test_tensors_are_planned_in_the_order_in_which_files_are_read(
    folders: Mapping[str, Path],
) -> None:
    plan = plan_folder(folders["llama-gqa-sharded"], 2)
    assert len(plan.files) > 2
    places = [(tensor.source.file, tensor.source.offset) for tensor in plan.tensors]
    assert places == sorted(places)


# ---------------------------------------------------------------- rules, each by itself


def pieces(plan: LoadPlan, name: str) -> list[ExpectedSlice]:
    return [rank[name] for rank in slices_of(plan)]


def test_ranks_share_a_key_value_head_where_there_are_fewer_heads(
    folders: Mapping[str, Path],
) -> None:
    """Two heads of four rows for four ranks: 0 and 1 keep the first, 2 and 3 the second."""
    plan = plan_folder(folders["llama-gqa-sharded"], 4)
    for part in ("k", "v"):
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        first, second, third, fourth = pieces(plan, name)
        assert first.data == second.data != third.data == fourth.data
        assert first.shape == (4, 16)
        planned = next(tensor for tensor in plan.tensors if tensor.source.name == name)
        assert planned.slices[0] is planned.slices[1]
        assert planned.slices[2] is planned.slices[3]
        assert planned.source_bytes == planned.source.nbytes


def test_vocabulary_is_padded_and_a_rank_may_be_all_padding(folders: Mapping[str, Path]) -> None:
    """Five rows for four ranks: 2, 2, 1 and none, each in a slice of two rows."""
    plan = plan_folder(folders["llama-tied-biased-one-kv-head"], 4)
    embedding = pieces(plan, "model.embed_tokens.weight")
    assert [piece.padding_rows for piece in embedding] == [0, 0, 1, 2]
    assert {piece.shape for piece in embedding} == {(2, 48)}
    assert not any(embedding[3].data)
    last = next(t for t in plan.tensors if t.role == "embedding").slices[3]
    assert last.runs == ()
    assert (last.wire_bytes, last.nbytes) == (0, 2 * 48 * 4)


def test_head_of_a_tied_model_is_an_alias_of_the_padded_shard(folders: Mapping[str, Path]) -> None:
    plan = plan_folder(folders["llama-tied-biased-one-kv-head"], 3)
    assert [piece.aliases for piece in pieces(plan, "model.embed_tokens.weight")] == [(HEAD,)] * 3
    assert all(HEAD not in rank for rank in slices_of(plan))
    assert not plan.tied_head_present


@pytest.mark.parametrize(
    ("model", "bias"),
    [
        ("llama-tied-biased-one-kv-head", "model.layers.0.self_attn.o_proj.bias"),
        ("llama-tied-biased-one-kv-head", "model.layers.0.mlp.down_proj.bias"),
        ("qwen3-wide-heads", "model.layers.0.self_attn.o_proj.bias"),
        ("bert", "encoder.layer.1.attention.output.dense.bias"),
        ("bert", "encoder.layer.1.output.dense.bias"),
    ],
)
def test_row_parallel_bias_is_whole_on_every_rank(
    folders: Mapping[str, Path], model: str, bias: str
) -> None:
    whole = original_bytes(folders[model])[bias]
    assert any(whole)
    for piece in pieces(plan_folder(folders[model], 4), bias):
        assert piece.data == whole


def test_column_parallel_bias_follows_its_rows(folders: Mapping[str, Path]) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    whole = original_bytes(folders["qwen2-tied"])[name]
    assert b"".join(p.data for p in pieces(plan_folder(folders["qwen2-tied"], 4), name)) == whole


def test_every_tensor_of_a_plan_says_how_and_why_it_is_cut(folders: Mapping[str, Path]) -> None:
    """What `plan --explain` prints."""
    plan = plan_folder(folders["qwen3-wide-heads"], 2)
    explained = {t.source.name: (t.role, t.cut) for t in plan.tensors}
    layer = "model.layers.0"
    assert explained["model.embed_tokens.weight"] == ("embedding", "vocab")
    assert explained[HEAD] == ("output", "vocab")
    assert explained[f"{layer}.self_attn.q_proj.weight"] == ("attention_query", "column")
    assert explained[f"{layer}.self_attn.o_proj.weight"] == ("attention_output", "row")
    assert explained[f"{layer}.self_attn.o_proj.bias"] == ("row_bias", "replicated")
    assert explained[f"{layer}.self_attn.q_norm.weight"] == ("head_norm", "replicated")
    assert explained[f"{layer}.mlp.down_proj.weight"] == ("feed_forward_down", "row")
    assert all(tensor.reason and tensor.storage == "dense" for tensor in plan.tensors)
    assert plan.architecture == "Qwen3ForCausalLM"


def test_fused_parts_are_cut_each_for_itself(folders: Mapping[str, Path]) -> None:
    """Four query heads and two key/value heads for four ranks: [q0|k0|v0], [q1|k0|v0], ..."""
    plan = plan_folder(folders["phi3-shared-key-value-heads"], 4)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    (planned,) = (tensor for tensor in plan.tensors if tensor.source.name == name)
    rows = payload_of(plan, planned.source)
    head = len(rows) // 8
    heads = [rows[number * head : (number + 1) * head] for number in range(8)]
    wanted = [heads[rank] + heads[4 + rank // 2] + heads[6 + rank // 2] for rank in range(4)]
    assert [piece.data for piece in pieces(plan, name)] == wanted
    # Read once, though two ranks get each key and value head.
    assert planned.source_bytes == len(rows)
    assert [piece.replicated_bytes for piece in planned.slices] == [2 * head] * 4


def test_a_gemma_without_the_flag_is_tied(folders: Mapping[str, Path], tmp_path: Path) -> None:
    """The published configs leave it out, and mean yes."""
    folder = tmp_path / "gemma"
    shutil.copytree(folders["gemma2"], folder)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    plan = plan_folder(folder, 2)
    (embedding,) = (each for each in plan.tensors if each.role == "embedding")
    assert embedding.slices[0].aliases == (HEAD,)
    assert describe(slices_of(plan)) == describe(expected_slices(folder, 2))
