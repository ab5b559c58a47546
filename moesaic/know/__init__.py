"""Answers from one's own texts: a knowledge base is a directory that is built, searched, and asked.

moesaic know build docs --out kb
moesaic know ask kb "Who wrote it?" --model DIR
"""
