"""Preference data: pairs of answers, packed for DPO and its kin, and for reward models."""
