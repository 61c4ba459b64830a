"""Every value of one GPU, in groups."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.language import verbatim
from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.nvml.rates import PCIE_NOT_WANTED
from memtop.supervisor.monitor.values import GpuSample
from memtop.tui.bars import banded
from memtop.tui.line import MUTED, STRONG, Line, dimmed, fit, join, line, width_of, wrap
from memtop.tui.machine.facts import LABEL, FactGroup, Group, column_width, flow, laid_out, number, share, size, yes
from memtop.tui.machine.gpu import cuda_name, driver_silence, trouble_words
from memtop.tui.machine.vram import all_parts, mig_row, vram_bar
from memtop.tui.store import Store, step_peak

_WARM_BELOW_SLOWDOWN = 5.0
"""The temperature is marked from this many degrees below the slowdown threshold."""

_NOT_RECORDED = "not recorded: nobody looked at the GPU's details"


def draw_gpu_details(store: Store, gpu: GpuSample, width: int) -> list[Line]:
    """All lines; the screen scrolls."""
    each = column_width(width)
    if gpu.error:
        # Only its identity and its troubles are known.
        lines = laid_out([_troubles(store, gpu, each), _identity(store, gpu, each)], width)
        return [line(("!! cannot be read", "danger")), *wrap(gpu.error, width), (), *lines]
    groups = [
        _memory(store, gpu, each),
        _mig(gpu, each),
        _load(gpu, each),
        _clocks(gpu, each),
        _heat(gpu, each),
        _health(store, gpu, each),
        _link(store, gpu, each),
        _card(store, gpu, each),
    ]
    lines = laid_out(groups, width)
    old = driver_silence(store)
    if old:
        lines = [line((f"! {old}: these are the last known values", "edge")), *dimmed(lines)]
    return [_head(store, gpu, width), (), *lines]


def _head(store: Store, gpu: GpuSample, width: int) -> Line:
    tail = line("  ", *banded(gpu.used_fraction, gpu.band))
    return fit((*vram_bar(store, gpu, width - width_of(tail)), *tail), width)


def _memory(store: Store, gpu: GpuSample, width: int) -> Group:
    facts = FactGroup("GPU memory", width, gpu.unknown, gpu.details.unknown)
    total = units.gib(gpu.total_bytes)
    used = None if gpu.taken_bytes is None else f"{units.gib(gpu.taken_bytes)} of {total} GiB"
    facts.add("used", used, "used_bytes")
    if gpu.unified:
        facts.add_text("unified: GPU and machine share one pool of memory", MUTED)
    for part in all_parts(store, gpu):
        label = join((line(("  ", MUTED), (part.glyph, part.role)), line((part.word, MUTED))), " ")
        pad = " " * max(1, LABEL - width_of(label))
        facts.add_line((*label, (pad, MUTED), (units.size(part.size), STRONG if part.role != "gone" else "edge")))
    facts.add("free", size(gpu.free_bytes), "free_bytes")
    facts.add("highest seen", size(store.gpu_peak_bytes.get(gpu_key(gpu))))
    if store.run is not None:
        facts.add("peak of last step", size(step_peak(store, gpu)))
    window = gpu.details.bar1_used_bytes
    bar1 = None if window is None else f"{units.size(window)} of {units.size(gpu.details.bar1_total_bytes)}"
    facts.add("BAR1 window", bar1, "bar1_used_bytes")
    return facts.group()


def _mig(gpu: GpuSample, width: int) -> Group:
    facts = FactGroup("MIG instances", width)
    for instance in gpu.mig:
        facts.add_line(mig_row(instance, width))
        if instance.error:
            facts.add_text(instance.error, "bad")
    return facts.group()


def _load(gpu: GpuSample, width: int) -> Group:
    details = gpu.details
    facts = FactGroup("Load", width, gpu.unknown, details.unknown)
    facts.add("utilisation", share(gpu.utilization_fraction), "utilization_fraction")
    facts.add("memory bandwidth", share(gpu.memory_utilization_fraction), "memory_utilization_fraction")
    facts.add("SMs active", share(details.sm_active_fraction), "sm_active_fraction")
    facts.add("tensor cores", share(details.tensor_active_fraction), "tensor_active_fraction")
    facts.add("encoder", share(details.encoder_fraction), "encoder_fraction")
    facts.add("decoder", share(details.decoder_fraction), "decoder_fraction")
    return facts.group()


def _clocks(gpu: GpuSample, width: int) -> Group:
    details = gpu.details
    facts = FactGroup("Clocks", width, details.unknown)
    facts.add("SM", _of(details.sm_clock_megahertz, details.sm_clock_limit_megahertz, "MHz"), "sm_clock_megahertz")
    facts.add(
        "GPU memory", _of(details.memory_clock_megahertz, details.memory_clock_limit_megahertz, "MHz"), "memory_clock_megahertz"
    )
    facts.add("performance state", details.performance_state, "performance_state")
    reasons = details.throttle_reasons
    held = None if reasons is None else ", ".join(reasons) or "nothing"
    facts.add("held down by", held, "throttle_reasons", role="edge" if reasons else STRONG)
    return facts.group()


def _of(value: float | None, limit: float | None, unit: str) -> str | None:
    """`1650 of 2100 MHz`."""
    if value is None:
        return None
    return f"{value:.0f} {unit}" if limit is None else f"{value:.0f} of {limit:.0f} {unit}"


def _heat(gpu: GpuSample, width: int) -> Group:
    details = gpu.details
    facts = FactGroup("Heat and power", width, gpu.unknown, details.unknown)
    core, slow = gpu.temperature_celsius, details.slowdown_temperature_celsius
    warm = core is not None and slow is not None and core >= slow - _WARM_BELOW_SLOWDOWN
    words = number(core, "°C")
    if words is not None and slow is not None:
        words = f"{words}, slows down at {slow:.0f} °C"
    facts.add("temperature", words, "temperature_celsius", role="edge" if warm else STRONG)
    facts.add("memory temperature", number(details.memory_temperature_celsius, "°C"), "memory_temperature_celsius")
    facts.add("fan", share(details.fan_fraction), "fan_fraction")
    facts.add("power", _of(gpu.power_watts, gpu.power_limit_watts, "W"), "power_watts")
    energy = None if details.energy_joules is None else f"{details.energy_joules / 3.6e6:.2f} kWh since the driver was loaded"
    facts.add("energy", energy, "energy_joules")
    return facts.group()


def _health(store: Store, gpu: GpuSample, width: int) -> Group:
    details = gpu.details
    facts = FactGroup("Health", width, gpu.unknown, details.unknown)
    facts.add("ECC", details.ecc_mode, "ecc_mode")
    for label, value, field in (
        ("corrected errors", details.ecc_corrected_errors, "ecc_corrected_errors"),
        ("uncorrected errors", details.ecc_uncorrected_errors, "ecc_uncorrected_errors"),
        ("retired pages", details.retired_pages, "retired_pages"),
    ):
        bad = bool(value) and field != "ecc_corrected_errors"
        facts.add(label, None if value is None else units.count(value), field, role="edge" if bad else STRONG)
    facts.add("remapped rows", _remapped(gpu), "remapped_rows_correctable")
    facts.add("remapping pending", yes(details.remapping_pending), "remapping_pending", role=_alarm(details.remapping_pending))
    facts.add("remapping failed", yes(details.remapping_failed), "remapping_failed", role=_alarm(details.remapping_failed))
    if details.recovery_action is None and "recovery_action" not in details.unknown:
        facts.add("recovery action", "none")
    else:
        facts.add("recovery action", details.recovery_action, "recovery_action", role="bad")
    _add_troubles(facts, store, gpu)
    return facts.group()


def _troubles(store: Store, gpu: GpuSample, width: int) -> Group:
    facts = FactGroup("Troubles", width)
    _add_troubles(facts, store, gpu)
    return facts.group()


def _add_troubles(facts: FactGroup, store: Store, gpu: GpuSample) -> None:
    if not gpu.troubles:
        facts.add("troubles", "none since memtop started")
    for trouble in reversed(gpu.troubles):
        text, role = trouble_words(trouble, store.now)[0]
        facts.add_text(text, role)


def _remapped(gpu: GpuSample) -> str | None:
    soft, hard = gpu.details.remapped_rows_correctable, gpu.details.remapped_rows_uncorrectable
    if soft is None and hard is None:
        return None
    return f"{units.count(soft)} for correctable, {units.count(hard)} for uncorrectable errors"


def _alarm(value: bool | None) -> str:
    return "bad" if value else STRONG


def _link(store: Store, gpu: GpuSample, width: int) -> Group:
    details = gpu.details
    unknown = details.unknown
    if store.replaying:
        unknown = {name: _NOT_RECORDED if why == PCIE_NOT_WANTED else why for name, why in unknown.items()}
    facts = FactGroup("Link", width, unknown)
    facts.add("PCIe generation", _of(details.pcie_generation, details.pcie_generation_limit, ""), "pcie_generation")
    facts.add("PCIe lanes", _of(details.pcie_width, details.pcie_width_limit, ""), "pcie_width")
    facts.add("PCIe from the GPU", flow(details.pcie_sent_bytes_per_second), "pcie_sent_bytes_per_second")
    facts.add("PCIe to the GPU", flow(details.pcie_received_bytes_per_second), "pcie_received_bytes_per_second")
    facts.add("NVLink, links up", None if details.nvlink_links is None else str(details.nvlink_links), "nvlink_links")
    if details.nvlink_links:
        facts.add("NVLink from the GPU", flow(details.nvlink_sent_bytes_per_second), "nvlink_sent_bytes_per_second")
        facts.add("NVLink to the GPU", flow(details.nvlink_received_bytes_per_second), "nvlink_received_bytes_per_second")
    return facts.group()


def _identity(store: Store, gpu: GpuSample, width: int) -> Group:
    facts = FactGroup("Card", width, gpu.unknown)
    _add_identity(facts, gpu)
    facts.add("highest VRAM seen", size(store.gpu_peak_bytes.get(gpu_key(gpu))))
    return facts.group()


def _add_identity(facts: FactGroup, gpu: GpuSample) -> None:
    facts.add("model", verbatim(gpu.name), "name")
    facts.add("UUID", verbatim(gpu.uuid), "uuid")
    facts.add("bus", verbatim(gpu.pci_bus_id), "pci_bus_id")


def _card(store: Store, gpu: GpuSample, width: int) -> Group:
    details, machine = gpu.details, store.machine
    facts = FactGroup("Card", width, gpu.unknown, details.unknown)
    _add_identity(facts, gpu)
    if gpu.visible_index is not None:
        facts.add("CUDA calls it", cuda_name(gpu) or f"cuda:{gpu.visible_index}")
    facts.add("compute capability", details.compute_capability, "compute_capability")
    facts.add("compute mode", details.compute_mode, "compute_mode")
    facts.add("persistence mode", yes(details.persistence_mode), "persistence_mode")
    facts.add("MIG mode", yes(details.mig_mode), "mig_mode")
    facts.add("display connected", yes(details.display_connected), "display_connected")
    facts.add("display active", yes(details.display_active), "display_active")
    if machine is not None:
        driver = machine.driver_version
        newest = machine.cuda_version
        facts.add("driver", driver if driver is None or newest is None else f"{driver}, CUDA up to {newest}")
    facts.add("processes", units.count(len(gpu.processes)))
    return facts.group()
