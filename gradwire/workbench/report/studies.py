"""All studies under a folder as one self-contained page."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

from gradwire.errors import ConfigError, unknown
from gradwire.state.saved.files import replace
from gradwire.workbench.report.chart import svg
from gradwire.workbench.report.page import STYLE
from gradwire.workbench.study import STUDIES
from gradwire.workbench.study.folder import Folder, studies_in, writing
from gradwire.workbench.study.study import Page, Study, Table
from gradwire.workbench.train.folder import REPORT

SPACE = """
section { margin-top: 56px; } section > pre { margin-top: 12px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(380px, 1fr)); }
"""


def write_studies(out: Path) -> Path:
    """Writes `out`/report.html from the rows of every study there, and returns its path."""
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
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>gradwire studies</title>\n<style>{STYLE}{SPACE}</style>\n</head>\n<body><main>\n"
        '<p class="kicker">gradwire &middot; the papers, measured again</p>\n'
        f'<ul class="legend">{links}</ul>\n{sections}\n</main></body>\n</html>\n'
    )
    with writing(out / REPORT):
        replace(out / REPORT, lambda file: file.write(html.encode(errors="xmlcharrefreplace")))
    return out / REPORT


def _section(study: Study, folder: Folder) -> str:
    head, rows = folder.head, folder.rows()
    with folder.rows_of(study):
        page = study.page(rows)
        charts = _charts(page)
    small = " Small: embedded data on a CPU." if head["settings"].get("small") else ""
    parts = [
        f'<section id="{study.name}">',
        f'<p class="kicker">{escape(study.figures)}.{small}</p>',
        f"<h1>{escape(study.title)}</h1>",
        f"<p>{escape(page.says)}</p>",
        charts,
        *(_table(table) for table in page.tables),
        f'<p class="note">{escape(_place(head["machine"]))}</p>',
        f"<pre>{escape(head.get('command', ''))}</pre>",
        "</section>",
    ]
    return "\n".join(parts)


def _charts(page: Page) -> str:
    figures = (
        f'<figure role="img" aria-label="{escape(chart.caption)}">'
        f"<figcaption>{escape(chart.caption)}</figcaption>{svg(chart)}</figure>"
        for chart in page.charts
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table class="numbers">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _place(machine: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())
