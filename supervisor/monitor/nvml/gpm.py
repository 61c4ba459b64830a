"""How busy the multiprocessors and the tensor cores were between two looks: the driver's GPM, on Hopper and newer."""

from __future__ import annotations

from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.ask import Asker

_FIELDS = ("sm_active_fraction", "tensor_active_fraction")
_METRICS = (2, 5)  # share of busy multiprocessors; share of time with any tensor operation
_OLDER = "only GPUs from Hopper on tell it"
_NOT_HERE = "the driver does not offer it for this GPU, although its kind has it"
_UNKNOWN_KIND = "the driver does not offer it for this GPU; only GPUs from Hopper on have it"
_HOPPER = 9  # the major number of its compute capability
_FIRST = "known from the second look on, 5 s later"


def _supported(answer: Any) -> bool:
    return bool(answer.isSupportedDevice)


def _why_not(compute_capability: str | None) -> str:
    if compute_capability is None:
        return _UNKNOWN_KIND
    return _OLDER if int(compute_capability.partition(".")[0]) < _HOPPER else _NOT_HERE


class Gpm:
    """Two samples of one GPU in turn: every look takes a new one and compares it with the last, so nothing waits."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._supported: bool | None = None
        self._samples: list[Any] = []
        self._taken = 0
        self._question: Any = None
        self._sampled = False

    def read(self, compute_capability: str | None) -> dict[str, Any]:
        """Both fractions (0-1) since the last call, or nothing with the reason noted. Raises GpuGone.

        `compute_capability` (as `9.0`) is for the reason where the driver does not offer them.
        """
        if self._supported is None:
            self._supported = self._asker.ask(_FIELDS, "nvmlGpmQueryDeviceSupport", convert=_supported)
            if self._supported is None and self._asker.never(_FIELDS[0]):
                self._supported = False
            elif self._supported is False:
                self._asker.note(_FIELDS, _why_not(compute_capability))
        if not self._supported:
            return {}
        try:
            return self._compare()
        except pynvml.NVMLError as error:
            self._taken = 0
            self._asker.failed(_FIELDS, error.value)
            if error.value in codes.NEVER_AGAIN and not self._sampled:
                self._supported = False
            return {}

    def close(self) -> None:
        """Free the samples."""
        samples, self._samples, self._taken = self._samples, [], 0
        for sample in samples:
            try:
                pynvml.nvmlGpmSampleFree(sample)
            except pynvml.NVMLError as error:
                # With the driver gone its memory is gone too; any other refusal loses some bytes and no value.
                if error.value in codes.GPU_GONE:
                    return

    def _compare(self) -> dict[str, Any]:
        while len(self._samples) < 2:
            self._samples.append(pynvml.nvmlGpmSampleAlloc())
        older, newer = self._samples
        pynvml.nvmlGpmSampleGet(self._asker.handle, older)  # the oldest is written over ...
        self._sampled = True
        self._samples = [newer, older]  # ... and is the newest from here on
        self._taken += 1
        if self._taken < 2:
            self._asker.note(_FIELDS, _FIRST)
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
                self._asker.note((field,), codes.words(answer.nvmlReturn))
            elif not 0 <= answer.value <= 100:
                self._asker.note((field,), f"the driver reported {answer.value} %")
            else:
                self._asker.clear((field,))
                values[field] = answer.value / 100
        return values
