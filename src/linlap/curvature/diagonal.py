"""The diagonal of H: the floor, for any network, without the Jacobian of an example."""

from torch import Tensor

from linlap.curvature import rotated
from linlap.curvature.base import Cost, Restored, Structure
from linlap.features import Linearised
from linlap.problem import Problem
from linlap.uses.coverage import Shape, Understood


class Diagonal(Structure):
    """The choice of the diagonal."""

    name = "diagonal"

    def of(self, problem: Problem, outputs: Tensor) -> rotated.RotatedCurvature:
        """Squares of gradients."""
        return rotated.build(problem, outputs, plan)

    def restored(self, tensors: dict[str, Tensor], linearised: Linearised, setting: Restored) -> rotated.RotatedFactor:  # noqa: ARG002
        """From its numbers."""
        return rotated.restored(tensors, setting.prior, setting.noise_precision)

    def cost(self, examples: int, outputs: int, weights: int, precisions: int) -> Cost:  # noqa: ARG002
        """A backward pass for each output."""
        return Cost(6.0 * examples * outputs * weights, 12 * 8 * weights)


def plan(row: Shape, seen: Understood | None) -> tuple[str, Shape]:
    """No basis but the identity."""
    return "diagonal", row if seen is None else seen.shape
