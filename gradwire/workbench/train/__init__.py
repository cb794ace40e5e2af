"""Training runs: the loop, the workers, and the run folder."""

from gradwire.workbench.train.job import TrainJob, program, resume_command
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.run import TrainOutcome, train
from gradwire.workbench.train.trainer import RunLimits

__all__ = ["Options", "RunLimits", "TrainJob", "TrainOutcome", "program", "resume_command", "train"]
