"""Adapters to the ways people train. No algorithm lives here."""
