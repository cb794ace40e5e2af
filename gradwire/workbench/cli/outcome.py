"""Do a training job, and say on the terminal how it ended."""

from gradwire.errors import ConfigError
from gradwire.workbench.cli.say import say
from gradwire.workbench.report import ReportError, headline, read_runs, write_report
from gradwire.workbench.train import TrainJob, TrainOutcome, checkpoint, resume_command, train
from gradwire.workbench.train.launch import WorkerError

_INTERRUPTED = 130


def train_and_report(job: TrainJob) -> int:
    """Train, print the outcome on the first rank, write the report, and return the exit code."""
    for note in job.notes:
        say(f"note: {note}")
    try:
        outcome = train(job)
    except WorkerError:
        if checkpoint.exists(job.folder):
            say(f"the last checkpoint goes on with:  {resume_command(job.folder)}")
        raise
    if outcome.first:
        (_say_stopped if outcome.stopped else _say_done)(outcome)
    return _INTERRUPTED if outcome.stopped else 0


def _say_stopped(outcome: TrainOutcome) -> None:
    step = outcome.results[-1]["steps"]
    say(f"stopped after step {step:,} of {outcome.results[-1]['title']}; a checkpoint is saved.")
    say("go on with:")
    say(f"  {resume_command(outcome.folder)}")


def _say_done(outcome: TrainOutcome) -> None:
    folder = outcome.folder
    for result in outcome.results:
        if not result["replicas_identical"]:
            say(f"{result['title']}: the replicas are NOT identical.", style="red")
    if not all(result["complete"] for result in outcome.results):
        say(f"the steps asked for are done; go on with:  {resume_command(outcome.folder)}")
    try:
        say(headline(read_runs(folder)))
        say(f"report  {write_report(folder)}")
    except (ReportError, ConfigError) as error:
        say(f"note: {error}")
