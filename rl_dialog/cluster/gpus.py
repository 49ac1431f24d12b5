"""Which processes of a cluster compute on GPUs."""

from __future__ import annotations

import os
import socket

import ray
import torch

from rl_dialog.errors import UserError
from rl_dialog.models.device import named_device


def wants_gpus(device: str, workers: int) -> bool:
    """Does each of so many workers get a GPU? With auto where the cluster has that many.

    Raises UserError where GPUs are asked for and there are fewer.
    """
    there = ray.cluster_resources().get("GPU", 0)
    if device.startswith("cuda") and there < workers:
        raise UserError(
            f"--device {device}: expected a GPU for each of {workers} workers, the cluster has {there:g}"
        )
    return device.startswith("cuda") or (device == "auto" and there >= workers)


def check_device(name: str, address: str = "") -> None:
    """Raises UserError for a device that is not there; what a cluster has is known when it is joined."""
    if name != "auto" and not (address or os.environ.get("RAY_ADDRESS") or ray.is_initialized()):
        named_device(name)


def device() -> torch.device:
    """The device that Ray Train gave this worker. Raises UserError for a GPU that torch cannot use."""
    from ray.train.torch import get_device  # a second of imports, which a worker of Ray Train has anyway

    found = get_device()
    if found.type == "cuda" and not torch.cuda.is_available():
        why = "a build for CPUs, or no driver"
        raise UserError(
            f"Ray gave this worker a GPU of {socket.gethostname()}, and the torch there knows of none "
            f"({why}): repair that, or pass --device cpu"
        )
    return found
