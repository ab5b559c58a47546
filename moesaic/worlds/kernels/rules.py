"""What a submitted kernel may consist of: everything that is not known to be harmless is refused, with its line.

A submission computes with Triton. So outside of kernels it may look at shapes, make tensors without computing, and
launch; nowhere may it read files or clocks, keep anything from one call to the next, or change what others use. What
is computed with PyTorch all the same, with an operator between tensors, is noticed when it runs (`_kernel_inside.py`).
"""

from __future__ import annotations

import ast

from moesaic.python_syntax import parse_module

IMPORTS = {"torch": "torch", "triton": "triton", "triton.language": "tl", "math": "math"}
TORCH = {"empty", "empty_like", "zeros", "zeros_like", "float32", "float16", "bfloat16", "int32", "int64", "Tensor"}
TRITON = {"jit", "cdiv", "next_power_of_2"}
MATH = {"inf", "pi", "sqrt", "exp", "log", "ceil", "floor"}
TL = {
    *(
        "load",
        "store",
        "arange",
        "program_id",
        "num_programs",
        "zeros",
        "full",
        "sum",
        "max",
        "min",
        "argmax",
        "argmin",
    ),
    *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "abs", "sin", "cos", "erf", "floor", "ceil", "fma"),
    *("where", "dot", "maximum", "minimum", "cdiv", "trans", "reshape", "broadcast_to", "expand_dims", "static_range"),
    *("range", "constexpr", "float32", "float16", "bfloat16", "int32", "int64", "int1", "atomic_add", "atomic_max"),
    *("cumsum", "softmax", "multiple_of", "max_contiguous", "zeros_like", "cast"),
}
ROOTS = {"torch": TORCH, "triton": TRITON, "tl": TL, "math": MATH}
# Of values: what says how a tensor is laid out, or lays it out otherwise.
ATTRIBUTES = {
    *("shape", "stride", "size", "numel", "dim", "ndim", "dtype", "device", "contiguous", "view", "reshape"),
    *("to", "new_empty", "element_ty", "is_contiguous"),
}
BUILTINS = {"range", "min", "max", "len", "int", "float", "bool", "abs", "tuple", "True", "False", "None"}
REFUSED = (
    *(ast.ClassDef, ast.AsyncFunctionDef, ast.Global, ast.Nonlocal, ast.Try, ast.With, ast.Raise, ast.Delete),
    *(ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.JoinedStr, ast.Starred, ast.Match, ast.Assert),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.TryStar),
)
MOST_CHARACTERS = 8_000


class Refused(Exception):
    """A submission that is not run, and why."""


def check(source: str, entry: str) -> None:
    """Raises `Refused` unless a submission keeps to the rules."""
    if len(source) > MOST_CHARACTERS:
        raise Refused(f"it is longer than {MOST_CHARACTERS} characters")
    try:
        tree = parse_module(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"it is no Python ({error})") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if entry not in functions or _is_kernel(functions[entry]):
        raise Refused(f"there is no function {entry} that launches a kernel")
    if not any(_is_kernel(function) for function in functions.values()):
        raise Refused("there is no kernel in it: a function under @triton.jit")
    constants = _constants(tree)
    for function in functions.values():
        if function.name in ROOTS or function.name in BUILTINS:
            raise Refused(f"line {function.lineno}: {function.name} has a meaning already")
        _check_function(function, {*functions, *constants})


def _constants(tree: ast.Module) -> set[str]:
    """What a module may hold beside functions: imports, and numbers by name."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node, ast.Import) and all(
            IMPORTS.get(alias.name) == (alias.asname or alias.name) for alias in node.names
        ):
            continue
        number = node.value if isinstance(node, ast.Assign) else None
        if isinstance(number, ast.Call) and ast.unparse(number.func) == "tl.constexpr" and len(number.args) == 1:
            number = number.args[0]
        if isinstance(node, ast.Assign) and isinstance(number, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if len(names) == len(node.targets) and not set(names) & {*ROOTS, *BUILTINS}:
                found |= set(names)
                continue
        raise Refused(
            f"line {node.lineno}: outside of functions there may be numbers by name, and import torch, import triton, "
            "import triton.language as tl, import math"
        )
    return found


def _is_kernel(function: ast.FunctionDef) -> bool:
    return [ast.unparse(decorator) for decorator in function.decorator_list] == ["triton.jit"]


def _check_function(function: ast.FunctionDef, known: set[str]) -> None:
    if function.decorator_list and not _is_kernel(function):
        raise Refused(f"line {function.lineno}: the only decorator is @triton.jit")
    arguments = function.args
    if arguments.vararg or arguments.kwarg:
        raise Refused(f"line {function.lineno}: arguments are named one by one")
    for default in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
        if not isinstance(default, ast.Constant):
            raise Refused(f"line {function.lineno}: a default is a number")
    nodes = [inner for statement in function.body for inner in ast.walk(statement)]
    local = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    if taken := local & {*ROOTS, *BUILTINS, *known}:
        raise Refused(f"line {function.lineno}: {', '.join(sorted(taken))} cannot be given another meaning")
    for node in nodes:
        _check_node(node, local | known | BUILTINS | set(ROOTS))
    annotations = [argument.annotation for argument in (*arguments.args, *arguments.kwonlyargs) if argument.annotation]
    for annotation in annotations:
        if ast.unparse(annotation) not in ("tl.constexpr", "torch.Tensor", "int", "float"):
            raise Refused(f"line {function.lineno}: an annotation is tl.constexpr, torch.Tensor, int or float")


def _check_node(node: ast.AST, names: set[str]) -> None:
    place = f"line {getattr(node, 'lineno', 0)}"
    if isinstance(node, (*REFUSED, ast.FunctionDef, ast.Import, ast.ImportFrom)):
        raise Refused(f"{place}: {type(node).__name__} has no place in a function here")
    if isinstance(node, ast.Name) and (node.id not in names or node.id.startswith("__")):
        raise Refused(f"{place}: {node.id} is not known here")
    if isinstance(node, ast.Attribute):
        root = node.value.id if isinstance(node.value, ast.Name) and node.value.id in ROOTS else None
        if isinstance(node.ctx, ast.Store) or node.attr not in (ROOTS[root] if root else ATTRIBUTES):
            raise Refused(f"{place}: {ast.unparse(node)} is not among what a submission may use")
    if isinstance(node, ast.Name) and node.id in ROOTS and not isinstance(node.ctx, ast.Load):
        raise Refused(f"{place}: {node.id} cannot be given another meaning")
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        raise Refused(f"{place}: parts of a tensor are written by a kernel, with tl.store")
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "__" in node.value:
        raise Refused(f"{place}: such a text has no use here")
