"""Models that judge in words: who is asked, which of what they say is kept, and data for those that are trained."""
