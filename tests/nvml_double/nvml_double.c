/* A driver library to be scripted: enough of NVML for the official bindings, with devices, processes and failures read
 * from the text file named by NVML_DOUBLE_SCRIPT, and read again whenever that file changes. See double.py.
 *
 *   init error=9                   nvmlInit fails with this code
 *   driver 550.54.14
 *   delay_ms=20                    every call takes this long
 *   missing NAME                   the function does not exist in this driver (code 13)
 *   fail NAME GPU CODE             the function fails for this GPU
 *   gpu 0 total=1 used=1 reserved=1 util=1 temp=1 power=1 limit=1 name=A_B uuid=GPU-1 error=15
 *   process 0 pid=1 used=1|na kind=compute|graphics
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define GPUS 32
#define PROCESSES 64
#define RULES 64
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_FOUND = 6, TOO_SMALL = 7, FUNCTION_NOT_FOUND = 13, GPU_GONE = 28 };
typedef unsigned long long u64;

struct process { unsigned pid; u64 used; int graphics; };
struct gpu {
    int error, process_count;
    u64 total, used, reserved;
    unsigned util, temp, power, limit;
    char name[96], uuid[96];
    struct process processes[PROCESSES];
};
struct rule { char name[64]; int gpu, code; };
struct process_info { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };

static struct gpu gpus[GPUS];
static struct rule rules[RULES];
static struct { char name[64]; unsigned long count; } calls[RULES];
static int gpu_count, rule_count, init_error, delay_ms, initialised;
static char driver[80];
static struct timespec read_at;
static ino_t read_inode;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static u64 field(const char *line, const char *key, u64 otherwise) {
    char pattern[32];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *at = strstr(line, pattern);
    if (!at) return otherwise;
    at += strlen(pattern);
    return strncmp(at, "na", 2) ? strtoull(at, NULL, 10) : ~0ULL;
}

static void word(const char *line, const char *key, char *into, size_t size) {
    char pattern[32];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *at = strstr(line, pattern);
    if (!at) return;
    at += strlen(pattern);
    size_t length = strcspn(at, " \n");
    snprintf(into, size, "%.*s", (int)length, at);
    for (char *c = into; *c; c++) if (*c == '_') *c = ' ';
}

static void add_gpu(const char *line, unsigned i) {
    struct gpu *gpu = &gpus[i];
    gpu->error = (int)field(line, "error", 0);
    gpu->total = field(line, "total", 0);
    gpu->used = field(line, "used", 0);
    gpu->reserved = field(line, "reserved", 0);
    gpu->util = (unsigned)field(line, "util", 0);
    gpu->temp = (unsigned)field(line, "temp", 40);
    gpu->power = (unsigned)field(line, "power", 100000);
    gpu->limit = (unsigned)field(line, "limit", 300000);
    snprintf(gpu->name, sizeof gpu->name, "Scripted GPU");
    snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-%08u", i);
    word(line, "name", gpu->name, sizeof gpu->name);
    word(line, "uuid", gpu->uuid, sizeof gpu->uuid);
    if ((int)i >= gpu_count) gpu_count = (int)i + 1;
}

static void add_process(const char *line, unsigned i) {
    struct gpu *gpu = &gpus[i];
    if (gpu->process_count == PROCESSES) return;
    struct process *process = &gpu->processes[gpu->process_count++];
    process->pid = (unsigned)field(line, "pid", 0);
    process->used = field(line, "used", 0);
    process->graphics = strstr(line, "kind=graphics") != NULL;
}

static void read_line(char *line) {
    unsigned i;
    struct rule rule = {.gpu = -1, .code = FUNCTION_NOT_FOUND};
    if (sscanf(line, "gpu %u", &i) == 1 && i < GPUS) add_gpu(line, i);
    else if (sscanf(line, "process %u", &i) == 1 && i < GPUS) add_process(line, i);
    else if (sscanf(line, "init error=%d", &init_error) == 1) return;
    else if (sscanf(line, "delay_ms=%d", &delay_ms) == 1) return;
    else if (sscanf(line, "driver %79s", driver) == 1) return;
    else if ((sscanf(line, "missing %63s", rule.name) == 1 ||
              sscanf(line, "fail %63s %d %d", rule.name, &rule.gpu, &rule.code) == 3) && rule_count < RULES)
        rules[rule_count++] = rule;
}

static void read_script(void) {
    const char *path = getenv("NVML_DOUBLE_SCRIPT");
    struct stat now;
    if (!path || stat(path, &now)) { gpu_count = 0; return; }
    if (now.st_ino == read_inode && now.st_mtim.tv_sec == read_at.tv_sec && now.st_mtim.tv_nsec == read_at.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    read_inode = now.st_ino;
    read_at = now.st_mtim;
    memset(gpus, 0, sizeof gpus);
    gpu_count = rule_count = init_error = delay_ms = 0;
    snprintf(driver, sizeof driver, "550.54.14");
    char line[512];
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
}

static void count_call(const char *name) {
    for (int i = 0; i < RULES; i++) {
        if (!calls[i].name[0]) snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        if (!strcmp(calls[i].name, name)) { calls[i].count++; return; }
    }
}

/* What every function does first. `device` is NULL for those without one. */
static int enter(const char *name, struct gpu *device) {
    pthread_mutex_lock(&lock);
    read_script();
    count_call(name);
    int index = device ? (int)(device - gpus) : -1, code = initialised ? OK : UNINITIALIZED;
    if (device && (index < 0 || index >= GPUS)) code = INVALID;
    else if (device && index >= gpu_count) code = GPU_GONE;
    else if (device && device->error) code = device->error;
    for (int i = 0; i < rule_count; i++)
        if (!strcmp(rules[i].name, name) && (rules[i].gpu < 0 || rules[i].gpu == index)) code = rules[i].code;
    int wait = delay_ms;
    pthread_mutex_unlock(&lock);
    if (wait) usleep((unsigned)wait * 1000);
    return code;
}
#define ENTER(device) do { int code = enter(__func__, device); if (code) return code; } while (0)

unsigned long nvmlDoubleCalls(const char *name) {
    for (int i = 0; i < RULES; i++) if (!strcmp(calls[i].name, name)) return calls[i].count;
    return 0;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = enter(__func__, NULL);
    if (code == UNINITIALIZED) code = OK;
    if (!code) code = init_error;
    if (!code) initialised++;
    return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { ENTER(NULL); initialised--; return OK; }
const char *nvmlErrorString(int code) { (void)code; return "scripted error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { ENTER(NULL); snprintf(text, size, "%s", driver); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(NULL); *count = (unsigned)gpu_count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **device) {
    ENTER(NULL);
    if ((int)index >= gpu_count) return INVALID;
    *device = &gpus[index];
    return gpus[index].error;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **device) {
    ENTER(NULL);
    for (int i = 0; i < gpu_count; i++)
        if (!strcmp(gpus[i].uuid, uuid)) { *device = &gpus[i]; return gpus[i].error; }
    return NOT_FOUND;
}
int nvmlDeviceGetName(struct gpu *g, char *text, unsigned size) { ENTER(g); snprintf(text, size, "%s", g->name); return OK; }
int nvmlDeviceGetUUID(struct gpu *g, char *text, unsigned size) { ENTER(g); snprintf(text, size, "%s", g->uuid); return OK; }
int nvmlDeviceGetMemoryInfo(struct gpu *g, u64 *info) {
    ENTER(g);
    info[0] = g->total;
    info[1] = g->total - g->used - g->reserved;
    info[2] = g->used + g->reserved; /* version 1 counts the reserve as used */
    return OK;
}
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct gpu *g, struct memory_v2 *info) {
    ENTER(g);
    if (info->version != 0x02000028) return 25;
    info->total = g->total;
    info->reserved = g->reserved;
    info->free = g->total - g->used - g->reserved;
    info->used = g->used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(struct gpu *g, unsigned *rates) { ENTER(g); rates[0] = g->util; rates[1] = 0; return OK; }
int nvmlDeviceGetTemperature(struct gpu *g, int sensor, unsigned *celsius) {
    (void)sensor;
    ENTER(g);
    *celsius = g->temp;
    return OK;
}
int nvmlDeviceGetPowerUsage(struct gpu *g, unsigned *milliwatts) { ENTER(g); *milliwatts = g->power; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(struct gpu *g, unsigned *milliwatts) { ENTER(g); *milliwatts = g->limit; return OK; }

static int list(struct gpu *g, int graphics, unsigned *count, struct process_info *into) {
    unsigned have = 0;
    for (int i = 0; i < g->process_count; i++) have += g->processes[i].graphics == graphics;
    unsigned room = *count;
    *count = have;
    if (have == 0) return OK;
    if (room < have || !into) return TOO_SMALL;
    for (int i = 0, n = 0; i < g->process_count; i++)
        if (g->processes[i].graphics == graphics)
            into[n++] = (struct process_info){g->processes[i].pid, g->processes[i].used, ~0u, ~0u};
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *g, unsigned *count, struct process_info *into) {
    ENTER(g);
    return list(g, 0, count, into);
}
int nvmlDeviceGetComputeRunningProcesses_v2(struct gpu *g, unsigned *count, struct process_info *into) {
    ENTER(g);
    return list(g, 0, count, into);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct gpu *g, unsigned *count, struct process_info *into) {
    ENTER(g);
    return list(g, 1, count, into);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(struct gpu *g, unsigned *count, struct process_info *into) {
    ENTER(g);
    return list(g, 1, count, into);
}
