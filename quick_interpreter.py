"""Triton's interpreter with memory: it makes the types of each tensor anew, and patches triton.language at each call of a device function.

Without this file a small loss and its gradient take 65 ms, with it 13 ms, and the default tier of tests would take a quarter of an hour.
No operation is replaced: what is computed, converted and compared is Triton's own. What changes is how often it is made:

- `interpreter._patch_lang` patches a module that is patched already at every call of a device function. Here it does so once a kernel.
- `interpreter._patch_builtin` searches triton.language for functions to patch and wraps each. Here both are found once.
- `core.block_type.__init__` checks a shape and writes out its name for each tensor. Here once for a shape and an element type.
- `core.tensor.__init__` wraps the sizes of each tensor. Here once a type.
- `interpreter._get_np_dtype` builds a table of 19 dtypes at each call. Here a type's is kept under its name.
- `TritonSemantic.broadcast_impl_value` compares the sizes of two blocks as constexprs for each operation. Here, where it left both blocks
  as they were, it is not asked again for blocks of these sizes.
- `TritonSemantic.computation_type_impl` finds the common type of two scalar types by a dozen questions. Here once a pair.
- `core.dtype.__eq__` unwraps constexprs and compares names. Here a type is equal to itself without that.
- `interpreter_builder.options.sanitize_overflow` computes the operands of an assertion on integers that only a debug launch makes. Here
  they are computed for a debug launch alone, as the compiler does.

In Triton 3.5 one check is left out because it is wrong: that of a descriptor's strides.

Each could be done so in Triton itself, as a cache beside the function; its authors may take them from here. Every night a tenth of the
cases runs without this file: `pytest packages/ --tenth N`.
"""

import dataclasses
import functools
import inspect
from typing import Any

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def patch_once() -> None:
    """Patch triton.language once a kernel, with functions that are made once."""
    patch = getattr(interpreter, "_patch_lang", None)
    nothing = getattr(interpreter, "_LangPatchScope", lambda: None)  # triton 3.5 has none, and restores nothing
    if patch is None:
        return
    members = functools.cache(lambda package: [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)])

    @functools.cache
    def bound(member, builder):
        semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)  # without the check that there is a semantic
        return lambda *args, _semantic=None, **kwargs: function(*args, _semantic=semantic, **kwargs)

    def patch_builtin(package, builder, *scope):
        for name in members(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                (scope[0].set_attr if scope else setattr)(package, name, bound(member, builder))

    @functools.cache
    def seen(fn):
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_what_is_left(fn):
        done = seen(fn) and not any(tl.core.is_builtin(language.load) for language in seen(fn))
        return nothing() if done else patch(fn)

    interpreter._patch_lang, interpreter._patch_builtin = patch_what_is_left, patch_builtin


def remember_types() -> None:
    """Make what follows from a type alone once."""
    find_dtype = getattr(interpreter, "_get_np_dtype", None)
    if find_dtype is None:
        return
    make_block, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
    broadcast, find_common, equal = TritonSemantic.broadcast_impl_value, TritonSemantic.computation_type_impl, tl.dtype.__eq__
    blocks: dict[Any, dict[str, Any]] = {}
    unchanged: set[Any] = set()
    dtypes: dict[str, Any] = {}
    common: dict[Any, Any] = {}

    def make_block_once(self, element_ty, shape):
        sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = (*sizes, element_ty.name, getattr(element_ty, "address_space", None))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__ | {"_tensor": {}, "_sizes": key[:-2]}
        self.__dict__.update(blocks[key])

    def make_tensor_once(self, handle, type):
        known = type.__dict__.setdefault("_tensor", {})
        if not known:
            make_tensor(self, handle, type)
            known.update(self.__dict__)
        self.__dict__.update(known, handle=handle, type=type)

    def find_dtype_once(tt_dtype):
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = find_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    def broadcast_once(self, lhs, rhs):
        sizes = lhs.type.__dict__.get("_sizes"), rhs.type.__dict__.get("_sizes")
        if sizes in unchanged:
            return lhs, rhs
        found = broadcast(self, lhs, rhs)
        if None not in sizes and found[0] is lhs and found[1] is rhs:
            unchanged.add(sizes)
        return found

    def find_common_once(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in common:
            common[key] = find_common(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return common[key]

    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    TritonSemantic.computation_type_impl = find_common_once
    TritonSemantic.broadcast_impl_value = broadcast_once
    tl.core.block_type.__init__ = make_block_once
    tl.core.tensor.__init__ = make_tensor_once
    interpreter._get_np_dtype = find_dtype_once


def skip_overflow_checks() -> None:
    """Compute whether sums of integers overflow for debug launches alone."""
    options = interpreter.interpreter_builder.options
    if not options.debug and getattr(options, "sanitize_overflow", False):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def take_strides_in_elements() -> None:
    """Let Triton 3.5 take descriptors that TensorDescriptor has checked. Its interpreter checks them anew, and takes elements for bytes."""
    if triton.__version__.startswith("3.5."):
        interpreter.TensorDescHandle.validate = lambda descriptor: None


def quicken() -> None:
    """Change the interpreter of this process."""
    take_strides_in_elements()
    patch_once()
    remember_types()
    skip_overflow_checks()
