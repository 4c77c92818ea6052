"""The installed software, the compiled kernels, and the reasons for missing ones."""

import platform
from collections.abc import Iterator

import torch

import amp_engine
from amp_engine.ground.dtypes import LOW_PRECISION, cpu_lacks, dtype_name
from amp_engine.kernels import _native


def describe() -> Iterator[tuple[str, str]]:
    """Yield the name and state of each component that decides which kernels run."""
    cuda = torch.version.cuda
    yield "amp_engine", amp_engine.__version__
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    if _native.module is None:
        yield "kernels", f"none, so {_native.WITHOUT}"
        yield "missing", f"compiled kernels: {_native.reason}"
    else:
        info = _native.module.build_info()
        kind = f"CPU and CUDA {info['cuda']}" if info["cuda"] else "CPU"
        yield (
            "kernels",
            f"compiled for {kind}, against torch {_native.record.get('torch', info['torch'])}, by {info['compiler']}",
        )
        yield "CPU", f"{info['cpu_capability']}, {torch.get_num_threads()} threads"
        if cuda and not info["cuda"]:
            yield (
                "missing",
                f"CUDA kernels: {_native.record.get('reason', 'nobody noted why')}; then run: {_native.INSTALL}",
            )
    for dtype in LOW_PRECISION:
        lacking = cpu_lacks(dtype)
        emulated = (
            f"emulated on this CPU (no {lacking}): slower than float32, up to 90 times in large products; "
            "'python -m amp_engine advise train.py' times each level"
        )
        yield dtype_name(dtype), emulated if lacking else "this CPU computes in it"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            yield f"GPU {i}", f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}"
    else:
        yield "GPU", "none that torch can use"
