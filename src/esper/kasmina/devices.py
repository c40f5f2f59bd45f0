"""Where tensors may live on this machine."""

import torch

from esper.leyline import EsperError


def check_device(device: str | torch.device) -> None:
    """Refuse, in one sentence, what is neither the CPU nor a CUDA device that is there."""
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    choices = ["cpu", *["cuda"] * bool(found), *found]
    if str(device) not in choices:
        raise EsperError(f"no device {str(device)!r} here; choose from {', '.join(choices)}")
