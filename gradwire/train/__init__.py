"""Training runs: the loop, its workers, its run folder."""

from gradwire.train.options import Options
from gradwire.train.plan import Plan, program, resume_command
from gradwire.train.run import Outcome, train
from gradwire.train.trainer import Sitting

__all__ = ["Options", "Outcome", "Plan", "Sitting", "program", "resume_command", "train"]
