import os

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("TILEWISE_BACKEND", None)

settings.register_profile("tilewise", deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.load_profile("tilewise")


@pytest.fixture
def tiles(monkeypatch):
    """Set the tile shape of the tiled backend for one test."""
    from tilewise import dispatch

    def set_tiles(shape):
        monkeypatch.setattr(dispatch.get("tiled"), "tiles", shape)

    return set_tiles


@pytest.fixture
def poison():
    """Uninitialised memory is NaN, as if another program had left it so."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
