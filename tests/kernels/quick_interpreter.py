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
from triton.runtime import interpreter

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
    one = core.constexpr(1)

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
            self.shape, self.numel = core.tuple(()), one
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
