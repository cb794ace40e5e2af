"""Train language models by every recipe, and compare losses at equal tokens, and bytes.

`recipes.py` has the ways to train, `cells.py` the runs, and `page.py` the table and the picture.
"""

from gradwire.workbench.study.language.cells import CHOICES, list_cells, measure
from gradwire.workbench.study.language.page import make_page
from gradwire.workbench.study.study import Study

STUDY = Study(
    name="language",
    title="A GPT's loss against the bytes sent, for every way to train it",
    figures="ours",
    cells=list_cells,
    measure=measure,
    page=make_page,
    files=("books",),
    choices=CHOICES,
)

__all__ = ["STUDY"]
