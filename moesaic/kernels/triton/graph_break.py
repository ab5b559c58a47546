"""What a compiled block must not look into: `torch.compile` stops before it and goes on after it.

`torch.compiler.disable` does the same, but imports the whole compiler where a function is defined, which takes an
engine that compiles nothing two to four seconds at its start. This imports it when such a function is first called.
"""

from torch._compile import _disable_dynamo as eager

__all__ = ["eager"]
