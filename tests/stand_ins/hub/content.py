"""What the stand-in hub serves: small copies of the gpt-oss repositories, made the same way on every machine.

A repository here has the shape of the real one: safetensors shards with an index, configuration, tokenizer, and the
two further copies of the weights (`original/`, `metal/`) that a server does not need. Large files are LFS files, known
by their sha256; small ones are git blobs, known by their sha1. The revision is derived from the content.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.stand_ins.hub.words import VERBS

FIRST_WORD = 1000  # simulated engines answer with random ids 1000 to 2000; these are whole words
WORD_IDS = range(FIRST_WORD, 2001)
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|start|>' + message['role'] + '<|message|>' + (message['content'] or '') + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class HubFile:
    """One file of a repository, with the checksums the Hub publishes for it."""

    path: str
    content: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        """What git holds in place of an LFS file."""
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return text.encode()

    @cached_property
    def git_oid(self) -> str:
        blob = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Repository:
    """A model repository at one revision."""

    name: str
    files: tuple[HubFile, ...]
    by_path: dict[str, HubFile] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.by_path.update({file.path: file for file in self.files})

    @cached_property
    def revision(self) -> str:
        digest = hashlib.sha1(self.name.encode(), usedforsecurity=False)
        for file in self.files:
            digest.update(f"{file.path} {file.git_oid}\n".encode())
        return digest.hexdigest()

    def served_bytes(self) -> int:
        """Size of the copy a server needs: everything but `original/` and `metal/`."""
        return sum(len(file.content) for file in self.files if not file.path.startswith(("original/", "metal/")))


def _noise(seed: str, size: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(size)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def safetensors(tensors: dict[str, int], seed: str) -> bytes:
    """A valid safetensors file of one-dimensional uint8 tensors with the given sizes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return (
        len(encoded).to_bytes(8, "little") + encoded + b"".join(_noise(seed + name, tensors[name]) for name in tensors)
    )


def _byte_alphabet() -> list[str]:
    """The printable stand-ins for the 256 bytes that byte-level tokenizers use, in byte order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def tokenizer() -> dict[str, object]:
    """A byte-level BPE tokenizer whose ids 1000 to 2000 are whole words with a space in front."""
    space = "Ġ"
    words = [space + verb + ending for verb in VERBS for ending in ("", "s", "ed", "ing")][: len(WORD_IDS)]
    if len(set(words)) != len(WORD_IDS):
        raise ValueError(f"words.py gives {len(set(words))} distinct words; {len(WORD_IDS)} are needed")
    merges: dict[tuple[str, str], None] = {}
    parts: dict[str, None] = {}
    stems = list(dict.fromkeys(space + verb for verb in VERBS))
    for stem in stems:
        for end in range(1, len(stem)):
            merges.setdefault((stem[:end], stem[end]))
            parts.setdefault(stem[: end + 1])
    for pair in (("e", "d"), ("i", "n"), ("in", "g")):
        merges.setdefault(pair)
        parts.setdefault("".join(pair))
    for stem in stems:
        for ending in ("s", "ed", "ing"):
            merges.setdefault((stem, ending))
            parts.setdefault(stem + ending)
    vocabulary = {symbol: index for index, symbol in enumerate(_byte_alphabet())}
    others = [part for part in parts if part not in set(words)]
    free = [*range(256, FIRST_WORD), *range(WORD_IDS.stop, WORD_IDS.stop + len(others))][: len(others)]
    if len(others) < FIRST_WORD - 256:
        raise ValueError("too few word parts to fill the ids below the words")
    vocabulary.update(zip(others, free, strict=True))
    vocabulary.update(zip(words, WORD_IDS, strict=True))
    vocabulary = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    first_special = len(vocabulary)
    added = [
        {
            "id": first_special + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }


def _token_id(tokens: dict[str, object], content: str) -> int:
    added = tokens["added_tokens"]
    assert isinstance(added, list)
    return next(int(token["id"]) for token in added if token["content"] == content)


def _configuration(tokens: dict[str, object], layers: int, experts: int) -> dict[str, object]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": _token_id(tokens, "<|return|>"),
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "pad_token_id": _token_id(tokens, "<|endoftext|>"),
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_theta": 150000,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 201088,
    }


def _shards(name: str, count: int, tensor_bytes: int) -> Iterator[tuple[str, dict[str, int]]]:
    for shard in range(count):
        tensors = {
            f"model.layers.{shard}.{part}": tensor_bytes + 8 * shard
            for part in ("self_attn.qkv.weight", "mlp.experts.gate_up_proj_blocks", "mlp.experts.down_proj_blocks")
        }
        yield f"{name}-{shard:05d}-of-{count - 1:05d}.safetensors", tensors


def repository(name: str, *, layers: int, experts: int, shards: int, tensor_bytes: int) -> Repository:
    """Build one repository with all three copies of its weights."""
    tokens = tokenizer()
    large: dict[str, bytes] = {"tokenizer.json": _json(tokens)}
    weight_map: dict[str, str] = {}
    total = 0
    for path, tensors in _shards("model", shards, tensor_bytes):
        large[path] = safetensors(tensors, name + path)
        weight_map.update(dict.fromkeys(tensors, path))
        total += sum(tensors.values())
    for path, tensors in _shards("original/model-", 2, tensor_bytes):
        large[path] = safetensors(tensors, name + path)
    large["metal/model.bin"] = _noise(name + "metal", 2 * tensor_bytes)
    eos = [_token_id(tokens, token) for token in ("<|return|>", "<|endoftext|>", "<|call|>")]
    configuration = _configuration(tokens, layers, experts)
    small: dict[str, bytes] = {
        ".gitattributes": b"".join(
            b"%s filter=lfs diff=lfs merge=lfs -text\n" % name
            for name in (b"*.safetensors", b"*.bin", b"tokenizer.json")
        ),
        "LICENSE": b"Apache License, Version 2.0. The stand-in files are noise; there is no model in them.\n",
        "README.md": f"# {name}, stand-in\n\nNoise in the shape of the real repository, for tests.\n".encode(),
        "config.json": _json(configuration),
        "generation_config.json": _json(
            {
                "bos_token_id": _token_id(tokens, "<|startoftext|>"),
                "do_sample": True,
                "eos_token_id": eos,
                "pad_token_id": _token_id(tokens, "<|endoftext|>"),
                "transformers_version": "4.55.0.dev0",
            }
        ),
        "model.safetensors.index.json": _json({"metadata": {"total_size": total}, "weight_map": weight_map}),
        "special_tokens_map.json": _json(
            {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
        ),
        "tokenizer_config.json": _json(
            {
                "added_tokens_decoder": {
                    str(_token_id(tokens, token)): {
                        "content": token,
                        "lstrip": False,
                        "normalized": False,
                        "rstrip": False,
                        "single_word": False,
                        "special": True,
                    }
                    for token in SPECIAL_TOKENS
                },
                "bos_token": "<|startoftext|>",
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
                "eos_token": "<|return|>",
                "model_input_names": ["input_ids", "attention_mask"],
                "model_max_length": 131072,
                "pad_token": "<|endoftext|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        ),
        "original/config.json": _json({"num_hidden_layers": layers, "num_experts": experts, "experts_per_token": 4}),
    }
    files = [HubFile(path, content, lfs=False) for path, content in small.items()]
    files += [HubFile(path, content, lfs=True) for path, content in large.items()]
    return Repository(name, tuple(sorted(files, key=lambda file: file.path)))


def encodings() -> dict[str, bytes]:
    """Stand-ins for the two tiktoken vocabularies: the right format, a tenth of a per cent of the size."""
    files: dict[str, bytes] = {}
    for name, extra in (("o200k_base.tiktoken", 400), ("cl100k_base.tiktoken", 200)):
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [verb.encode() for verb in dict.fromkeys(VERBS) if len(verb) > 1][:extra]
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
        files[name] = b"".join(lines)
    return files


def repositories() -> dict[str, Repository]:
    """Everything the stand-in hub has, by repository name."""
    found = (
        repository("openai/gpt-oss-120b", layers=36, experts=128, shards=3, tensor_bytes=350_000),
        repository("openai/gpt-oss-20b", layers=24, experts=32, shards=3, tensor_bytes=120_000),
    )
    return {entry.name: entry for entry in found}


def write_cache(directory: Path, name: str) -> Path:
    """Lay out one repository as a Hugging Face cache under `directory`, and return the snapshot."""
    entry = repositories()[name]
    base = directory / ("models--" + name.replace("/", "--"))
    snapshot = base / "snapshots" / entry.revision
    for file in entry.files:
        if file.path.startswith(("original/", "metal/")):
            continue
        target = snapshot / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "refs" / "main").write_text(entry.revision)
    return snapshot
