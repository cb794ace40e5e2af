"""The papers' figures and tables, one file each."""

from gradwire.study import bounds, buildup, convergence, distributions, operators, scaling
from gradwire.study.study import Page, Settings, Study

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (distributions, bounds, operators, convergence, scaling, buildup)
}

__all__ = ["STUDIES", "Page", "Settings", "Study"]
