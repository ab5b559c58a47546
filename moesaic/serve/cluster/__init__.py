"""Replicas of the engine on Ray, behind one frontend that routes by prefix and load."""
