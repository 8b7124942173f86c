"""The experiments of Antorán et al. (ICML 2022), beside the library: run with ``python -m experiments``."""
