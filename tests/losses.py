"""The losses of the paper as functions of one flat vector of weights: L_{f,Λ}, L_{h,Λ}, and minus the evidence M."""

from collections.abc import Callable

import scipy.optimize
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import oracle

Loss = Callable[[Tensor], Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(net: nn.Module) -> Tensor:
    """θ̃ [P]."""
    return parameters_to_vector(net.parameters()).detach()


def outputs(net: nn.Module, X: Tensor, theta: Tensor) -> Tensor:
    """f(θ, X), differentiable in θ; in the mode that the network is in."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    parts = theta.split([shape.numel() for shape in shapes.values()])
    return functional_call(net, {n: t.view(s) for (n, s), t in zip(shapes.items(), parts, strict=True)}, (X,))


def network_loss(net: nn.Module, X: Tensor, p: oracle.Problem, Lambda: Tensor, sigma: Tensor) -> Loss:
    """L_{f,Λ}."""
    return lambda theta: p.total_loss(outputs(net, X, theta), sigma) + 0.5 * (Lambda * theta**2).sum()


def linear_loss(p: oracle.Problem, Lambda: Tensor, sigma: Tensor) -> Loss:
    """L_{h,Λ}."""
    return lambda theta: oracle.regularised_loss(p, theta, Lambda, sigma)


def minus_evidence(H: Tensor, theta: Tensor) -> Loss:
    """−M_θ as a function of Λ [P], its constant left out."""
    return lambda Lambda: oracle.half_log_det(H, Lambda) + 0.5 * (Lambda * theta**2).sum()


def minimised(loss: Loss, start: Tensor) -> Tensor:
    """A minimum of a smooth loss: by a quasi-Newton method, and Newton steps for the last digits."""

    def for_scipy(point):
        point = torch.tensor(point)
        return loss(point).item(), grad(loss)(point).numpy()

    options = {"gtol": 1e-5, "maxiter": 5000}
    theta = torch.tensor(scipy.optimize.minimize(for_scipy, start.numpy(), jac=True, options=options).x)
    for _ in range(5):
        theta = theta - torch.linalg.solve(hessian(loss)(theta), grad(loss)(theta))
    assert grad(loss)(theta).norm() < 1e-8
    assert torch.linalg.eigvalsh(hessian(loss)(theta))[0] > 0
    return theta


def train_to_the_end(net: nn.Module, X: Tensor, p: oracle.Problem, Lambda: Tensor, sigma: Tensor) -> None:
    """Put the network at a minimum of L_{f,Λ}."""
    vector_to_parameters(minimised(network_loss(net, X, p, Lambda, sigma), weights_of(net)), net.parameters())


def demanding_targets(net: nn.Module, X: Tensor, likelihood: str) -> Tensor:
    """Targets of the linearised network at other weights, so that the evidence keeps all groups of weights."""
    f, J = oracle.jacobian(net, X)
    sizes = [p.numel() for p in net.parameters()]
    parts = [part / part.norm() * part.shape[-1] ** 0.5 for part in J.split(sizes, dim=-1)]  # of one size by tensor
    shift = torch.cat(parts, -1) @ random(J.shape[-1])
    clean = shift / shift.std() * 2
    noisy = clean + 0.1 * random(*f.shape, seed=1)
    return noisy if likelihood == "gaussian" else noisy.argmax(1)
