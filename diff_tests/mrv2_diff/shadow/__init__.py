"""`MRV2_RUNNER=shadow`: V1 serves, and MRV2 follows a sample of the requests beside it.

One side is in the worker's process (`worker`, `desk`, `slices`, `counters`). The other is a process
of its own (`child`, `build`, `follower`, `draws`), so that nothing that goes wrong there reaches
the one that serves.
"""
