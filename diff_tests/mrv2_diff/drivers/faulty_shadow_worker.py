"""A worker whose shadow has a planted fault, for `worker_cls`."""

from mrv2_diff.shadow.worker import ShadowWorker


class FaultyShadowWorker(ShadowWorker):
    """The real worker beside a faulty shadow."""

    shadow_child = "mrv2_diff.drivers.faulty_shadow"
