"""The clock of a GPU that serves: chosen step by step so that latencies stay within their SLOs, and no higher."""
