"""Triton's interpreter, in half the time: what it works out for every operation of every program is remembered.

Tiny shapes make a kernel's arithmetic free; what takes the time is the interpreter's own Python: types and shapes that
are made again and again, and checks whose result nobody reads (overflows are looked for, and reported only if it
debugs). Nothing here changes a value.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

FLOATS, INTEGERS = frozenset(("fp32", "fp64")), frozenset(("int32", "int64"))
WHOLE = FLOATS | INTEGERS | {"int1", "int8", "int16", "uint8", "uint16", "uint32", "uint64"}
PLAIN = (core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None))


def make_quick() -> None:
    """Once in a process, before a kernel is launched."""
    if not hasattr(interpreter, "quick"):
        interpreter.quick = True  # type: ignore[attr-defined]
        builder = interpreter.interpreter_builder
        if not builder.options.debug:  # or it would say what it finds
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        remember_types()
        remember_shapes()
        remember_members()
        remember_operands()
        patch_language_once()


def remember_types() -> None:
    plain_eq, plain_numpy, plain_kind = core.dtype.__eq__, interpreter._get_np_dtype, core.dtype.kind
    numpy_types: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)

    def equal(self: Any, other: Any) -> bool:
        return self is other or (self.name == other.name if type(other) is core.dtype else plain_eq(self, other))

    def numpy_type(given: Any) -> Any:
        if given.name not in numpy_types:
            numpy_types[given.name] = plain_numpy(given)
        return numpy_types[given.name]

    def kind(self: Any) -> Any:
        if self.name not in kinds:
            kinds[self.name] = plain_kind(self)
        return kinds[self.name]

    core.dtype.__eq__ = equal  # type: ignore[method-assign]
    core.dtype.kind = kind  # type: ignore[method-assign]
    core.dtype.is_int = lambda self: self.name in integers  # type: ignore[method-assign]
    interpreter._get_np_dtype = numpy_type  # type: ignore[assignment]


def remember_shapes() -> None:
    plain_unwrap, plain_shape, plain_block = core._unwrap_if_constexpr, core._unwrap_shape, core.block_type.__init__
    blocks: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}
    one, none = core.constexpr(1), core.tuple(())

    def unwrap(given: Any) -> Any:
        kind = type(given)
        return given.value if kind is core.constexpr else given if kind in PLAIN else plain_unwrap(given)

    def unwrap_shape(shape: Any) -> Any:
        return [unwrap(size) for size in shape] if type(shape) in (list, core.tuple) else plain_shape(shape)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        known = element_ty.name, type(shape), *unwrap_shape(shape)
        if known in blocks:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = blocks[known]
        else:
            plain_block(self, element_ty, shape)
            blocks[known] = self.shape, self.numel, self.name

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = none, one
            return
        sizes = tuple(type.shape.values)
        if sizes not in shapes:
            shapes[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(type.numel)
        self.shape, self.numel = shapes[sizes]

    for module in (core, tl):
        if hasattr(module, "_unwrap_if_constexpr"):
            module._unwrap_if_constexpr = unwrap  # type: ignore[attr-defined]
    core._unwrap_shape = unwrap_shape  # type: ignore[assignment]
    core.block_type.__init__ = block  # type: ignore[method-assign]
    core.tensor.__init__ = tensor  # type: ignore[method-assign]


def remember_members() -> None:
    """Which functions of the language a launch replaces, and by what."""
    checking = core.builtin(lambda: None).__code__  # only looks whether it was given what is given here
    replaced: dict[Any, list[tuple[str, Callable[..., Any]]]] = {}

    def told(member: Any) -> Callable[..., Any]:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        return call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in replaced:
            replaced[package] = [
                (name, told(member)) for name, member in inspect.getmembers(package) if core.is_builtin(member)
            ]
        for name, member in replaced[package]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch  # type: ignore[assignment]


def remember_operands() -> None:
    """Operands of one type and shape go together as they are, and a number is made a constant once."""
    plain_check, plain_broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    plain_constant = TritonSemantic.scalar_constant
    constants: dict[Any, Any] = {}

    def takes(kind: Any, number: Any) -> bool:
        """Whether a number beside a tensor becomes one of the tensor's type."""
        if type(number) is int:
            return kind.name in FLOATS or (kind.name in INTEGERS and -(2**31) <= number < 2**31)
        return type(number) is float and kind.name in FLOATS

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is core.tensor:
            if type(rhs) is core.tensor:
                if lhs.dtype is rhs.dtype and lhs.dtype.name in WHOLE:
                    return broadcast(self, lhs, rhs)
            elif arithmetic_check and takes(lhs.dtype, rhs):
                return broadcast(self, lhs, constant(self, rhs, lhs.dtype))
        elif type(rhs) is core.tensor and arithmetic_check and takes(rhs.dtype, lhs):
            return broadcast(self, constant(self, lhs, rhs.dtype), rhs)
        return plain_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else plain_broadcast(self, lhs, rhs)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or type(value) not in (bool, int, float) or value == 0:  # zeros have signs
            return plain_constant(self, value, dtype)
        known = type(value), value, dtype.name
        if known not in constants:
            constants[known] = plain_constant(self, value, dtype)
        return constants[known]

    TritonSemantic.binary_op_type_checking_impl = check  # type: ignore[method-assign]
    TritonSemantic.broadcast_impl_value = broadcast  # type: ignore[method-assign]
    TritonSemantic.scalar_constant = constant  # type: ignore[method-assign]


def patch_language_once() -> None:
    """Whenever a function calls another one, the interpreter goes through all of `triton.language` again to patch what
    is patched already. Here that is done once in each launch."""
    plain: Any = interpreter._patch_lang
    language = (tl, tl.core)
    named: dict[Any, frozenset[int]] = {}  # identities of those modules that a function's file names
    patched: set[int] = set()

    def patch(function: Any) -> Any:
        if function not in named:
            seen = function.__globals__.values()
            named[function] = frozenset(id(value) for value in seen if any(value is one for one in language))
        if named[function] <= patched:  # inside a launch
            return None  # which nobody looks at there
        scope = plain(function)
        patched.update(named[function])
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch  # type: ignore[assignment]
