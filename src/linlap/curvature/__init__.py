"""The one open axis: structures of the curvature H, one file each, all with the interface of `base`."""
