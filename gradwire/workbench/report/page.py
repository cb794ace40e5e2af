"""Render a training run as one HTML file, without scripts or outside resources.

`html_document`, `html_figures` and `html_table` also serve the other pages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from gradwire.workbench.report.curves import run_charts, run_colours
from gradwire.workbench.report.outcome import compare_bytes, format_bytes, headline
from gradwire.workbench.report.read import Run

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6472; --line: #dfe3e8;
        --paper: #ffffff; --band: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3af; --line: #333a44; --paper: #15181d; --band: #1c2027; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 24px 64px; }
.kicker { color: var(--soft); margin: 0 0 6px; font-size: 13px; }
h1 { font-size: 26px; line-height: 1.3; font-weight: 650; margin: 0 0 20px; max-width: 34em;
     text-wrap: balance; }
h2 { font-size: 16px; font-weight: 650; margin: 40px 0 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0 0 8px; padding: 0;
          list-style: none; }
.legend i { display: inline-block; width: 18px; height: 3px; border-radius: 2px;
            vertical-align: middle; margin-right: 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr));
          gap: 20px 28px; }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--soft); font-size: 13px; margin-bottom: 2px; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); text-align: left;
         vertical-align: top; }
th { font-weight: 500; color: var(--soft); font-size: 13px; }
.numbers th + th, .numbers td + td { text-align: right; padding: 7px 0 7px 14px; }
.numbers thead th { vertical-align: bottom; }
.numbers td { white-space: nowrap; }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 0 28px;
         align-items: start; }
.pairs th { width: 40%; }
.pairs td { overflow-wrap: anywhere; }
pre { background: var(--band); padding: 12px 14px; border-radius: 6px; overflow-x: auto; margin: 0;
      font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.note { color: var(--soft); font-size: 13px; }
.bad { color: #c6362c; font-weight: 600; }
"""


def html_document(title: str, body: str, style: str = "") -> str:
    """Return a whole document; `style` follows the style sheet of all pages."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n"
        f"<body><main>\n{body}\n</main></body>\n</html>\n"
    )


def html_figures(figures: Iterable[tuple[str, str]]) -> str:
    """Return a grid of charts, each given by its caption and SVG."""
    elements = (
        f'<figure role="img" aria-label="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption>{svg}</figure>"
        for caption, svg in figures
    )
    return f'<div class="charts">{"".join(elements)}</div>'


def _plain_cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def html_table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    render_cell: Callable[[str], str] = _plain_cell,
) -> str:
    """Return a table of numbers that scrolls sideways if the page is narrow."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(render_cell, row))}</tr>" for row in rows)
    table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def render_run(runs: Sequence[Run]) -> str:
    """Return the page of the first run, compared with the other runs."""
    run = runs[0]
    data = f"the embedded {run.options.data}" if run.options.embedded else run.options.data
    workers = f"{run.options.workers} worker{'s' if run.options.workers > 1 else ''}"
    about = f"{run.options.model} on {data}, {workers}, seed {run.options.seed}"
    body = [
        f'<p class="kicker">gradwire &middot; {escape(about)}</p>',
        f"<h1>{escape(headline(runs))}</h1>",
        _legend(runs),
        html_figures(run_charts(runs)),
        "<h2>Final numbers</h2>",
        _numbers(runs),
        "<h2>Settings</h2>",
        _settings(runs),
        "<h2>Machine and versions</h2>",
        f'<div class="pairs">{"".join(_pair_table(half) for half in _halves(run.machine))}</div>',
        *([f"<h2>Command</h2><pre>{escape(run.command)}</pre>"] if run.command else []),
    ]
    return html_document(about, "\n".join(body))


def _legend(runs: Sequence[Run]) -> str:
    items = zip(runs, run_colours(runs), strict=True)
    rows = (f'<li><i style="background:{c}"></i>{escape(r.title)}</li>' for r, c in items)
    return f'<ul class="legend">{"".join(rows)}</ul>'


def _numbers(runs: Sequence[Run]) -> str:
    """Return the table of final numbers, with a row per run."""
    columns = [
        "Run", runs[0].task.measure.capitalize(), "Training loss", "Bytes sent",
        "Against ring all-reduce", "Density achieved", "Residual norm", "Training time", "Replicas",
    ]  # fmt: skip
    table = html_table(columns, map(_final_numbers, runs), _marked_cell)
    note = "Bytes and training loss are of all workers together; training time is without "
    note += "evaluation and checkpoints. Replicas: whether every worker ended with the same bits."
    return f'{table}<p class="note">{note}</p>'


def _final_numbers(run: Run) -> list[str]:
    score, loss = run.score, run.last("loss")
    sent, dense = run.last("bytes_sent"), run.last("bytes_dense")
    identical = run.result.get("replicas_identical")
    return [
        run.title,
        "-" if score is None else run.task.words(score),
        "-" if loss is None else f"{loss:.4f}",
        "-" if sent is None else format_bytes(sent),
        compare_bytes(dense / sent) if sent and dense else "-",
        f"{100 * (run.last('achieved_density') or 0):.3g} %",
        f"{run.last('residual_norm') or 0:.3g}",
        f"{run.last('seconds') or 0:.1f} s",
        "not ended" if identical is None else "identical" if identical is True else "DIFFERENT",
    ]


def _marked_cell(text: str) -> str:
    """Return a table cell, in red if the replicas differ."""
    mark = ' class="bad"' if text == "DIFFERENT" else ""
    return f"<td{mark}>{escape(text)}</td>"


def _settings(runs: Sequence[Run]) -> str:
    """Return the settings of the first run, in two columns."""
    shown = {
        k: _setting_text(v) for k, v in runs[0].options.asdict().items() if v not in (None, [], "")
    }
    return f'<div class="pairs">{"".join(_pair_table(half) for half in _halves(shown))}</div>'


def _halves(pairs: Mapping[str, str]) -> list[dict[str, str]]:
    items = list(pairs.items())
    middle = (len(items) + 1) // 2
    return [dict(items[:middle]), dict(items[middle:])]


def _pair_table(pairs: Mapping[str, str]) -> str:
    rows = (
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(value)}</td></tr>"
        for name, value in pairs.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _setting_text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
