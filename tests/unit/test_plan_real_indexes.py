"""Plans of real models at full size: real headers, no payload, totals by independent arithmetic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loader_service.checkpoint.catalog import Checkpoint
from loader_service.checkpoint.files import read_checkpoint
from loader_service.errors import PlanRefused
from loader_service.plan.planner import plan_load

INDEXES = Path(__file__).resolve().parents[2].parent / "shared" / "indexes"
TOOL = INDEXES / "tools" / "sparse_checkpoint.py"

pytestmark = pytest.mark.skipif(
    not TOOL.exists(), reason="metadata of real checkpoints is not beside the repository"
)

PER_RANK: dict[str, dict[int, int]] = {
    "dolphin3-mistral-24b": {
        1: 47_144_847_360,
        2: 23_572_838_400,
        4: 11_786_844_160,
        8: 5_893_847_040,
    },
    "gemma2-2b": {1: 5_228_683_776, 2: 2_614_583_808, 4: 1_307_533_824},
    "llama31-8b-modelstock": {
        1: 16_060_522_496,
        2: 8_030_527_488,
        4: 4_015_529_984,
        8: 2_008_031_232,
    },
    "phi3-mini-merged": {1: 7_642_159_104, 2: 3_821_279_232, 4: 1_910_839_296, 8: 955_619_328},
    "qwen25-14b-cogito": {1: 29_531_895_808, 2: 14_766_454_784, 4: 7_383_734_272, 8: 3_692_374_016},
    "qwen3-1p7b": {1: 3_441_149_952, 2: 1_720_698_880, 4: 860_473_344, 8: 430_360_576},
}
"""Resident bytes of a rank by tp; tp = 1 is the published total_size.

The others follow from it: norms + (total_size - norms + bytes of the zero rows) / tp.
"""

PADDING = {
    "dolphin3-mistral-24b": {2: 0, 4: 2, 8: 6},
    "gemma2-2b": {2: 0, 4: 0},
    "llama31-8b-modelstock": {2: 0, 4: 0, 8: 0},
    "phi3-mini-merged": {2: 0, 4: 0, 8: 0},
    "qwen25-14b-cogito": {2: 1, 4: 3, 8: 7},
    "qwen3-1p7b": {2: 0, 4: 0, 8: 0},
}
"""Zero rows of the last rank: vocabularies of 131074, 256000, 128256, 32064, 151665 and 151936 rows."""

CASES = [(name, tp) for name, sizes in PER_RANK.items() for tp in sizes]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("real")
    for name in PER_RANK:
        subprocess.run([sys.executable, TOOL, "sparse", name, root / name], check=True)
    return {name: read_checkpoint(name, str(root)) for name in PER_RANK}


def resident_bytes(checkpoint: Checkpoint, tp: int) -> int:
    """Bytes of a rank in BF16, from the config's numbers alone."""
    config = dict(checkpoint.config or {})
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    query, key_value = heads * width // tp, config["num_key_value_heads"] * width // tp
    family = config["model_type"]
    layer = 2 * query * hidden + 2 * key_value * hidden  # q, o, k, v
    layer += 3 * config["intermediate_size"] * hidden // tp + 2 * hidden  # feed-forward, norms
    if family == "gemma2":
        layer += 2 * hidden  # norms before and after the feed-forward
    if family == "qwen2":
        layer += query + 2 * key_value  # biases
    if family == "qwen3":
        layer += 2 * width  # q_norm, k_norm
    tables = (
        (1 if config.get("tie_word_embeddings", True) else 2)
        * -(-config["vocab_size"] // tp)
        * hidden
    )
    return 2 * (config["num_hidden_layers"] * layer + tables + hidden)


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_totals_of_real_models(checkpoints: dict[str, Checkpoint], name: str, tp: int) -> None:
    checkpoint = checkpoints[name]
    plan = plan_load(checkpoint, tp)
    assert plan.warnings == ()
    assert plan.source_bytes == PER_RANK[name][1]
    assert resident_bytes(checkpoint, tp) == PER_RANK[name][tp]
    config = dict(checkpoint.config or {})
    row_bytes = 2 * config["hidden_size"] * (1 if config.get("tie_word_embeddings", True) else 2)
    padding = PADDING[name].get(tp, 0)
    for rank in range(tp):
        totals = plan.totals(rank)
        assert totals.resident_bytes == PER_RANK[name][tp]
        zeros = row_bytes * padding if rank == tp - 1 else 0
        assert totals.wire_bytes == totals.resident_bytes - zeros


@pytest.mark.parametrize("name", PER_RANK)
def test_tied_head_of_real_models_is_an_alias(
    checkpoints: dict[str, Checkpoint], name: str
) -> None:
    aliases = {a for t in plan_load(checkpoints[name], 4).tensors for a in t.slices[3].aliases}
    assert aliases == ({"lm_head.weight"} if name in ("gemma2-2b", "qwen3-1p7b") else set())


def test_real_model_is_refused_with_the_sizes_that_fit(checkpoints: dict[str, Checkpoint]) -> None:
    """40 query heads, 8 key/value heads, feed-forward 13824 = 2^9 * 27."""
    with pytest.raises(PlanRefused) as caught:
        plan_load(checkpoints["qwen25-14b-cogito"], 16)
    assert caught.value.reason == "TP_NOT_DIVISIBLE"
    assert caught.value.valid_tp == (1, 2, 4, 8)
