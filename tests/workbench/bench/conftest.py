import pytest

from gradwire.workbench.bench import compress


@pytest.fixture(autouse=True)
def few_buffers(monkeypatch):
    """Tests look at the rows, not at the times: no need to outgrow the cache."""
    monkeypatch.setattr(compress, "ROTATED_BYTES", 1 << 20)
