"""`python -m amp_engine info` names what runs and what is missing."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import amp_engine
from amp_engine import __main__ as command
from amp_engine.ground import dtypes
from amp_engine.ground.dtypes import cpu_flags
from amp_engine.kernels import _native

ROOT = Path(__file__).parents[2]


def native(monkeypatch, *, cuda=None, module=True, reason=None):
    info = {"torch": "2.99.0", "cuda": cuda, "compiler": "g++ 9.9", "cpu_capability": "avx512"}
    monkeypatch.setattr(_native, "module", SimpleNamespace(build_info=lambda: info) if module else None)
    monkeypatch.setattr(_native, "reason", None if module else reason)
    monkeypatch.setattr(_native, "record", {"mode": "cpu", "torch": "2.99.0+cpu", "reason": reason})


def printed(capsys, *arguments):
    command.main(list(arguments))
    return capsys.readouterr().out


def test_versions_come_first(capsys):
    lines = printed(capsys, "info").splitlines()
    assert lines[0].split() == ["amp_engine", amp_engine.__version__]
    assert lines[1].split() == ["Python", platform.python_version()]
    assert lines[2].split()[:2] == ["torch", f"{torch.__version__},"]


def test_compiled_for_the_cpu(monkeypatch, capsys):
    native(monkeypatch, reason="no nvcc was found")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    out = printed(capsys, "info")
    assert "compiled for CPU, against torch 2.99.0+cpu, by g++ 9.9" in out
    assert f"avx512, {torch.get_num_threads()} threads" in out
    assert f"CUDA kernels: no nvcc was found; then run: {_native.INSTALL}" in out


def test_a_torch_without_cuda_lacks_no_cuda_kernels(monkeypatch, capsys):
    native(monkeypatch, reason="torch is built without CUDA")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "missing" not in printed(capsys, "info")


def test_compiled_for_cuda_lacks_nothing(monkeypatch, capsys):
    native(monkeypatch, cuda="13.0")
    out = printed(capsys, "info")
    assert "compiled for CPU and CUDA 13.0, against" in out
    assert "missing" not in out


def test_not_compiled_says_why(monkeypatch, capsys):
    native(monkeypatch, module=False, reason="no compiler, and the moon is full")
    out = printed(capsys, "info")
    assert "none, so torch's optimizers take their own steps" in out
    assert "compiled kernels: no compiler, and the moon is full" in out


def test_gpus_are_listed_by_name(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"Model {i}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    out = printed(capsys, "info")
    assert "GPU 0       Model 0, sm_90\nGPU 1       Model 1, sm_90\n" in out


def test_json_has_what_the_text_says(capsys):
    found = json.loads(printed(capsys, "info", "--json"))
    assert [f"{name:<12}{state}" for name, state in found.items()] == printed(capsys, "info").splitlines()


def test_without_a_command_it_says_what_there_is_and_a_first_step(capsys):
    out = printed(capsys)
    assert re.findall(r"^    (\w+) ", out, re.MULTILINE) == ["info", "advise", "audit", "apex"]
    assert "a first step" in out
    assert "python -m amp_engine advise train.py\n" in out


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"amp_engine {amp_engine.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inform"], "invalid choice: 'inform'"),
        (["apex", "train.py"], "apex is typed with a dot: python -m amp_engine.apex train.py"),
    ],
)
def test_an_unknown_command_is_refused(capsys, arguments, says):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_it_exits_with_0_also_when_the_kernels_are_off():
    environment = {**os.environ, "AMP_ENGINE_BUILD": "none"}
    line = [sys.executable, "-m", "amp_engine", "info"]
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "AMP_ENGINE_BUILD=none turns the compiled kernels off" in done.stdout


def test_a_reader_who_leaves_early_sees_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "amp_engine", "info"]
    done = subprocess.run(line, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


CPUS = {
    "EPYC with AVX2": ("x86_64", {"avx2"}, "", {"bfloat16", "float16"}),
    "Xeon with AVX-512": ("x86_64", {"avx512_f"}, "", {"bfloat16", "float16"}),
    "Zen 4": ("x86_64", {"avx512_bf16"}, "", {"float16"}),
    "Xeon with AMX": ("x86_64", {"avx512_bf16", "amx_bf16", "avx512_fp16"}, "", set()),
    "AMX-FP16": ("x86_64", {"amx_bf16", "amx_fp16"}, "ALL", set()),
    "a Xeon kept from AMX and AVX-512": ("x86_64", {"amx_bf16", "avx512_fp16"}, "avx2", {"bfloat16", "float16"}),
    "a Xeon kept from FP16": ("x86_64", {"avx512_bf16", "avx512_fp16"}, "AVX512_CORE_BF16", {"float16"}),
    "Graviton 3": ("aarch64", {"bf16", "fp16_arith"}, "", set()),
    "Graviton 2": ("aarch64", {"fp16_arith"}, "", {"bfloat16"}),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_types_that_the_cpu_emulates_are_said(monkeypatch, capsys, cpu):
    machine, flags, isa, emulated = CPUS[cpu]
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(dtypes, "cpu_flags", lambda: dict.fromkeys(flags, True))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    lines = {line.split()[0]: line for line in printed(capsys, "info").splitlines()}
    for name in ("bfloat16", "float16"):
        assert ("emulated on this CPU (no " in lines[name]) == (name in emulated)
        assert ("slower than float32, up to 90 times" in lines[name]) == (name in emulated)
        assert ("'python -m amp_engine advise train.py'" in lines[name]) == (name in emulated)


def test_what_the_cpu_can_do_is_known_to_any_torch(monkeypatch):
    with_torch = {name for name, value in cpu_flags().items() if value is True}
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert {"avx2", "avx512_bf16", "amx_bf16"} & set(cpu_flags()) <= with_torch
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError()))
    assert cpu_flags() == {}
