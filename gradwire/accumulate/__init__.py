"""Gradient + residual -> u, and the state that stays between steps."""

from gradwire.accumulate.bundle import Bundle
from gradwire.accumulate.layout import arrange
from gradwire.accumulate.momentum import Correction
from gradwire.accumulate.schedule import Schedule

__all__ = ["Bundle", "Correction", "Schedule", "arrange"]
