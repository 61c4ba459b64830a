/* Scripted driver library: processes, field values, MIG instances, events and GPM samples. */
#include "nvml_double.h"
#include <poll.h>
#include <sys/inotify.h>
#include <time.h>

struct process_info {
    unsigned pid;
    u64 used;
    unsigned gpu_instance, compute_instance;
#ifdef LONG_PROCESS_ROWS
    u64 protected;
#endif
};
#ifdef LONG_PROCESS_ROWS
/* Such a driver is known by having this function, and not yet nvmlDeviceGetRunningProcessDetailList. */
int nvmlDeviceGetConfComputeMemSizeInfo(struct gpu *g, void *info) { (void)info; ENTER(g); return NOT_SUPPORTED; }
#endif

static int list(struct gpu *g, char kind, unsigned *count, struct process_info *into) {
    unsigned have = 0, room = *count;
    for (int m = -1; m < (g->parent < 0 ? MIGS : 0); m++) { /* a GPU's own list holds its instances' processes too */
        struct gpu *from = m < 0 ? g : &children[g - gpus][m];
        for (int i = 0; i < from->process_count; i++) {
            struct process *p = &from->processes[i];
            if (p->kind != kind) continue;
            if (into && have < room) into[have] = (struct process_info){.pid = p->pid, .used = p->used, .gpu_instance = p->gi, .compute_instance = p->ci};
            have++;
        }
    }
    *count = have;
    return have && (!into || room < have) ? TOO_SMALL : OK;
}
#define LISTS(name, kind) \
    int name##_v3(struct gpu *g, unsigned *count, struct process_info *into) { ENTER(g); return list(g, kind, count, into); } \
    int name##_v2(struct gpu *g, unsigned *count, struct process_info *into) { ENTER(g); return list(g, kind, count, into); }
LISTS(nvmlDeviceGetComputeRunningProcesses, 'c')
LISTS(nvmlDeviceGetGraphicsRunningProcesses, 'g')
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, 'm')

struct utilization { unsigned pid; u64 stamp; unsigned sm, mem, enc, dec; };
int nvmlDeviceGetProcessUtilization(struct gpu *g, struct utilization *into, unsigned *count, u64 since) {
    ENTER(g);
    if (g->parent >= 0 || value(g, "mig")) return NOT_SUPPORTED;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned have = 0, room = *count;
    for (int i = 0; i < g->busy_count; i++) {
        struct busy *b = &g->busy[i];
        u64 stamp = b->stamp ? b->stamp : (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000;
        if (stamp <= since) continue;
        if (into && have < room) into[have] = (struct utilization){b->pid, stamp, b->sm, b->mem, b->enc, b->dec};
        have++;
    }
    *count = have;
    return !have ? NOT_FOUND : !into || room < have ? TOO_SMALL : OK;
}

struct field_value { unsigned id, scope; int64_t stamp, latency; unsigned type; int status; union { unsigned u; u64 ull; } value; };
static void fill(struct gpu *g, struct field_value *v) {
    v->status = NOT_SUPPORTED;
    for (int i = 0; i < g->field_count; i++) {
        struct field *f = &g->fields[i];
        if (f->id != v->id || f->scope != v->scope) continue;
        v->status = f->status;
        v->type = f->value >> 32 ? 3 : 1;
        v->value.ull = f->value;
    }
}
int nvmlDeviceGetFieldValues(struct gpu *g, int count, struct field_value *values) {
    ENTER(g);
    for (int i = 0; i < count; i++) fill(g, &values[i]);
    return OK;
}
int nvmlDeviceGetNvLinkState(struct gpu *g, unsigned link, unsigned *up) {
    ENTER(g);
    if (link >= value(g, "links")) return INVALID;
    *up = link < value(g, "links_up");
    return OK;
}

int nvmlDeviceGetRemappedRows(struct gpu *g, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failed) {
    ENTER(g);
    *cor = (unsigned)value(g, "remapped_cor");
    *unc = (unsigned)value(g, "remapped_unc");
    *pending = (unsigned)value(g, "remap_pending");
    *failed = (unsigned)value(g, "remap_failed");
    return OK;
}

int nvmlDeviceGetMigMode(struct gpu *g, unsigned *current, unsigned *pending) {
    ENTER(g);
    if (!known(g, "mig")) return NOT_SUPPORTED;
    *current = *pending = (unsigned)value(g, "mig");
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(struct gpu *g, unsigned *count) {
    ENTER(g);
    *count = known(g, "mig") ? (unsigned)value(g, "mig_max") : 0;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *g, unsigned index, struct gpu **device) {
    ENTER(g);
    if (g->parent >= 0 || !value(g, "mig") || index >= value(g, "mig_max")) return INVALID;
    *device = &children[g - gpus][index];
    return (*device)->present ? OK : NOT_FOUND;
}
int nvmlDeviceIsMigDeviceHandle(struct gpu *g, unsigned *is) { ENTER(g); *is = g->parent >= 0; return OK; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct gpu *g, struct gpu **device) {
    ENTER(g);
    if (g->parent < 0) return INVALID;
    *device = &gpus[g->parent];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(struct gpu *g, unsigned *id) { ENTER(g); *id = (unsigned)value(g, "gi"); return g->parent < 0 ? NOT_SUPPORTED : OK; }
int nvmlDeviceGetComputeInstanceId(struct gpu *g, unsigned *id) { ENTER(g); *id = (unsigned)value(g, "ci"); return g->parent < 0 ? NOT_SUPPORTED : OK; }

struct event_set { u64 masks[GPUS], last; int changes; };
struct event_data { struct gpu *device; u64 type, data; unsigned gpu_instance, compute_instance; };
int nvmlEventSetCreate(struct event_set **set) {
    ENTER(NULL);
    *set = calloc(1, sizeof **set);
    (*set)->changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    for (int i = 0; i < event_count; i++) if (events[i].id > (*set)->last) (*set)->last = events[i].id;
    return OK;
}
int nvmlEventSetFree(struct event_set *set) { ENTER(NULL); close(set->changes); free(set); return OK; }
int nvmlDeviceGetSupportedEventTypes(struct gpu *g, u64 *types) { ENTER(g); *types = value(g, "events"); return OK; }
int nvmlDeviceRegisterEvents(struct gpu *g, u64 types, struct event_set *set) {
    ENTER(g);
    if (g->parent >= 0) return INVALID;
    if (types & ~value(g, "events")) return NOT_SUPPORTED;
    set->masks[g - gpus] |= types;
    return OK;
}
static int next(struct event_set *set, struct event_data *data) {
    pthread_mutex_lock(&lock);
    read_script();
    int code = TIMEOUT;
    for (int i = 0; i < event_count && code; i++) {
        if (events[i].id <= set->last || !(set->masks[events[i].gpu] & events[i].type)) continue;
        set->last = events[i].id;
        *data = (struct event_data){&gpus[events[i].gpu], events[i].type, events[i].data, ~0u, ~0u};
        code = OK;
    }
    if (code) code = initialised ? rule_for("nvmlEventSetWait_v2", NULL, code) : UNINITIALIZED;
    pthread_mutex_unlock(&lock);
    return code;
}
/* Milliseconds since some moment. */
static u64 clock_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000 + (u64)now.tv_nsec / 1000000;
}
/* As with the real driver, a wait costs the program no CPU time: it sleeps until the script changes. */
int nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned milliseconds) {
    ENTER(NULL);
    const char *path = getenv("NVML_DOUBLE_SCRIPT");
    u64 until = clock_ms() + milliseconds;
    for (;;) {
        /* First the watch, then the look: no change comes in between. */
        char drained[4096];
        while (read(set->changes, drained, sizeof drained) > 0) continue;
        int watched = path && inotify_add_watch(set->changes, path, IN_MODIFY | IN_ATTRIB | IN_MOVE_SELF | IN_DELETE_SELF) >= 0;
        int code = next(set, data);
        u64 now = clock_ms();
        if (code != TIMEOUT || now >= until) return code;
        struct pollfd change = {set->changes, POLLIN, 0};
        poll(&change, 1, watched ? (int)(until - now) : 5);
    }
}

struct gpm_sample { struct gpu *g; struct timespec at; };
struct metric { unsigned id; int status; double value; const char *names[3]; };
struct metrics { unsigned version, count; struct gpm_sample *one, *two; struct metric metrics[]; };
struct support { unsigned version, supported; };
int nvmlGpmQueryDeviceSupport(struct gpu *g, struct support *support) { ENTER(g); support->supported = (unsigned)value(g, "gpm"); return OK; }
int nvmlGpmSampleAlloc(struct gpm_sample **sample) { ENTER(NULL); *sample = calloc(1, sizeof **sample); return OK; }
int nvmlGpmSampleFree(struct gpm_sample *sample) { ENTER(NULL); free(sample); return OK; }
int nvmlGpmSampleGet(struct gpu *g, struct gpm_sample *sample) {
    ENTER(g);
    if (!value(g, "gpm")) return NOT_SUPPORTED;
    sample->g = g;
    clock_gettime(CLOCK_MONOTONIC, &sample->at);
    return OK;
}
int nvmlGpmMetricsGet(struct metrics *metrics) {
    ENTER(NULL);
    struct timespec a = metrics->one->at, b = metrics->two->at;
    if (metrics->version != 1 || !metrics->one->g || metrics->one->g != metrics->two->g) return INVALID;
    if (b.tv_sec < a.tv_sec || (b.tv_sec == a.tv_sec && b.tv_nsec <= a.tv_nsec)) return INVALID;
    for (unsigned i = 0; i < metrics->count; i++) {
        struct metric *m = &metrics->metrics[i];
        m->status = m->id == 2 || m->id == 5 ? OK : NOT_SUPPORTED;
        m->value = (double)value(metrics->two->g, m->id == 2 ? "sm_active" : "tensor_active");
    }
    return OK;
}
