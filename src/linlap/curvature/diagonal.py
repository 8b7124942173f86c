"""The diagonal of H: the floor, for any network, without the Jacobian of an example."""

from linlap.curvature.base import Cost
from linlap.curvature.rotated import Rotated
from linlap.uses.coverage import Shape, Understood


class Diagonal(Rotated):
    """The choice of the diagonal."""

    name = "diagonal"

    def plan(self, row: Shape, seen: Understood | None) -> tuple[str, Shape]:
        """No basis but the identity."""
        return "diagonal", row if seen is None else seen.shape

    def cost(self, examples: int, outputs: int, weights: int, precisions: int) -> Cost:  # noqa: ARG002
        """A backward pass for each output."""
        return Cost(6.0 * examples * outputs * weights, 12 * 8 * weights)
