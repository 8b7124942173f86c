"""The user's world as it was: modes, attributes, hooks and random states survive every call."""

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CONTAINERS = (dict, list, set)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's random states on leaving, also after an exception."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the user's state, whatever they use)
    accelerators = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=accelerators):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


@dataclass(frozen=True)
class Belongings:
    """What a module holds itself: its mode, its attributes, and what its lists, dicts and sets contain.

    A forward may write to any of them, even in eval mode: it counts its calls, keeps its last activations, or, as
    old-style weight norm and recurrent layers do, the tensors it made of its weights.
    """

    training: bool
    attributes: dict[str, Any]
    empty: list[Any]
    filled: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "Belongings":
        """What a module holds now."""
        attributes = dict(vars(module))
        held = [value for value in attributes.values() if isinstance(value, CONTAINERS)]
        filled = [(own, _copied(own)) for own in held if own]
        return cls(module.training, attributes, [own for own in held if not own], filled)

    def lend(self, module: nn.Module) -> None:
        """Eval mode, and copies instead of the plain tensors, so that these are not written to.

        The flag is set directly: a module's own `train()` or `eval()` may do more than that (merge adapters, say).
        """
        module.training = False
        tensors = {name: value for name, value in self.attributes.items() if isinstance(value, torch.Tensor)}
        vars(module).update({name: tensor.detach().clone() for name, tensor in tensors.items()})

    def restore(self, module: nn.Module) -> None:
        """Put everything back in its place."""
        module.training = self.training
        now = vars(module)
        for name in now.keys() - self.attributes.keys():
            del now[name]
        now.update(self.attributes)
        for own in self.empty:
            own.clear()
        for own, content in self.filled:
            own.clear()
            (own.extend if isinstance(own, list) else own.update)(content)


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode and restore what was there, also after an exception."""
    before = [(m, Belongings.of(m)) for m in module.modules()]
    try:
        for m, held in before:
            held.lend(m)
        yield
    finally:
        for m, held in before:
            held.restore(m)


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Eval mode, with fused kernels that lack derivatives replaced by others of the same values.

    Fused attention has no forward-mode rule, the math kernel has one; the fast path of `nn.TransformerEncoder`
    bypasses autograd altogether; fused recurrent layers have no rule either, their plain versions do. The caller's
    inference mode and mixed precision end here: the first forbids derivatives, the second rounds them.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    device = next((p.device.type for p in module.parameters()), "cpu")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(evaluating(module))
            stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_quiet("There is a performance drop"))
            stack.enter_context(_quiet("Full backward hook is firing"))  # the user's, for our derivatives
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
