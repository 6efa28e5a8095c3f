"""A worker whose shadow can be ended and started again, with a planted fault; for `worker_cls`."""

import os

from mrv2_diff.drivers.faulty_shadow import FAULT_VAR
from mrv2_diff.shadow.worker import ShadowWorker, refusal

_FAULTY = "mrv2_diff.drivers.faulty_shadow"


class FaultyShadowWorker(ShadowWorker):
    """The real worker beside the real shadow, until another one is asked for."""

    def mrv2_shadow_restart(self, environ: dict[str, str]) -> None:
        """End the shadow and start another, whose counters begin at 0 (an RPC).

        Args:
            environ: Variables to set before. Where `MRV2_DIFF_FAULT` is not empty, the shadow has
                that fault.
        """
        assert self._desk is not None
        self._desk.close()
        os.environ.update(environ)
        self.shadow_child = _FAULTY if os.environ.get(FAULT_VAR) else ShadowWorker.shadow_child
        self._desk = self._open_desk()
        self._desk.start(self._start_message(), refusal)
