"""A role of a preference run in a process of its own, which Ray makes again when it dies.

It says that it lives from its first moment on: nothing heavy is imported here, and the role itself, whose
libraries and files take a while to load, is made by its first call, while another thread answers `beat`.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import cloudpickle


@ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={"health": 1})
class RoleActor:
    """`make` is the role's constructor as cloudpickle writes it: to read it is to import what it needs."""

    def __init__(self, make: bytes, threads: int) -> None:
        self.make, self.threads, self.role = make, threads, None

    @ray.method(concurrency_group="health")
    def beat(self) -> tuple[int, bool]:
        """The process, and whether the role is made; answered while it is being made, or at work."""
        return os.getpid(), self.role is not None

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if self.role is None:
            import torch

            torch.set_num_threads(self.threads)
            self.role = cloudpickle.loads(self.make)()
        return getattr(self.role, name)(*arguments, **named)
