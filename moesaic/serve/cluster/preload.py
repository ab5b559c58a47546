"""Imported once by the process that workers are forked from: all that an engine of any kind needs."""

import moesaic.serve.cluster.engine_process
import moesaic.serve.cluster.engine_server
import moesaic.serve.cluster.kinds  # noqa: F401
