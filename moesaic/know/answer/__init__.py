"""Answers from what was found: with citations that are checked, by follow-up questions, by several agents."""
