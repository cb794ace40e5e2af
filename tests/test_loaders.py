"""A short run of the fuzzer of loaders; and that it would notice."""

import sys

import pytest

pytest.importorskip("matplotlib")
if not sys.platform.startswith("linux"):
    pytest.skip("the limits on memory are Linux'", allow_module_level=True)

from faults import fuzz_loaders
from gradwire.errors import StateError


def test_damaged_files_are_refused_or_valid_and_nothing_else():
    outcomes = fuzz_loaders.fuzz(390, seed=0)
    assert len(outcomes) >= 13
    for name, counts in outcomes.items():
        assert counts["refused"] > 0 or "pictures" in name, f"{name}: nothing was damaged"


def test_the_fuzzer_notices_another_exception():
    assert fuzz_loaders.check(lambda: None) == "valid"

    def refuse():
        raise StateError("one line")

    assert fuzz_loaders.check(refuse) == "refused"
    with pytest.raises(ZeroDivisionError):
        fuzz_loaders.check(lambda: 1 / 0)

    def refuse_in_two_lines():
        raise StateError("one\ntwo")

    with pytest.raises(AssertionError, match="more than one line"):
        fuzz_loaders.check(refuse_in_two_lines)


def test_the_fuzzer_notices_much_memory_and_much_time(monkeypatch):
    def spin():
        while True:
            pass

    monkeypatch.setattr(fuzz_loaders, "SECONDS", 0.2)
    with fuzz_loaders.limits():
        with pytest.raises(MemoryError):
            fuzz_loaders.check(lambda: bytearray(2 * fuzz_loaders.ROOM))
        with pytest.raises(TimeoutError):
            fuzz_loaders.check(spin)
