"""Optimisers: Muon for hidden matrices, with AdamW for all other parameters."""

from gradwire.optim.muon_adamw import MuonAdamW, muon

__all__ = ["MuonAdamW", "muon"]
