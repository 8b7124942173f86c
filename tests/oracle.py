"""The whole method, dense and in float64, reading like its definitions: the ground truth of every other test.

Notation: n examples with outputs of shape [*c], P weights, J the Jacobian, W the Hessian of the loss in an
output, H = Σᵢ JᵢᵀWᵢJᵢ, Λ the prior precision of each weight [P], σ the noise, a standard deviation that
broadcasts against [*c], S = JᵀJ, Σ = (H + Λ)⁻¹. The prior N(0, Λ⁻¹) makes the loss Σℓ + ½‖θ‖²_Λ, a sum over
the data. Nothing here is fast.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.func import grad, jacrev, vmap

# --- likelihoods: −log p(y | o) of one example, every constant in


def gaussian(o: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
    return (0.5 * ((y - o) / sigma) ** 2 + 0.5 * math.log(2 * math.pi) + sigma.log()).sum()


def categorical(o: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """Classes on the first axis of the output: o [K, *pixels], y [*pixels]."""
    return -o.log_softmax(0).gather(0, y[None]).sum()


def bernoulli(o: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return (torch.logaddexp(o, torch.zeros_like(o)) - y * o).sum()


def poisson(o: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return (o.exp() - y * o + (y + 1).lgamma()).sum()


LOSSES = {"gaussian": gaussian, "categorical": categorical, "bernoulli": bernoulli, "poisson": poisson}

# --- the linearised model: h(θ) = c + Jθ


def jacobian(net: nn.Module, X: Tensor) -> tuple[Tensor, Tensor]:
    """f(θ̃, x) [n, *c] and J [n, *c, P], in eval mode, over the weights that require a gradient."""
    net = copy.deepcopy(net).eval()
    weights = [p for p in net.parameters() if p.requires_grad]
    f = net(X)
    rows = [torch.autograd.grad(o, weights, retain_graph=True, materialize_grads=True) for o in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    return f.detach(), J.reshape(*f.shape, -1)


@dataclass(frozen=True)
class Problem:
    """The linearised model and its data. One σ has noise_shape (), C have (C,) or (C, 1, 1), none (0,)."""

    J: Tensor  # [n, *c, P]
    f: Tensor  # [n, *c]
    c: Tensor  # [n, *c]
    Y: Tensor
    theta: Tensor  # θ̃ [P]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    noise_shape: tuple[int, ...]

    def outputs(self, theta: Tensor) -> Tensor:
        return self.c + self.J @ theta

    def total_loss(self, o: Tensor, sigma: Tensor) -> Tensor:
        return vmap(self.loss, (0, 0, None))(o, self.Y, sigma).sum()

    def W(self, o: Tensor, sigma: Tensor) -> Tensor:
        """d²ℓ/do² [n, m, m], m the numbers in one output."""
        m = o[0].numel()
        return vmap(jacrev(grad(self.loss)), (0, 0, None))(o, self.Y, sigma).reshape(-1, m, m)

    def H(self, o: Tensor, sigma: Tensor) -> Tensor:
        """Σᵢ JᵢᵀWᵢJᵢ [P, P] with W at the outputs o."""
        J = self.J.flatten(1, -2)
        return torch.einsum("iap,iab,ibq->pq", J, self.W(o, sigma), J)


def problem(net: nn.Module, X: Tensor, Y: Tensor, likelihood: str, model="linear", noise_shape=()) -> Problem:
    """With model "linear" h = Jθ, with "affine" h = f + J(θ − θ̃)."""
    f, J = jacobian(net, X)
    theta = torch.cat([p.detach().flatten() for p in net.parameters() if p.requires_grad])
    c = {"linear": torch.zeros_like(f), "affine": f - J @ theta}[model]
    return Problem(J, f, c, Y, theta, LOSSES[likelihood], noise_shape if likelihood == "gaussian" else (0,))


# --- the prior: Λⱼ = λ_{k(j)} tⱼ


@dataclass(frozen=True)
class Prior:
    """Which precision each weight has, and the scale it has it on."""

    group: Tensor  # k(j) [P]
    scale: Tensor  # tⱼ [P]

    @property
    def size(self) -> int:
        return int(self.group.max()) + 1

    def precision(self, lambdas: Tensor) -> Tensor:
        return lambdas[self.group] * self.scale

    def sums(self, per_weight: Tensor) -> Tensor:
        """From [P] to [G]."""
        return per_weight.new_zeros(self.size).index_add(0, self.group, per_weight)


def grouped(net: nn.Module, key: Callable[[str], object]) -> Prior:
    """Weights whose parameter names have one key share a group, in order of appearance; t = 1."""
    named = [(key(name), p.numel()) for name, p in net.named_parameters() if p.requires_grad]
    number = {k: i for i, k in enumerate(dict.fromkeys(k for k, _ in named))}
    group = torch.cat([torch.full([count], number[k]) for k, count in named])
    return Prior(group, torch.ones(len(group), dtype=torch.float64))


def g_prior(p: Problem, prior: Prior, sigma: Tensor) -> Prior:
    """t_g = tr(H_g)/d_g; σ = 1 makes it the trace of S."""
    H = p.H(p.f, sigma)
    return Prior(prior.group, (prior.sums(H.diagonal()) / prior.sums(torch.ones_like(p.theta)))[prior.group])


# --- the objective


def whitened(H: Tensor, Lambda: Tensor) -> Tensor:
    """I + Λ^-½ H Λ^-½, whose determinant is that of I + Λ⁻¹H."""
    return torch.eye(len(H), dtype=H.dtype) + Lambda.rsqrt()[:, None] * H * Lambda.rsqrt()


def half_log_det(H: Tensor, Lambda: Tensor) -> Tensor:
    return torch.linalg.cholesky(whitened(H, Lambda)).diagonal().log().sum()


def regularised_loss(p: Problem, theta: Tensor, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """L_h(θ) + ½‖θ‖²_Λ."""
    return p.total_loss(p.outputs(theta), sigma) + 0.5 * (Lambda * theta**2).sum()


def objective(p: Problem, theta: Tensor, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """F(θ, Λ, σ) = L_h(θ) + ½‖θ‖²_Λ + ½ log det(I + Λ⁻¹H): J and W(θ̃) frozen, H = S/σ² moves with σ."""
    return regularised_loss(p, theta, Lambda, sigma) + half_log_det(p.H(p.f, sigma), Lambda)


def log_evidence(p: Problem, theta: Tensor, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """−F, but with W at the outputs h(θ), not at f(θ̃, x); the Gaussian likelihood knows no difference."""
    return -regularised_loss(p, theta, Lambda, sigma) - half_log_det(p.H(p.outputs(theta), sigma), Lambda)


# --- its minima: first the weights, then (Λ, σ)


def trained(p: Problem, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """θ̃ in place of θ⋆: in the affine model, where h(θ̃) = f, this is the naive method."""
    return p.theta


def theta_star(p: Problem, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """The minimum of the regularised loss by damped Newton, to a gradient 1e-12 of that at zero."""

    def loss(theta: Tensor) -> Tensor:
        return regularised_loss(p, theta, Lambda, sigma)

    theta = torch.zeros_like(p.theta)
    tolerance = 1e-12 * max(1.0, grad(loss)(theta).norm())
    for _ in range(100):
        gradient = grad(loss)(theta)
        if gradient.norm() <= tolerance:
            return theta
        curvature = whitened(p.H(p.outputs(theta), sigma), Lambda)
        step = -Lambda.rsqrt() * torch.linalg.solve(curvature, Lambda.rsqrt() * gradient)
        decrement = -(gradient @ step)
        # Below 1e-8 Newton converges quadratically, and rounding would spoil the comparison of losses.
        while decrement > 1e-8 and not loss(theta + step) < loss(theta) - 1e-4 * decrement:
            step, decrement = step / 2, decrement / 2
        theta = theta + step
    raise ArithmeticError(f"gradient {gradient.norm():.1e} after 100 Newton steps, wanted {tolerance:.1e}")


def profile(p: Problem, Lambda: Tensor, sigma: Tensor, weights=theta_star) -> Tensor:
    """F(Λ, σ) = F(θ⋆(Λ, σ), Λ, σ). By the envelope theorem θ⋆ may be held fixed in its gradient."""
    return objective(p, weights(p, Lambda.detach(), sigma.detach()), Lambda, sigma)


class Optimum(NamedTuple):
    lambdas: Tensor  # λ [G]
    precision: Tensor  # Λ [P]
    sigma: Tensor  # noise_shape
    theta: Tensor  # [P]
    objective: float  # F
    gradient: Tensor  # of F in (log λ, log σ²): zero, but for what ended at a bound


def optimum(p: Problem, prior: Prior, sigma=None, weights=theta_star, start=None, bound=23.0) -> Optimum:
    """A local minimum of F(Λ, σ) in z = (log λ, log σ²), |z| ≤ bound; σ is learnt unless given.

    It starts at the best common λ of a grid, with the noise of the network's residuals: from far away L-BFGS
    may leap to λ → ∞, where F is flat. A root of the gradient ends it, more exact than F can be compared.
    """

    def unpack(z: Tensor) -> tuple[Tensor, Tensor]:
        noise = (z[prior.size :] / 2).exp().reshape(p.noise_shape) if sigma is None else sigma
        return prior.precision(z[: prior.size].exp()), noise

    def value_and_gradient(z: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(z.clip(-bound, bound), requires_grad=True)
        F = profile(p, *unpack(leaf), weights)
        return F.item(), torch.autograd.grad(F, leaf)[0].numpy()

    def stationarity(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(z) < bound, value_and_gradient(x)[1], x - z)

    if start is None:
        learnt = sigma is None and p.noise_shape != (0,)
        noise = by_noise(p, (p.Y - p.f) ** 2).log().flatten() if learnt else []
        grid = [np.r_[np.full(prior.size, x), noise] for x in np.arange(-8.0, 14.0, 2.0)]
        start = min(grid, key=lambda z: value_and_gradient(z)[0])
    options = {"ftol": 0.0, "gtol": 1e-8, "maxiter": 1000}
    how = {"method": "L-BFGS-B", "jac": True, "bounds": [(-bound, bound)] * len(start), "options": options}
    z = scipy.optimize.minimize(value_and_gradient, start, **how).x
    root = scipy.optimize.root(stationarity, z, tol=1e-14).x
    z = min(z, root, key=lambda x: np.abs(stationarity(x)).max()).clip(-bound, bound)
    F, gradient = value_and_gradient(z)
    z = torch.tensor(z)
    Lambda, noise = unpack(z)
    return Optimum(z[: prior.size].exp(), Lambda, noise, weights(p, Lambda, noise), F, torch.tensor(gradient))


# --- what follows from (Λ, σ)


def covariance(p: Problem, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """Σ = (H + Λ)⁻¹ [P, P]."""
    return torch.linalg.inv(p.H(p.f, sigma) + Lambda.diag())


def effective_dimensions(p: Problem, prior: Prior, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """γ_g = tr_g(ΣH) [G]."""
    return prior.sums((covariance(p, Lambda, sigma) @ p.H(p.f, sigma)).diagonal())


def predictive_covariance(J: Tensor, Sigma: Tensor) -> Tensor:
    """JΣJᵀ [n, m, m] for J [n, *c, P]."""
    return J.flatten(1, -2) @ Sigma @ J.flatten(1, -2).mT


def predictive_variance(J: Tensor, Sigma: Tensor) -> Tensor:
    """The diagonal of JΣJᵀ [n, *c]."""
    return torch.einsum("...p,pq,...q->...", J, Sigma, J)


def probit(likelihood: str, f: Tensor, v: Tensor) -> Tensor:
    """Mean-field probit, link(f / √(1 + πv/8)), for f and its variance v [n, *c]."""
    scaled = f / (1 + math.pi / 8 * v).sqrt()
    return scaled.softmax(1) if likelihood == "categorical" else scaled.sigmoid()


def gp_log_density(p: Problem, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """log N(y; c, σ²I + JΛ⁻¹Jᵀ), jointly over every output of every example."""
    J = p.J.flatten(0, -2)
    noise = (sigma**2).expand(p.f.shape).flatten().diag()
    return MultivariateNormal(p.c.flatten(), noise + (J / Lambda) @ J.T).log_prob(p.Y.flatten())


# --- the noise of mean="network"


def by_noise(p: Problem, v: Tensor) -> Tensor:
    """The mean of v [n, *c] over the N numbers that share one σ."""
    return v.sum(0).sum_to_size(p.noise_shape) * math.prod(p.noise_shape) / v.numel()


def network_noise(p: Problem, theta: Tensor, sigma: Tensor) -> Tensor:
    """σ_f² = σ² + max(0, RSS_f − RSS_h)/N at the optimum of the evidence."""
    excess = by_noise(p, (p.Y - p.f) ** 2) - by_noise(p, (p.Y - p.outputs(theta)) ** 2)
    return (sigma**2 + excess.clamp_min(0)).sqrt()


def network_noise_off_optimum(p: Problem, Lambda: Tensor, sigma: Tensor) -> Tensor:
    """σ_f² = (RSS_f + σ²γ)/N where σ is given or clamped; σ²γ sums the predictive variances of the data."""
    return by_noise(p, (p.Y - p.f) ** 2 + predictive_variance(p.J, covariance(p, Lambda, sigma))).sqrt()
