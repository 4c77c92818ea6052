"""Says on which device the GPU tests run."""

from __future__ import annotations

from tests.gpu.support import GPU, STANDS_IN


def pytest_report_header() -> str:
    return f"tests/gpu: {'on a stand-in, the CPU' if STANDS_IN else f'on {GPU}'}"
