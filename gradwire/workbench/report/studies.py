"""Write all studies of a folder as one self-contained page."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from gradwire.errors import ConfigError, unknown
from gradwire.state.saved.files import replace_file
from gradwire.workbench.report.chart import Chart, render_svg
from gradwire.workbench.report.page import html_document, html_figures, html_table
from gradwire.workbench.study import STUDIES
from gradwire.workbench.study.folder import StudyFolder, studies_in, writing
from gradwire.workbench.study.study import Study, StudyTable
from gradwire.workbench.train.folder import REPORT

SPACE = """
section { margin-top: 56px; } section > pre { margin-top: 12px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(380px, 1fr)); }
.wide .charts { grid-template-columns: 1fr; }
"""


def write_studies(out: Path) -> Path:
    """Write `out`/report.html from the rows of every study under `out`, and return its path."""
    folders = {folder.name: folder for folder in studies_in(out) if folder.rows()}
    if not folders:
        raise ConfigError(f"{out} has no study with rows yet. Make one: gradwire study bounds")
    for name in folders:
        if name not in STUDIES:
            raise unknown(f"study in {out}", name, STUDIES)
    named = [name for name in STUDIES if name in folders]
    sections = "\n".join(_section(STUDIES[name], folders[name]) for name in named)
    links = "".join(
        f'<li><a href="#{name}">{escape(STUDIES[name].title)}</a></li>' for name in named
    )
    body = (
        '<p class="kicker">gradwire &middot; the papers, measured again</p>\n'
        f'<ul class="legend">{links}</ul>\n{sections}'
    )
    html = html_document("gradwire studies", body, SPACE)
    with writing(out / REPORT):
        replace_file(out / REPORT, lambda file: file.write(html.encode(errors="xmlcharrefreplace")))
    return out / REPORT


def _section(study: Study, folder: StudyFolder) -> str:
    head, rows = folder.head, folder.rows()
    with folder.explain_row_errors(study):
        page = study.page(rows)
        charts = _figures(page.charts)
    small = " Small: embedded data on a CPU." if head["settings"].get("small") else ""
    parts = [
        f'<section id="{study.name}">',
        f'<p class="kicker">{escape(study.figures)}.{small}</p>',
        f"<h1>{escape(study.title)}</h1>",
        f"<p>{escape(page.summary)}</p>",
        charts,
        *(_titled_table(table) for table in page.tables),
        f'<p class="note">{escape(_machine_line(head["machine"]))}</p>',
        f"<pre>{escape(head.get('command', ''))}</pre>",
        "</section>",
    ]
    return "\n".join(parts)


def _figures(charts: Sequence[Chart]) -> str:
    """Return the charts; those whose points have names take the whole width."""
    drawn = [(chart.caption, render_svg(chart), chart.named_points) for chart in charts]
    wide = [(caption, svg) for caption, svg, is_wide in drawn if is_wide]
    others = [(caption, svg) for caption, svg, is_wide in drawn if not is_wide]
    return html_figures(others) + (f'<div class="wide">{html_figures(wide)}</div>' if wide else "")


def _titled_table(table: StudyTable) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<h2>{escape(table.title)}</h2>{html_table(table.columns, table.rows)}{note}"


def _machine_line(machine: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())
