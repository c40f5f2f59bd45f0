"""Devices by name."""

import torch

from esper.leyline import EsperError


def check_device(device: str) -> None:
    """One sentence for a device that is not here."""
    here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if device not in (*here, *(["cuda"] if len(here) > 1 else [])):
        raise EsperError(f"no device {device!r} here; choose from {', '.join(here)}")
