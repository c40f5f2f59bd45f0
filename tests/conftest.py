"""Shared set-up: one thread, and a device for every test that takes one."""

import pytest
import torch

torch.set_num_threads(1)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
