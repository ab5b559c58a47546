"""Answers from knowledge bases: the search for a request (`finding.py`), what is found for it (`sources.py`), how the
model is shown that (`passages_prompt.py`), what an answer cites (`citing.py`), the routes (`routes.py`), and the
bases as tools of other programs (`mcp.py`)."""
