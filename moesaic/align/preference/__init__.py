"""Preference data: pairs of completions, packed for DPO and its kin, and for reward models."""
