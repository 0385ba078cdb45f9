"""The real scheduler under a workload, in virtual time: what users would see, on hardware that need not be there."""
