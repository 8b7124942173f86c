"""Every exception and warning of linlap.

    LinlapError
    ├── InputError (ValueError)            an argument or the data break a rule
    │   ├── DataError                      empty, one-shot, not finite, unreadable batches
    │   ├── TargetError                    targets the likelihood cannot have produced
    │   └── ShapeError                     shapes that do not belong together
    ├── NetworkError (ValueError)          the network cannot be linearised as it is
    │   ├── RandomNetworkError             two evaluations differ although the network is in eval mode
    │   ├── BatchDependentError            one row's output depends on the other rows
    │   ├── NotFiniteError                 the network's outputs are NaN or infinite
    │   └── NothingToLearnError            no weight is left to get a posterior
    ├── NotPositiveDefiniteError           a matrix that must be positive definite is not
    ├── ConformanceError (AssertionError)  a structure of the curvature of one's own breaks an identity
    ├── MissingExtraError (ImportError)    an optional dependency is not installed
    └── FileError (OSError)                a saved posterior cannot be used
        ├── CorruptFileError               truncated, altered, or not ours
        ├── SchemaError                    written by a newer linlap
        └── WeightsMismatchError           belongs to another network

Every message says the rule, what came, and what to do.
"""


class LinlapError(Exception):
    """Base of all errors raised by linlap."""


class InputError(LinlapError, ValueError):
    """An argument breaks a rule."""


class DataError(InputError):
    """The data cannot be used."""


class TargetError(InputError):
    """The targets do not fit the likelihood."""


class ShapeError(InputError):
    """Shapes do not belong together."""


class NetworkError(LinlapError, ValueError):
    """The network cannot be linearised as it is."""


class RandomNetworkError(NetworkError):
    """The network is still random in eval mode."""


class BatchDependentError(NetworkError):
    """The output for one example depends on the other rows of the batch."""


class NotFiniteError(NetworkError):
    """The network's outputs are not finite."""


class NothingToLearnError(NetworkError):
    """No weight is left to get a posterior."""


class NotPositiveDefiniteError(LinlapError, ArithmeticError):
    """A matrix that must be positive definite is not."""


class ConformanceError(LinlapError, AssertionError):
    """A structure of the curvature breaks an identity of the interface."""


class MissingExtraError(LinlapError, ImportError):
    """An optional dependency is not installed."""


class FileError(LinlapError, OSError):
    """A saved posterior cannot be used."""


class CorruptFileError(FileError):
    """The file is truncated, altered, or not a saved posterior."""


class SchemaError(FileError):
    """The file was written by a newer linlap."""


class WeightsMismatchError(FileError):
    """The file belongs to a network with other weights."""


class LinlapWarning(UserWarning):
    """Base of all warnings issued by linlap."""


class ConvergenceWarning(LinlapWarning):
    """An optimum was not reached to the stated tolerance."""


class InvarianceWarning(LinlapWarning):
    """The prior depends on the arbitrary scale of normalised weights."""


class DataWarning(LinlapWarning):
    """Two passes over the data differ, or the data were used in a way worth knowing."""


class EvidenceWarning(LinlapWarning):
    """The model evidence is to be read with care."""


class NumericsWarning(LinlapWarning):
    """Numerical trouble was repaired, and said so."""
