"""Training runs: the loop, its workers, its run folder."""

from gradwire.workbench.train.options import Options
from gradwire.workbench.train.plan import Plan, program, resume_command
from gradwire.workbench.train.run import Outcome, train
from gradwire.workbench.train.trainer import Sitting

__all__ = ["Options", "Outcome", "Plan", "Sitting", "program", "resume_command", "train"]
