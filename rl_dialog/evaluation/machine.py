"""The machine that something was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def describe_machine() -> dict[str, Any]:
    """What a figure in tokens/s depends on besides the code."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    return {"cpu": cpu, "cores": os.cpu_count(), **versions, "allocator": os.environ.get("GLIBC_TUNABLES", "")}
