"""A pytest plugin of the processes that interpret kernels: spares Triton's interpreter work that decides nothing.

More than half of the time went there: our kernels are many operations on small tiles.
"""

import dataclasses
import functools
from typing import Any

from triton.runtime import interpreter

dtype_of_scalars = functools.cache(interpreter._get_np_dtype)
patched: set[str] = set()


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls: the language was patched anew at each call, and what this did is never undone."""
    if self.fn.__module__ not in patched:
        patched.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def np_dtype(kind: Any) -> Any:
    """It made a table of all types at each call."""
    return interpreter.np.dtype("uint64") if kind.scalar.is_ptr() else dtype_of_scalars(kind.scalar)


interpreter.InterpretedFunction.__call__ = call
interpreter._get_np_dtype = np_dtype
# It computes whether integers overflow and, as it is not debugging, drops what it found.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
