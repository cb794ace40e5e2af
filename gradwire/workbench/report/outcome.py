"""What came out, in one sentence."""

from collections.abc import Sequence

from gradwire.workbench.report.read import Run


def headline(runs: Sequence[Run]) -> str:
    """The first run's outcome, against dense if there is such a run.

    "topk/allgather at 1 % reached 96.1 % against 96.4 % dense, with 23x fewer bytes."
    """
    run = runs[0]
    score, words = run.score, run.task.words
    if score is None:
        return f"{run.title} has trained for {run.steps:,} steps; no epoch has ended yet."
    dense = next((r for r in runs[1:] if r.dense and r.score is not None), None)
    sentence = f"{run.title} reached {words(score)} {run.task.measure}"
    if dense is not None and dense.score is not None and not run.dense:
        sentence += f" against {words(dense.score)} dense"
    sentence += _bytes(run, dense)
    return sentence + _unfinished(run, dense)


def _bytes(run: Run, dense: Run | None) -> str:
    """How many bytes fewer; against the dense run where one went as far."""
    sent, would = run.last("bytes_sent"), run.last("bytes_dense")
    if run.dense or not sent or not would:
        return ""
    if dense is not None and dense.last("step") == run.last("step") and dense.last("bytes_sent"):
        return f", with {times(dense.last('bytes_sent') / sent)} bytes"
    return f", with {times(would / sent)} bytes than a ring all-reduce would have sent"


def _unfinished(run: Run, dense: Run | None) -> str:
    """A full stop, or how far the runs have come."""
    parts = []
    for one in [run] if dense is None else [run, dense]:
        done = one.last("epoch") or 0
        if done < one.options.epochs:
            parts.append(f"{one.title} has done {done} of {one.options.epochs} epochs")
    return f" (so far: {'; '.join(parts)})." if parts else "."


def times(ratio: float) -> str:
    """A ratio of bytes in words: "23x fewer", "as many", "2x more"."""
    if 0.995 <= ratio <= 1.005:
        return "as many"
    return f"{ratio:.3g}x fewer" if ratio > 1 else f"{1 / ratio:.3g}x more"


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
