"""The forms of requests and answers: what a client may send, and what it gets."""
