"""Say the outcome of a training run in one sentence."""

from collections.abc import Sequence

from gradwire.workbench.report.read import Run


def headline(runs: Sequence[Run]) -> str:
    """Return the outcome of the first run, compared with the dense runs after it, if any.

    "topk/allgather at 1 % reached 96.1 % against 96.4 % dense, with 23x fewer bytes."
    """
    run = runs[0]
    score, show_score = run.score, run.task.words
    if score is None:
        return f"{run.title} has trained for {run.steps:,} steps; no epoch has ended yet."
    others = {r.title: r for r in runs[1:] if r.dense and r.score is not None}
    dense = next(iter(others.values()), None)
    sentence = f"{run.title} reached {show_score(score)} {run.task.measure}"
    if others and not run.dense:
        scores = [f"{show_score(r.last(r.task.column))} {title}" for title, r in others.items()]
        sentence += f" against {' and '.join(scores)}"
    sentence += _saved_bytes(run, dense)
    return sentence + _unfinished(run, dense)


def _saved_bytes(run: Run, dense: Run | None) -> str:
    """Compare the bytes sent with those of the dense run, if it did the same number of steps.

    Otherwise compare them with the bytes of a ring all-reduce.
    """
    sent, all_reduce = run.last("bytes_sent"), run.last("bytes_dense")
    if run.dense or not sent or not all_reduce:
        return ""
    if dense is not None and dense.last("step") == run.last("step") and dense.last("bytes_sent"):
        return f", with {compare_bytes(dense.last('bytes_sent') / sent)} bytes"
    return f", with {compare_bytes(all_reduce / sent)} bytes than a ring all-reduce would have sent"


def _unfinished(run: Run, dense: Run | None) -> str:
    """Name the epochs done by each run that has not ended; a full stop if all have."""
    parts = []
    for member in [run] if dense is None else [run, dense]:
        done = member.last("epoch") or 0
        if done < member.options.epochs:
            parts.append(f"{member.title} has done {done} of {member.options.epochs} epochs")
    return f" (so far: {'; '.join(parts)})." if parts else "."


def compare_bytes(ratio: float) -> str:
    """Return a ratio of bytes in words: "23x fewer", "as many", "2x more"."""
    if 0.995 <= ratio <= 1.005:
        return "as many"
    return f"{ratio:.3g}x fewer" if ratio > 1 else f"{1 / ratio:.3g}x more"


def format_bytes(count: float) -> str:
    """Return a number of bytes with three digits and its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
