"""The user's world as it was: modes, plain tensor attributes and random states survive every call."""

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's random states on leaving, also after an exception."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the user's state, whatever they use)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode and restore what was there, also after an exception.

    The flag is set directly: a module's own `train()` or `eval()` may do more than set it (merge adapters,
    say). Plain tensor attributes are put back too, since old-style weight norm rewrites one at every forward.
    """
    modules = list(module.modules())
    modes = [m.training for m in modules]
    attributes = [{k: v for k, v in vars(m).items() if isinstance(v, torch.Tensor)} for m in modules]
    try:
        for m in modules:
            m.training = False
        yield
    finally:
        for m, mode, tensors in zip(modules, modes, attributes, strict=True):
            m.training = mode
            vars(m).update(tensors)


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Eval mode, with fused kernels that lack derivatives replaced by others of the same values.

    Fused attention has no forward-mode rule, the math kernel has one; the fast path of `nn.TransformerEncoder`
    bypasses autograd altogether; fused recurrent layers have no rule either, their plain versions do.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(evaluating(module))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_quiet("There is a performance drop"))
            if any(isinstance(m, nn.RNNBase) for m in module.modules()):
                stack.enter_context(_plain_recurrence())
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


@contextmanager
def _quiet(message: str) -> Iterator[None]:
    """Keep to ourselves what torch says about a choice that is ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, UserWarning)
        yield


@contextmanager
def _plain_recurrence() -> Iterator[None]:
    with (
        _quiet("TF32 acceleration"),  # said whenever the flags are set, also where there is no accelerator
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield
