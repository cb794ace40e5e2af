"""Predictions of the seconds of a step, and a choice of exchange with its reason."""
