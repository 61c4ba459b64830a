"""Measures how busy multiprocessors and tensor cores are, with the driver's GPM metrics (Hopper and
newer GPUs)."""

from __future__ import annotations

from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.query import Query

_FIELDS = ("sm_active_fraction", "tensor_active_fraction")
_METRICS = (2, 5)  # share of busy multiprocessors; share of time with tensor operations
_OLDER = "only Hopper and newer GPUs report it"
_NOT_HERE = "the driver does not report it for this GPU, although this architecture has it"
_UNKNOWN_KIND = "the driver does not report it for this GPU; only Hopper and newer GPUs have it"
_HOPPER = 9  # the major number of its compute capability
_FIRST = "it needs two readings, 5 s apart"


def _supported(answer: Any) -> bool:
    return bool(answer.isSupportedDevice)


def _why_not(compute_capability: str | None) -> str:
    if compute_capability is None:
        return _UNKNOWN_KIND
    return _OLDER if int(compute_capability.partition(".")[0]) < _HOPPER else _NOT_HERE


class Gpm:
    """Compares two samples of one GPU.

    Every read takes a new sample and compares it with the last, so that no read waits.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._supported: bool | None = None
        self._samples: list[Any] = []
        self._taken = 0
        self._question: Any = None
        self._sampled = False

    def read(self, compute_capability: str | None) -> dict[str, Any]:
        """Both fractions (0-1) since the last call.

        Empty if unknown; the reason is noted. Raises GpuGone.

        `compute_capability`, for example `9.0`, is used in the reason if the driver does not
        support GPM.
        """
        if self._supported is None:
            self._supported = self._query.ask(_FIELDS, "nvmlGpmQueryDeviceSupport", convert=_supported)
            if self._supported is None and self._query.is_unsupported(_FIELDS[0]):
                self._supported = False
            elif self._supported is False:
                self._query.note(_FIELDS, _why_not(compute_capability))
        if not self._supported:
            return {}
        try:
            return self._compare()
        except pynvml.NVMLError as error:
            self._taken = 0
            self._query.failed(_FIELDS, error.value)
            if error.value in codes.NEVER_AGAIN and not self._sampled:
                self._supported = False
            return {}

    def close(self) -> None:
        """Free the samples in the driver."""
        samples, self._samples, self._taken = self._samples, [], 0
        for sample in samples:
            try:
                pynvml.nvmlGpmSampleFree(sample)
            except pynvml.NVMLError as error:
                # If the driver is gone, so is its memory. Any other error leaks a few bytes and
                # changes no value.
                if error.value in codes.GPU_GONE:
                    return

    def _compare(self) -> dict[str, Any]:
        while len(self._samples) < 2:
            self._samples.append(pynvml.nvmlGpmSampleAlloc())
        older, newer = self._samples
        pynvml.nvmlGpmSampleGet(self._query.handle, older)  # overwrite the older sample ...
        self._sampled = True
        self._samples = [newer, older]  # ... which is now the newer one
        self._taken += 1
        if self._taken < 2:
            self._query.note(_FIELDS, _FIRST)
            return {}
        if self._question is None:
            self._question = pynvml.c_nvmlGpmMetricsGet_t()
            self._question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            self._question.numMetrics = len(_METRICS)
        question = self._question
        question.sample1, question.sample2 = self._samples
        for place, metric in enumerate(_METRICS):
            question.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(question)
        return self._values(question)

    def _values(self, question: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for place, field in enumerate(_FIELDS):
            answer = question.metrics[place]
            if answer.nvmlReturn:
                self._query.note((field,), codes.words(answer.nvmlReturn))
            elif not 0 <= answer.value <= 100:
                self._query.note((field,), f"the driver reported {answer.value} %")
            else:
                self._query.clear((field,))
                values[field] = answer.value / 100
        return values
