"""The papers' figures and tables, one file each."""

from gradwire.study import bounds, distributions
from gradwire.study.study import Page, Settings, Study

STUDIES: dict[str, Study] = {study.name: study for study in (bounds.STUDY, distributions.STUDY)}

__all__ = ["STUDIES", "Page", "Settings", "Study"]
