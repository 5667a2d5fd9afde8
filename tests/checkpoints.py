"""Writers of test checkpoints. They import nothing of ours, so that they can judge our readers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

INDEX_NAME = "model.safetensors.index.json"

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_NAMES_OF_ARRAY_DTYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


@dataclasses.dataclass(frozen=True)
class RawTensor:
    """A tensor as a file holds it: `data` are its little-endian bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def payload_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; it must end on a byte boundary."""
    bits = BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype}{list(shape)} has {bits} bits, which do not fill whole bytes")
    return bits // 8


def random_tensor(name: str, dtype: str, shape: Sequence[int], seed: int = 0) -> RawTensor:
    """A tensor of random bytes, other ones for another name or seed."""
    generator = np.random.default_rng([seed, *name.encode()])
    return RawTensor(name, dtype, tuple(shape), generator.bytes(payload_bytes(dtype, shape)))


def tensor_of_array(name: str, array: npt.NDArray[Any]) -> RawTensor:
    """A tensor with the logical values of `array`, whatever its strides and byte order."""
    dtype = _NAMES_OF_ARRAY_DTYPES.get(array.dtype.name)
    if dtype is None:
        raise ValueError(f"{name}: the format has no dtype for {array.dtype}")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return RawTensor(name, dtype, array.shape, little.tobytes(order="C"))


def tensors_of_every_dtype(seed: int = 0) -> list[RawTensor]:
    """Every dtype as matrix, scalar and zero-sized tensor, laid out so that most are unaligned."""
    tensors = []
    for dtype, bits in BITS.items():
        tensors.append(random_tensor(f"{dtype}.odd", "U8", (1,), seed))
        tensors.append(random_tensor(f"{dtype}.matrix", dtype, (4, 6), seed))
        tensors.append(random_tensor(f"{dtype}.empty", dtype, (3, 0), seed))
        if bits >= 8:
            tensors.append(random_tensor(f"{dtype}.scalar", dtype, (), seed))
    return tensors


# ---------------------------------------------------------------- bytes of files


def raw_file(header: object, payload: bytes = b"") -> bytes:
    """A file with any header: bytes as they are, everything else as JSON. Nothing is checked."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(dtype: object, shape: object, begin: int, end: int) -> dict[str, object]:
    """One header entry. Nothing is checked."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_file(
    tensors: Iterable[RawTensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A well-formed file with the tensors in the given order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    payload = bytearray()
    for tensor in tensors:
        if len(tensor.data) != payload_bytes(tensor.dtype, tensor.shape):
            raise ValueError(f"{tensor.name}: {len(tensor.data)} bytes do not fit its shape")
        if tensor.name in header:
            raise ValueError(f"{tensor.name} is written twice")
        end = len(payload) + len(tensor.data)
        header[tensor.name] = entry(tensor.dtype, list(tensor.shape), len(payload), end)
        payload += tensor.data
    return raw_file(header, bytes(payload))


def lfs_pointer(size: int) -> bytes:
    """What a clone without Git LFS leaves in place of a file of `size` bytes."""
    lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{'0' * 64}", f"size {size}")
    return "".join(f"{line}\n" for line in lines).encode()


# ---------------------------------------------------------------- files and folders


def write_file(
    path: Path, tensors: Iterable[RawTensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a well-formed file and re-open it with the safetensors library to see that it is one.

    Raises:
        ValueError: the library does not read back what was written.
    """
    written = list(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_file(written, metadata))
    found = {
        name: RawTensor(name, tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(path.read_bytes())
    }
    if found != {tensor.name: tensor for tensor in written}:
        raise ValueError(f"{path} reads back differently")
    return path


def write_index(
    folder: Path, weight_map: Mapping[str, str], total_size: object = None, name: str = INDEX_NAME
) -> Path:
    """Write an index; without `total_size` the key is missing."""
    metadata = {} if total_size is None else {"total_size": total_size}
    path = folder / name
    path.write_text(json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}))
    return path


def write_config(folder: Path, config: Mapping[str, object]) -> Path:
    """Write `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def write_sharded(
    folder: Path,
    shards: Sequence[Sequence[RawTensor]],
    config: Mapping[str, object] | None = None,
) -> list[Path]:
    """Write a folder of shards with their index, and a config where one is given."""
    paths = []
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        paths.append(write_file(folder / name, tensors))
        weight_map |= {tensor.name: name for tensor in tensors}
    total = sum(len(tensor.data) for tensors in shards for tensor in tensors)
    write_index(folder, weight_map, total)
    if config is not None:
        write_config(folder, config)
    return paths


def write_hub_cache(cache: Path, repository: str, files: Mapping[str, bytes]) -> Path:
    """Write a repository as the Hugging Face cache lays it out; returns the snapshot's folder.

    The layout is `models--ORG--NAME/{blobs,refs,snapshots}`. A snapshot holds relative links to
    blobs that are named by a hash, and `refs/main` holds the snapshot's name.
    """
    folder = cache / ("models--" + repository.replace("/", "--"))
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot, blobs = folder / "snapshots" / revision, folder / "blobs"
    for part in (snapshot, blobs, folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    for number, (name, content) in enumerate(files.items()):
        blob = blobs / f"{number:064x}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


# ---------------------------------------------------------------- tiny models


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """A tiny model that transformers writes.

    Attributes:
        family: `llama`, `mistral`, `qwen2`, `qwen3` or `bert`.
        dtype: `F32`, `F16` or `BF16`.
        tied: whether the output head is the embedding.
        heads: query heads.
        kv_heads: key and value heads.
        head_size: width of a head; need not be `hidden` / `heads` where the family allows it.
        hidden: hidden size.
        intermediate: feed-forward size.
        vocabulary: rows of the embedding.
        layers: hidden layers.
        attention_bias: biases on q, k, v and o, where the family has the option.
        mlp_bias: biases on gate, up and down, where the family has the option.
        bare: the decoder without its head (`LlamaModel`).
        max_shard_size: size from which on another shard is begun.
    """

    family: str = "llama"
    dtype: str = "BF16"
    tied: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 4
    hidden: int = 16
    intermediate: int = 24
    vocabulary: int = 37
    layers: int = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    bare: bool = False
    max_shard_size: str = "1GB"


_DECODERS = {
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "llama": "Llama",
    "mistral": "Mistral",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def save_model(folder: Path, options: ModelOptions) -> Path:
    """Make a model with random weights, biases and norms, and let transformers save it."""
    with warnings.catch_warnings():  # another project's deprecations are not what is tested
        warnings.simplefilter("ignore")
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(11)
        model = _bert(options) if options.family == "bert" else _decoder(options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()  # biases begin as zeros, which would hide a wrong cut
        model = model.to(getattr(torch, _TORCH_DTYPES[options.dtype]))
        model.save_pretrained(folder, max_shard_size=options.max_shard_size)
    return folder


def _decoder(options: ModelOptions) -> Any:
    import transformers

    family = _DECODERS[options.family]
    settings: dict[str, object] = {
        "hidden_size": options.hidden,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "vocab_size": options.vocabulary,
        "tie_word_embeddings": options.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if options.family not in {"qwen2", "phi3"}:
        settings["head_dim"] = options.head_size
    if options.family == "phi3":
        settings["pad_token_id"] = None
    if options.family in {"llama", "qwen3", "gemma2", "gemma3"}:
        settings["attention_bias"] = options.attention_bias
    if options.family == "llama":
        settings["mlp_bias"] = options.mlp_bias
    text = "Text" if options.family == "gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    model = f"{family}{text}Model" if options.bare else f"{family}ForCausalLM"
    return getattr(transformers, model)(config)


def _bert(options: ModelOptions) -> Any:
    import transformers

    config = transformers.BertConfig(
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        vocab_size=options.vocabulary,
        max_position_embeddings=9,
    )
    return transformers.BertModel(config)


# ---------------------------------------------------------------- large models without a payload


def write_sparse_llama(folder: Path, layers: int) -> Path:
    """Write a Llama checkpoint of 256 MiB a layer whose payload is a hole in the file."""
    hidden, intermediate, heads, kv_heads, vocabulary = 4096, 8192, 32, 8, 1024
    key_value = kv_heads * hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key_value, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key_value, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + payload_bytes("BF16", shape)
        header[name] = entry("BF16", shape, begin, end)
    path = folder / "model.safetensors"
    path.write_bytes(raw_file(header))
    os.truncate(path, path.stat().st_size + end)
    write_config(
        folder,
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "tie_word_embeddings": False,
        },
    )
    return folder
