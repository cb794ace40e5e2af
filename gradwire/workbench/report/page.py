"""The page: everything a reader needs in one file, without scripts or outside resources."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gradwire.workbench.report.curves import charts, colours
from gradwire.workbench.report.outcome import headline, size, times
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


def page(runs: Sequence[Run]) -> str:
    """The whole HTML document."""
    run = runs[0]
    data = f"the embedded {run.options.data}" if run.options.embedded else run.options.data
    workers = f"{run.options.workers} worker{'s' if run.options.workers > 1 else ''}"
    about = f"{run.options.model} on {data}, {workers}, seed {run.options.seed}"
    body = [
        f'<p class="kicker">gradwire &middot; {escape(about)}</p>',
        f"<h1>{escape(headline(runs))}</h1>",
        _legend(runs),
        _charts(runs),
        "<h2>Final numbers</h2>",
        _numbers(runs),
        "<h2>Settings</h2>",
        _settings(runs),
        "<h2>Machine and versions</h2>",
        f'<div class="pairs">{"".join(_pairs(half) for half in _halves(run.machine))}</div>',
        *([f"<h2>Command</h2><pre>{escape(run.command)}</pre>"] if run.command else []),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(about)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body>\n</html>\n"
    )


def _legend(runs: Sequence[Run]) -> str:
    items = zip(runs, colours(runs), strict=True)
    rows = (f'<li><i style="background:{c}"></i>{escape(r.title)}</li>' for r, c in items)
    return f'<ul class="legend">{"".join(rows)}</ul>'


def _charts(runs: Sequence[Run]) -> str:
    figures = (
        f'<figure role="img" aria-label="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption>{svg}</figure>"
        for caption, svg in charts(runs)
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def _numbers(runs: Sequence[Run]) -> str:
    """A row a run."""
    columns = [
        "Run", runs[0].task.measure.capitalize(), "Training loss", "Bytes sent",
        "Against ring all-reduce", "Density achieved", "Residual norm", "Training time", "Replicas",
    ]  # fmt: skip
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    rows = "".join(f"<tr>{''.join(map(_cell, _row(run)))}</tr>" for run in runs)
    table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    note = "Bytes and training loss are of all workers together; training time is without "
    note += "evaluation and checkpoints. Replicas: whether every worker ended with the same bits."
    return f'<div class="scroll">{table}</div><p class="note">{note}</p>'


def _row(run: Run) -> list[str]:
    score, loss = run.score, run.last("loss")
    sent, dense = run.last("bytes_sent"), run.last("bytes_dense")
    same = run.result.get("replicas_identical")
    return [
        run.title,
        "-" if score is None else run.task.words(score),
        "-" if loss is None else f"{loss:.4f}",
        "-" if sent is None else size(sent),
        times(dense / sent) if sent and dense else "-",
        f"{100 * (run.last('achieved_density') or 0):.3g} %",
        f"{run.last('residual_norm') or 0:.3g}",
        f"{run.last('seconds') or 0:.1f} s",
        "not ended" if same is None else "identical" if same is True else "DIFFERENT",
    ]


def _cell(text: str) -> str:
    mark = ' class="bad"' if text == "DIFFERENT" else ""
    return f"<td{mark}>{escape(text)}</td>"


def _settings(runs: Sequence[Run]) -> str:
    """The first run's settings, in two columns."""
    shown = {k: _plain(v) for k, v in runs[0].options.asdict().items() if v not in (None, [], "")}
    return f'<div class="pairs">{"".join(_pairs(half) for half in _halves(shown))}</div>'


def _halves(pairs: Mapping[str, str]) -> list[dict[str, str]]:
    items = list(pairs.items())
    middle = (len(items) + 1) // 2
    return [dict(items[:middle]), dict(items[middle:])]


def _pairs(pairs: Mapping[str, str]) -> str:
    rows = (
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(value)}</td></tr>"
        for name, value in pairs.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
