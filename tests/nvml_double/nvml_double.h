/* Shared by the parts of the scripted driver library: what a GPU is, and what every function does first. */
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define GPUS 64
#define MIGS 8
#define PROCESSES 128
#define PAIRS 48
#define FIELDS 32
#define BUSY 128
#define RULES 512
#define EVENTS 64
#define CALLS 256
enum {
    OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13, GPU_GONE = 28
};
typedef unsigned long long u64;

struct pair { char key[32]; u64 value; };
struct process { unsigned pid, gi, ci; u64 used; char kind; /* c compute, g graphics, m mps */ };
struct busy { unsigned pid; u64 stamp; unsigned sm, mem, enc, dec; };
struct field { unsigned id, scope; int status; u64 value; };
struct gpu {
    int present, error, parent, position; /* parent: index of the GPU that a MIG instance is part of, else -1 */
    char name[96], uuid[96], bus[32];
    int pair_count, process_count, busy_count, field_count;
    struct pair pairs[PAIRS];
    struct process processes[PROCESSES];
    struct busy busy[BUSY];
    struct field fields[FIELDS];
};
struct event { u64 id, type, data; int gpu; };

extern struct gpu gpus[GPUS], children[GPUS][MIGS];
extern struct event events[EVENTS];
extern int gpu_count, event_count, init_error, initialised;
extern char driver[80];
extern int cuda;
extern pthread_mutex_t lock;

/* The value of `key=` in the script, or the value of a common data-centre card. */
u64 value(const struct gpu *g, const char *key);
int known(const struct gpu *g, const char *key);
void read_script(void);
int rule_for(const char *name, const struct gpu *g, int otherwise);

/* Counts the call, waits, and returns the script's code, or OK. `g` is NULL for functions without a device. */
int enter(int *slot, const char *name, struct gpu *g);
#define ENTER(g) do { static int slot = -1; int code = enter(&slot, __func__, g); if (code) return code; } while (0)
