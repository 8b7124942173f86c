"""What the library costs, as ratios to what the machine itself can do in the same run."""
