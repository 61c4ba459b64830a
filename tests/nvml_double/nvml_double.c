/* A driver library to be scripted: enough of NVML for the official bindings and the tools built on them. The script's
 * language is in nvml_script.c. Here: starting, handles, and functions that give one value of one GPU.
 */
#include "nvml_double.h"

int nvmlInitWithFlags(unsigned flags) {
    static int slot = -1;
    (void)flags;
    int code = enter(&slot, __func__, NULL);
    if (code == UNINITIALIZED) code = OK;
    if (!code) code = init_error;
    if (!code) __atomic_add_fetch(&initialised, 1, __ATOMIC_SEQ_CST);
    return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { ENTER(NULL); __atomic_sub_fetch(&initialised, 1, __ATOMIC_SEQ_CST); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "scripted error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { ENTER(NULL); snprintf(text, size, "%s", driver); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { ENTER(NULL); *version = cuda; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { ENTER(NULL); *version = cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(NULL); *count = (unsigned)gpu_count; return OK; }

static int found(const char *function, struct gpu *g, struct gpu **device) {
    *device = g;
    return rule_for(function, g, g->error);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **device) {
    ENTER(NULL);
    return (int)index >= gpu_count ? INVALID : found(__func__, &gpus[index], device);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **device) {
    ENTER(NULL);
    for (int i = 0; i < gpu_count; i++) {
        if (!strcmp(gpus[i].uuid, uuid)) return found(__func__, &gpus[i], device);
        for (int m = 0; m < MIGS; m++)
            if (children[i][m].present && !strcmp(children[i][m].uuid, uuid)) return found(__func__, &children[i][m], device);
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, struct gpu **device) {
    ENTER(NULL);
    for (int i = 0; i < gpu_count; i++) if (!strcasecmp(gpus[i].bus, bus)) return found(__func__, &gpus[i], device);
    return NOT_FOUND;
}

#define TEXT(function, what) \
    int function(struct gpu *g, char *text, unsigned size) { ENTER(g); snprintf(text, size, "%s", what); return OK; }
TEXT(nvmlDeviceGetName, g->name)
TEXT(nvmlDeviceGetUUID, g->uuid)
TEXT(nvmlDeviceGetSerial, "1650522003820")
int nvmlDeviceGetIndex(struct gpu *g, unsigned *index) {
    ENTER(g);
    *index = (unsigned)(g->parent < 0 ? g - gpus : g->position);
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
int nvmlDeviceGetPciInfo_v3(struct gpu *g, struct pci *pci) {
    ENTER(g);
    memset(pci, 0, sizeof *pci);
    sscanf(g->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->legacy, sizeof pci->legacy, "%.15s", g->bus + 4);
    snprintf(pci->text, sizeof pci->text, "%.31s", g->bus);
    pci->id = 0x233010de;
    return OK;
}

int nvmlDeviceGetMemoryInfo(struct gpu *g, u64 *info) {
    ENTER(g);
    if (value(g, "integrated")) return NOT_SUPPORTED;
    info[0] = value(g, "total");
    info[1] = info[0] - value(g, "used") - value(g, "reserved");
    info[2] = value(g, "used") + value(g, "reserved"); /* version 1 counts the reserve as used */
    return OK;
}
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct gpu *g, struct memory_v2 *info) {
    ENTER(g);
    if (value(g, "integrated") && !known(g, "total")) return NOT_SUPPORTED;
    if (info->version != 0x02000028) return 25;
    info->total = value(g, "total");
    info->reserved = value(g, "reserved");
    info->used = value(g, "used");
    info->free = info->total - info->used - info->reserved;
    return OK;
}
int nvmlDeviceGetBAR1MemoryInfo(struct gpu *g, u64 *info) {
    ENTER(g);
    if (value(g, "integrated")) return NOT_SUPPORTED;
    info[0] = value(g, "bar1_total");
    info[2] = value(g, "bar1_used");
    info[1] = info[0] - info[2];
    return OK;
}

/* The driver reports no utilisation and no sensors for MIG instances, and no utilisation for a GPU with instances. */
#define WHOLE(g) do { if ((g)->parent >= 0) return NOT_SUPPORTED; } while (0)
#define UNCUT(g) do { if ((g)->parent >= 0 || value(g, "mig")) return NOT_SUPPORTED; } while (0)
int nvmlDeviceGetUtilizationRates(struct gpu *g, unsigned *rates) {
    ENTER(g);
    UNCUT(g);
    rates[0] = (unsigned)value(g, "util");
    rates[1] = (unsigned)value(g, "memory_util");
    return OK;
}
#define UTILIZATION(function, key) int function(struct gpu *g, unsigned *percent, unsigned *period) { \
    ENTER(g); UNCUT(g); *percent = (unsigned)value(g, key); *period = 166666; return OK; }
UTILIZATION(nvmlDeviceGetEncoderUtilization, "encoder")
UTILIZATION(nvmlDeviceGetDecoderUtilization, "decoder")

#define NUMBER(function, key) int function(struct gpu *g, unsigned *number) { \
    ENTER(g); WHOLE(g); *number = (unsigned)value(g, key); return OK; }
NUMBER(nvmlDeviceGetPowerUsage, "power")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "limit")
NUMBER(nvmlDeviceGetPowerManagementLimit, "limit")
NUMBER(nvmlDeviceGetFanSpeed, "fan")
NUMBER(nvmlDeviceGetPerformanceState, "pstate")
int nvmlDeviceGetMinorNumber(struct gpu *g, unsigned *number) {
    ENTER(g);
    WHOLE(g);
    *number = known(g, "device_minor") ? (unsigned)value(g, "device_minor") : (unsigned)(g - gpus);
    return OK;
}
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_gen_limit")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_limit")
NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
NUMBER(nvmlDeviceGetDisplayMode, "display_connected")
NUMBER(nvmlDeviceGetDisplayActive, "display_active")
int nvmlDeviceGetMemoryBusWidth(struct gpu *g, unsigned *bits) {
    ENTER(g);
    if (value(g, "integrated")) return NOT_SUPPORTED;
    *bits = (unsigned)value(g, "bus_width");
    return OK;
}
int nvmlDeviceGetTemperature(struct gpu *g, int sensor, unsigned *celsius) {
    (void)sensor;
    ENTER(g);
    WHOLE(g);
    *celsius = (unsigned)value(g, "temp");
    return OK;
}
struct temperature { unsigned version, sensor; int celsius; };
int nvmlDeviceGetTemperatureV(struct gpu *g, struct temperature *temperature) {
    ENTER(g);
    WHOLE(g);
    temperature->celsius = (int)value(g, "temp");
    return OK;
}
int nvmlDeviceGetTemperatureThreshold(struct gpu *g, unsigned which, unsigned *celsius) {
    ENTER(g);
    if (which != 1) return NOT_SUPPORTED;
    *celsius = (unsigned)value(g, "slowdown");
    return OK;
}
static int clock_of(struct gpu *g, unsigned type, const char *sm, const char *memory, unsigned *megahertz) {
    if (g->parent >= 0 || (type == 2 && value(g, "integrated"))) return NOT_SUPPORTED;
    *megahertz = (unsigned)value(g, type == 2 ? memory : sm);
    return OK;
}
int nvmlDeviceGetClockInfo(struct gpu *g, unsigned type, unsigned *megahertz) {
    ENTER(g);
    return clock_of(g, type, "sm_clock", "memory_clock", megahertz);
}
int nvmlDeviceGetMaxClockInfo(struct gpu *g, unsigned type, unsigned *megahertz) {
    ENTER(g);
    return clock_of(g, type, "sm_limit", "memory_limit", megahertz);
}
int nvmlDeviceGetCurrentClocksEventReasons(struct gpu *g, u64 *mask) { ENTER(g); WHOLE(g); *mask = value(g, "throttle"); return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *g, u64 *mask) { ENTER(g); WHOLE(g); *mask = value(g, "throttle"); return OK; }
int nvmlDeviceGetTotalEnergyConsumption(struct gpu *g, u64 *millijoules) { ENTER(g); WHOLE(g); *millijoules = value(g, "energy"); return OK; }
int nvmlDeviceGetCudaComputeCapability(struct gpu *g, int *major, int *minor) {
    ENTER(g);
    *major = (int)value(g, "major");
    *minor = (int)value(g, "minor");
    return OK;
}
int nvmlDeviceGetEccMode(struct gpu *g, unsigned *current, unsigned *pending) {
    ENTER(g);
    WHOLE(g);
    *current = *pending = (unsigned)value(g, "ecc");
    return OK;
}
int nvmlDeviceGetTotalEccErrors(struct gpu *g, unsigned type, unsigned counter, u64 *count) {
    ENTER(g);
    WHOLE(g);
    if (!value(g, "ecc") || counter != 0) return NOT_SUPPORTED;
    *count = value(g, type ? "ecc_uncorrected" : "ecc_corrected");
    return OK;
}
int nvmlDeviceGetDriverModel_v2(struct gpu *g, unsigned *current, unsigned *pending) {
    (void)current, (void)pending;
    ENTER(g);
    return NOT_SUPPORTED; /* Windows only */
}
int nvmlDeviceGetDriverModel(struct gpu *g, unsigned *current, unsigned *pending) {
    return nvmlDeviceGetDriverModel_v2(g, current, pending);
}
int nvmlDeviceGetPcieThroughput(struct gpu *g, unsigned counter, unsigned *kilobytes) {
    ENTER(g);
    WHOLE(g);
    *kilobytes = (unsigned)value(g, counter == 0 ? "pcie_tx" : "pcie_rx");
    return OK;
}
