"""Load generation against an OpenAI-compatible server, and a server process to measure."""
