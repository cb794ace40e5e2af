"""Repeat the figures and tables of the papers, and study questions that the papers leave open.

One file per study. `study.py` says what a study is, and `run.py` measures one.
"""

from gradwire.workbench.study import (
    accuracy,
    bounds,
    buildup,
    convergence,
    distributions,
    language,
    operators,
    scaling,
    sketch,
)
from gradwire.workbench.study.study import Page, Settings, Study

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        distributions,
        bounds,
        operators,
        convergence,
        accuracy,
        scaling,
        buildup,
        sketch,
        language,
    )
}

__all__ = ["STUDIES", "Page", "Settings", "Study"]
