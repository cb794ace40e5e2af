import pytest

from tests.workbench.train import jobs


@pytest.fixture
def on_the_pool(ranks, monkeypatch):
    """Training starts no workers of its own; the tests of signals show those."""

    def launch(work, *args, workers, device):
        return ranks.run(workers, jobs.own, work, *args)[0]

    monkeypatch.setattr("gradwire.workbench.train.run.launch", launch)
