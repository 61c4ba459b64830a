/* The script of the driver library: read again whenever the file named by NVML_DOUBLE_SCRIPT changes. See double.py.
 *
 *   init error=9                     nvmlInit fails with this code
 *   driver 550.54.14
 *   cuda 12040
 *   delay_ms=20                      every call takes this long
 *   delay NAME MS                    this function takes this long
 *   missing NAME                     the function does not exist in this driver (code 13)
 *   fail NAME GPU[.MIG] CODE         the function fails for this GPU (or this MIG instance of it)
 *   gpu 0 total=1 used=1 ... name=A_B uuid=GPU-1 bus=00000000:01:00.0 error=15    keys: see `usual` below
 *   mig 0 2 total=1 used=1 gi=3 ci=0 name=A_B uuid=MIG-1     the instance at index 2 below GPU 0
 *   process 0[.MIG] pid=1 used=1|na kind=compute|graphics|mps
 *   busy 0 pid=1 sm=50 mem=20 enc=0 dec=0 stamp=MICROSECONDS
 *   field 0 id=82 scope=0 value=71 status=0
 *   event 0 id=1 type=8 data=79
 */
#include "nvml_double.h"
#include <sys/stat.h>

struct rule { char name[64]; int gpu, mig, code; double delay; };
struct gpu gpus[GPUS], children[GPUS][MIGS];
struct event events[EVENTS];
int gpu_count, event_count, init_error, initialised, cuda;
char driver[80];
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule rules[RULES];
static struct { char name[64]; unsigned long count; } calls[CALLS];
static int rule_count, call_count;
static double delay_ms;
static struct timespec read_at;
static ino_t read_inode;

static const struct pair usual[] = {
    {"temp", 40}, {"power", 100000}, {"limit", 300000}, {"fan", 35}, {"pstate", 2}, {"sm_clock", 1410}, {"sm_limit", 1980},
    {"memory_clock", 2619}, {"memory_limit", 2619}, {"slowdown", 90}, {"ecc", 1}, {"pcie_gen", 4}, {"pcie_gen_limit", 5},
    {"pcie_width", 16}, {"pcie_width_limit", 16}, {"bar1_total", 128ULL << 30}, {"bar1_used", 1 << 20}, {"energy", 123456789},
    {"persistence", 1}, {"major", 9}, {"minor", 0}, {"bus_width", 5120}, {"pcie_tx", 1000}, {"pcie_rx", 2000},
    {"events", 0xffff}, {"mig_max", 7}, {"sm_active", 60}, {"tensor_active", 25},
};

int known(const struct gpu *g, const char *key) {
    for (int i = 0; i < g->pair_count; i++) if (!strcmp(g->pairs[i].key, key)) return 1;
    return 0;
}
u64 value(const struct gpu *g, const char *key) {
    for (int i = 0; i < g->pair_count; i++) if (!strcmp(g->pairs[i].key, key)) return g->pairs[i].value;
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) if (!strcmp(usual[i].key, key)) return usual[i].value;
    return 0;
}

static u64 number(const char *line, const char *key, u64 otherwise) {
    char pattern[32];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *at = strstr(line, pattern);
    if (!at) return otherwise;
    at += strlen(pattern);
    return strncmp(at, "na", 2) ? strtoull(at, NULL, 0) : ~0ULL;
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

static void read_pairs(const char *line, struct gpu *g) {
    char text[1024], *rest = NULL;
    snprintf(text, sizeof text, "%s", line);
    for (char *token = strtok_r(text, " \n", &rest); token; token = strtok_r(NULL, " \n", &rest)) {
        char *equals = strchr(token, '=');
        if (!equals || g->pair_count == PAIRS) continue;
        *equals = 0;
        struct pair *pair = &g->pairs[g->pair_count++];
        snprintf(pair->key, sizeof pair->key, "%.31s", token);
        pair->value = strtoull(equals + 1, NULL, 0);
    }
    g->present = 1;
    g->error = (int)number(line, "error", 0);
    word(line, "name", g->name, sizeof g->name);
    word(line, "uuid", g->uuid, sizeof g->uuid);
    word(line, "bus", g->bus, sizeof g->bus);
}

static void add_gpu(const char *line, unsigned i) {
    struct gpu *g = &gpus[i];
    g->parent = g->position = -1;
    snprintf(g->name, sizeof g->name, "Scripted GPU");
    snprintf(g->uuid, sizeof g->uuid, "GPU-%08u", i);
    snprintf(g->bus, sizeof g->bus, "00000000:%02X:00.0", i + 1);
    read_pairs(line, g);
    if ((int)i >= gpu_count) gpu_count = (int)i + 1;
}

static void add_mig(const char *line, unsigned i, unsigned position) {
    struct gpu *g = &children[i][position];
    g->parent = (int)i;
    g->position = (int)position;
    snprintf(g->name, sizeof g->name, "Scripted GPU MIG 1g.10gb");
    snprintf(g->uuid, sizeof g->uuid, "MIG-%08u-%u", i, position);
    read_pairs(line, g);
}

static void add_process(const char *line, struct gpu *g) {
    if (g->process_count == PROCESSES) return;
    struct process *process = &g->processes[g->process_count++];
    process->pid = (unsigned)number(line, "pid", 0);
    process->used = number(line, "used", 0);
    process->gi = g->parent < 0 ? ~0u : (unsigned)value(g, "gi");
    process->ci = g->parent < 0 ? ~0u : (unsigned)value(g, "ci");
    process->kind = strstr(line, "kind=graphics") ? 'g' : strstr(line, "kind=mps") ? 'm' : 'c';
}

static void add_busy(const char *line, struct gpu *g) {
    if (g->busy_count == BUSY) return;
    g->busy[g->busy_count++] = (struct busy){(unsigned)number(line, "pid", 0), number(line, "stamp", 0),
        (unsigned)number(line, "sm", 0), (unsigned)number(line, "mem", 0), (unsigned)number(line, "enc", 0),
        (unsigned)number(line, "dec", 0)};
}

static void add_field(const char *line, struct gpu *g) {
    if (g->field_count == FIELDS) return;
    g->fields[g->field_count++] = (struct field){(unsigned)number(line, "id", 0), (unsigned)number(line, "scope", 0),
        (int)number(line, "status", 0), number(line, "value", 0)};
}

static int read_rule(const char *line) {
    struct rule rule = {.gpu = -1, .mig = -1, .code = FUNCTION_NOT_FOUND};
    char where[16] = "";
    if (sscanf(line, "delay %63s %lf", rule.name, &rule.delay) == 2) rule.code = OK;
    else if (sscanf(line, "fail %63s %15s %d", rule.name, where, &rule.code) == 3) sscanf(where, "%d.%d", &rule.gpu, &rule.mig);
    else if (sscanf(line, "missing %63s", rule.name) != 1) return 0;
    if (rule_count == RULES) { fprintf(stderr, "nvml_double: more than %d rules\n", RULES); abort(); }
    rules[rule_count++] = rule;
    return 1;
}

static void read_line(const char *line) {
    unsigned i, m;
    if (sscanf(line, "gpu %u", &i) == 1 && i < GPUS) add_gpu(line, i);
    else if (sscanf(line, "mig %u %u", &i, &m) == 2 && i < GPUS && m < MIGS) add_mig(line, i, m);
    else if (sscanf(line, "process %u.%u", &i, &m) == 2 && i < GPUS && m < MIGS) add_process(line, &children[i][m]);
    else if (sscanf(line, "process %u", &i) == 1 && i < GPUS) add_process(line, &gpus[i]);
    else if (sscanf(line, "busy %u", &i) == 1 && i < GPUS) add_busy(line, &gpus[i]);
    else if (sscanf(line, "field %u", &i) == 1 && i < GPUS) add_field(line, &gpus[i]);
    else if (sscanf(line, "event %u", &i) == 1 && i < GPUS && event_count < EVENTS)
        events[event_count++] = (struct event){number(line, "id", 0), number(line, "type", 0), number(line, "data", 0), (int)i};
    else if (sscanf(line, "init error=%d", &init_error) == 1 || sscanf(line, "delay_ms=%lf", &delay_ms) == 1) return;
    else if (sscanf(line, "driver %79s", driver) == 1 || sscanf(line, "cuda %d", &cuda) == 1) return;
    else read_rule(line);
}

static void forget(void) {
    for (int i = 0; i < gpu_count; i++) memset(children[i], 0, sizeof children[i]);
    memset(gpus, 0, sizeof *gpus * (size_t)gpu_count);
    gpu_count = rule_count = event_count = init_error = 0;
    delay_ms = 0;
    cuda = 12040;
    snprintf(driver, sizeof driver, "550.54.14");
}

void read_script(void) {
    const char *path = getenv("NVML_DOUBLE_SCRIPT");
    struct stat now;
    if (!path || stat(path, &now)) {
        /* Without a script there is no GPU; the next script starts empty. */
        forget();
        read_inode = 0;
        return;
    }
    if (now.st_ino == read_inode && now.st_mtim.tv_sec == read_at.tv_sec && now.st_mtim.tv_nsec == read_at.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    read_inode = now.st_ino;
    read_at = now.st_mtim;
    forget();
    char line[1024];
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
}

int rule_for(const char *name, const struct gpu *g, int otherwise) {
    int index = -1, mig = -1; /* found by address: the script does not describe a removed device */
    if (g >= gpus && g < gpus + GPUS) index = (int)(g - gpus);
    else if (g >= &children[0][0] && g < &children[0][0] + GPUS * MIGS) {
        index = (int)((g - &children[0][0]) / MIGS);
        mig = (int)((g - &children[0][0]) % MIGS);
    }
    for (int i = 0; i < rule_count; i++)
        if (rules[i].code && !strcmp(rules[i].name, name) && (rules[i].gpu < 0 || (rules[i].gpu == index && rules[i].mig == mig)))
            return rules[i].code;
    return otherwise;
}

static void count_call(int *slot, const char *name) {
    if (*slot < 0 && call_count < CALLS) {
        *slot = call_count++;
        snprintf(calls[*slot].name, sizeof calls[*slot].name, "%s", name);
    }
    if (*slot >= 0) calls[*slot].count++;
}

/* A handle is valid while its GPU or MIG instance is in the script. */
static int state_of(const struct gpu *g) {
    if (g >= gpus && g < gpus + GPUS) return !g->present ? GPU_GONE : g->error;
    if (g >= &children[0][0] && g < &children[0][0] + GPUS * MIGS)
        return !g->present ? INVALID : g->error ? g->error : gpus[g->parent].error;
    return INVALID;
}

int enter(int *slot, const char *name, struct gpu *g) {
    pthread_mutex_lock(&lock);
    read_script();
    count_call(slot, name);
    int code = !initialised ? UNINITIALIZED : g ? state_of(g) : OK;
    double wait = delay_ms;
    code = rule_for(name, g, code);
    for (int i = 0; i < rule_count; i++) if (rules[i].delay && !strcmp(rules[i].name, name)) wait = rules[i].delay;
    pthread_mutex_unlock(&lock);
    if (wait) usleep((unsigned)(wait * 1000));
    return code;
}

unsigned long nvmlDoubleCalls(const char *name) {
    pthread_mutex_lock(&lock);
    unsigned long count = 0;
    for (int i = 0; i < call_count; i++) if (!strcmp(calls[i].name, name)) count = calls[i].count;
    pthread_mutex_unlock(&lock);
    return count;
}

/* The number of calls of each function, written as JSON when the program exits normally. */
__attribute__((destructor)) static void write_counts(void) {
    const char *path = getenv("NVML_DOUBLE_COUNTS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "{");
    for (int i = 0; i < call_count; i++) fprintf(file, "%s\"%s\": %lu", i ? ", " : "", calls[i].name, calls[i].count);
    fprintf(file, "}\n");
    fclose(file);
}
