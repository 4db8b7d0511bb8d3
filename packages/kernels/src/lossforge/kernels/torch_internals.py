"""Private names of torch and triton, each behind a guard. Where a name exists, it is a faster way; otherwise the public one is used.

Without them a loss is as right, but slower: every call goes through torch's dispatcher, and its arguments are checked each time.
Triton is imported when a kernel is first needed.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9):
    raise ImportError(f"lossforge needs torch>=2.9,<2.16, found torch {torch.__version__}. Install a newer torch.")

PLAIN_TYPES = (Tensor, torch.nn.Parameter)

_are_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", None)
_HAS_LEVEL = hasattr(forward_ad, "_current_level")


try:  # what torch's dispatcher knows about this thread and a tensor
    _key, _keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    _ordinary = frozenset(
        functools.reduce(operator.or_, map(_keys, each)).raw_repr()
        for each in (
            (_key.CUDA, _key.ADInplaceOrView, _key.AutogradCUDA, _key.AutocastCUDA),
            (_key.CPU, _key.ADInplaceOrView, _key.AutogradCPU, _key.AutocastCPU),
        )
    )
    _included, _excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_is_dispatch_key_excluded
    _autograd, _functions, _keys_of = _key.AutogradFunctionality, torch._C._len_torch_function_stack, torch._C._dispatch_keys
    NO_MODES: tuple[Any, ...] = ((_keys(_key.BackendSelect) | _keys(_key.ADInplaceOrView)).raw_repr(), False, 0, -1)
    """The result of `modes` when none is active."""
    _KNOWN = _HAS_LEVEL
except AttributeError:
    _KNOWN = False

if _KNOWN:

    def modes() -> tuple[Any, ...]:
        """Return the active modes, transforms, tracers and forward-mode derivatives; () if torch lacks the names to ask."""
        return _included().raw_repr(), _excluded(_autograd), _functions(), forward_ad._current_level

    def ordinary(t: Any) -> bool:
        """Return whether `t` is known to be a tensor whose memory holds its values: not a subclass, wrapper or lazy view."""
        return type(t) in PLAIN_TYPES and _keys_of(t).raw_repr() in _ordinary

else:
    NO_MODES = ("known",)

    def modes() -> tuple[Any, ...]:
        return ()

    def ordinary(t: Any) -> bool:
        return False


def transformed(*tensors: Tensor | None) -> bool:
    """Return whether a transform of torch.func is active. Without the private name: whether one wraps one of these tensors."""
    if _are_transforms_active is not None:
        return _are_transforms_active()
    return not torch.compiler.is_compiling() and not all(t is None or _has_memory(t) for t in tensors)


def _has_memory(t: Tensor) -> bool:
    try:
        t.data_ptr()
    except RuntimeError:
        return False
    return True


def in_forward_mode(*tensors: Tensor | None) -> bool:
    """Return whether forward-mode derivatives are computed. Without the private name: whether one of these tensors has a tangent."""
    if _HAS_LEVEL:
        return forward_ad._current_level >= 0
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Let torch.compile take what a function returns of constants as a constant of the graph, without tracing into it.

    As torch.compiler.assume_constant_result does, which imports torch._dynamo.
    """

    @functools.wraps(function)
    def constant(*args: Any) -> Any:
        return function(*args)

    found: Any = constant
    found._dynamo_marked_constant = True
    return cast("Function", found)


def register_autograd(library: Any, name: str, setup: Callable[..., None], differentiate: Callable[..., Any]) -> None:
    """Register an operator's autograd as torch.library.register_autograd does, but without its reading of the schema at every call, which
    takes longer than a small loss.

    That reading restores arguments that the dispatcher drops because they equal their defaults. Our schemas have no defaults.
    """
    try:
        below_autograd, after_autograd = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
        any_requires_grad = torch._C._any_requires_grad
        redispatch = getattr(getattr(torch.ops, library.ns), name).default.redispatch
    except AttributeError:
        torch.library.register_autograd(f"{library.ns}::{name}", differentiate, setup_context=setup, lib=library)
        return

    def below(keyset: Any, *args: Any) -> Any:
        with below_autograd():
            return redispatch(keyset & after_autograd, *args)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            result = below(keyset, *args)
            setup(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return None, *differentiate(ctx, *gradients)

    def implementation(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(*args):
            return Differentiable.apply(keyset, *args)
        return below(keyset, *args)

    library.impl(name, implementation, "Autograd", with_keyset=True)


_get_device = getattr(torch._C, "_cuda_getDevice", None)
_get_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_device() -> int:
    return torch.cuda.current_device() if _get_device is None else _get_device()


def current_stream(device: int) -> int:
    """Return CUDA's handle of the device's current stream."""
    return torch.cuda.current_stream(device).cuda_stream if _get_raw_stream is None else _get_raw_stream(device)


class TritonInternals:
    """How Triton starts a compiled kernel.

    Attributes:
        known: whether this is a version that the tests cover. Interfaces whose change no missing name would show (the order of arguments,
            Gluon's meaning) are only used if it is.

    Raises:
        ImportError: Triton is too old.
    """

    NEEDED, UNKNOWN = (3, 5), (3, 10)

    def __init__(self) -> None:
        import triton

        self.release = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if self.release < self.NEEDED:
            raise ImportError(
                f"lossforge needs triton>=3.5,<3.10, found triton {triton.__version__}. Install torch>=2.9,<2.16, which brings the triton "
                "it needs."
            )
        self.known = self.release < self.UNKNOWN
        self.function, self.knobs = triton.JITFunction, triton.knobs
        self.run = getattr(triton.JITFunction, "run", None)

    def starts_directly(self, compiled: Any) -> bool:
        """Return whether `start` can start this compiled kernel."""
        whole = all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
        return self.known and whole and self._as_before()

    def _as_before(self) -> bool:
        return self.run is not None and getattr(self.function, "run", None) is self.run

    @staticmethod
    def start(compiled: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...]) -> None:
        """Start a kernel on the current stream, as Triton does, without checking its arguments."""
        compiled.run(*grid, current_stream(device), compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    def unobserved(self, kernel: Any) -> bool:
        """Return whether no hook observes launches, and Triton's compilation was not replaced or set to debug."""
        try:
            runtime = self.knobs.runtime
            observed = kernel.pre_run_hooks or runtime.debug or _hooked(runtime.launch_enter_hook) or _hooked(runtime.launch_exit_hook)
        except AttributeError:
            return False
        return not observed and self._as_before()


def _hooked(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


@functools.cache
def triton_internals() -> TritonInternals:
    return TritonInternals()
