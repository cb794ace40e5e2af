"""A few random sequences, and that the fuzzer sees what it is there for."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from faults.fuzz_sequences import fuzz
from faults.sequences.answer import Look
from faults.sequences.check import Finding, check_equal, check_law
from faults.sequences.checkpoints import damage
from faults.sequences.mends import MENDS
from faults.sequences.plan import DDP, KINDS, OPERATIONS, Operation, Plan, Setup, draw_plan
from faults.sequences.run import Runner, shorten

TOPK = {"method": "topk", "density": 0.1, "dense_below": 0, "bundle_mb": 0.0006}


def test_a_few_sequences_have_no_finding():
    tally = fuzz(10, seed=5, shortens=False)
    assert tally.findings == []
    assert tally.played == 10
    assert tally.real == 3
    assert set(tally.sequences) == set(KINDS)
    assert tally.mean_length >= 20


def test_a_plan_is_of_its_seed_and_number_and_every_operation_is_drawn():
    assert draw_plan(3, 17) == draw_plan(3, 17)
    assert draw_plan(3, 17) != draw_plan(4, 17)
    drawn = Counter(op.name for n in range(200) for op in draw_plan(1, n).operations)
    assert sorted(drawn) == OPERATIONS
    # So 2,000 sequences have each of them 200 times.
    assert min(drawn.values()) > 20


def step(data, **more):
    return Operation("step", {"data": data, **more})


CHANNELS_LAST = Operation("memory_format", {"format": "channels_last", "rank": None})
BF16 = Operation("default dtype", {"dtype": "bfloat16"})
FOUND = {
    "strides": (
        {},
        [step(1), step(2), CHANNELS_LAST, step(3), step(4)],
        "the law",
    ),
    "handshake": ({}, [Operation("attach", {"differ": "scaler", "rank": 1})], "no rank refused it"),
    "dtypes": (
        {},
        [BF16, Operation("close", {"data": 1}), step(2), step(3)],
        "it was refused",
    ),
    "scaler": (
        {"scaler": True},
        [step(1), Operation("scaler", {"data": 2, "new_scale": 16.0}), step(3)],
        "the law",
    ),
}


@pytest.mark.parametrize("mend", MENDS)
def test_what_was_mended_is_found_again_without_the_mend(mend):
    fields, operations, words = FOUND[mend]
    plan = Plan("test", Setup(DDP, 2, TOPK, **fields), tuple(operations))
    for without, wanted in ((mend, words), ("", "")):
        runner = Runner(without)
        finding = runner.play(plan)[0]
        runner.close()
        assert wanted in finding
        assert bool(finding) == bool(without), finding


def test_damage_leaves_no_copy_that_a_load_would_rightly_take(tmp_path):
    (tmp_path / "gradwire.json").write_text('{"files": {".metadata": ""}}')
    for name in (".metadata", ".metadata.0.old"):
        (tmp_path / name).write_text("records")
    damage(tmp_path, "missing", 0.0)
    assert [file.name for file in tmp_path.iterdir()] == ["gradwire.json"]


def test_a_finding_gets_a_shorter_sequence():
    class Broken:
        def play(self, plan):
            data = [op.args["data"] for op in plan.operations]
            return ("operation 0, step(data=1): it broke" if {3, 7} <= set(data) else ""), Counter()

    plan = Plan("test", Setup(DDP, 2, TOPK), tuple(step(n) for n in range(12)))
    assert shorten(plan, Broken()).operations == (step(3), step(7))


def test_the_law_and_the_replicas_are_looked_at():
    came, out = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.5, 0.0], [1.5, 0.0]])
    old, new = np.zeros((2, 2)), np.array([[0.5, 2.0], [0.5, 4.0]])
    check_law(came, out, old, new)
    for part in (came, out, old, new):
        part[1, 1] += 1e-3
        with pytest.raises(Finding, match=r"entry 1 is off by 0\.001"):
            check_law(came, out, old, new)
        part[1, 1] = np.nan
        with pytest.raises(Finding, match="the law"):
            check_law(came, out, old, new)
        part[1, 1] = {id(came): 4.0, id(out): 0.0, id(old): 0.0, id(new): 4.0}[id(part)]
    look = Look(np.ones(3, np.float32), "a", None, 1)
    check_equal([look, look], shares=False)
    for other in (replace(look, parameters=np.full(3, 1.5, np.float32)), replace(look, steps=2)):
        with pytest.raises(Finding, match="replicas differ"):
            check_equal([look, other], shares=False)
