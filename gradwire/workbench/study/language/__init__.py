"""Train language models by every recipe, and compare losses at equal tokens, and bytes.

`recipes.py` has the ways to train, `choices.py` what the command line chooses, `cells.py` the runs,
and `page.py` the table and the picture.
"""

from gradwire.workbench.study.language.cells import measure, more_cells
from gradwire.workbench.study.language.choices import FREE, list_cells
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
    choices=(*FREE, "seeds", "extend"),
    more=more_cells,
    # A cell has its seed, and a row a digest of its text.
    in_cells=("seed", "data_dir"),
)

__all__ = ["STUDY"]
