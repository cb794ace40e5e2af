"""Table 2 of Shi et al. (2019), predicted."""

import pytest

from gradwire.workbench.plan_check import paper


def test_two_networks_predict_the_other_two_within_20_percent():
    constants, rows = paper.fit_and_compare()
    assert len(rows) == 16
    new = [row for row in rows if not row.fitted]
    assert {row.model for row in new} == {"vgg16", "inception-v4"}
    for row in new:
        assert abs(row.error) < 0.20, row
    # A link of 10 Gbit/s cannot deliver more, and selectors cannot give time back.
    assert 0.8 < 8 * constants.rate / 10e9 <= 1
    assert constants.step > 0
    assert constants.select["topk"] > constants.select["dgc"] > constants.select["gaussiank"] > 0


def test_computing_alone_is_the_papers():
    assert paper.compute_seconds("resnet50") == pytest.approx(0.46, abs=0.001)
