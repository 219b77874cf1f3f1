/* A stand-in for libnvidia-ml.so.1 that says what a text file tells it to, and reads that file again whenever it changes.
 *
 * The file is named by $FAKE_NVML_CONTROL. One directive a line, unknown ones are ignored:
 *
 *   init CODE                          what nvmlInitWithFlags returns
 *   driver VERSION
 *   gpu INDEX KEY VALUE                a value of a GPU; GPUs are counted by the highest INDEX (see set_value)
 *   name INDEX TEXT
 *   process INDEX PID BYTES            one that computes there
 *   mig INDEX UUID TOTAL USED          an instance of that GPU
 *   migprocess INDEX INSTANCE PID BYTES
 *   count N                            overrides how many GPUs there are; after the GPUs
 *   refuse CALL CODE INDEX             CALL is a C function or "field:NUMBER"; INDEX -1 means every GPU
 *   lose INDEX CODE AT                 every call for that GPU returns CODE from CLOCK_MONOTONIC second AT on
 *   hang CALL MODE INDEX               sleep: until the directive is gone; stop: the process stops itself, so that only
 *                                      SIGKILL ends it; disk: as stop, with the calling thread in state D
 *   segfault CALL INDEX
 *   xid SERIAL INDEX CODE              an event, delivered once to sets that were registered before it
 *
 * Written against the public NVML API reference; only what pynvml calls by these names exists.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  TIMEOUT = 10,
  GPU_IS_LOST = 15
};
enum { GPUS = 16, INSTANCES = 8, PROCESSES = 64, RULES = 256, EVENTS = 64 };

typedef struct {
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance, compute_instance;
} process_t;

typedef struct {
  char uuid[96];
  unsigned long long total, used;
  process_t processes[PROCESSES];
  unsigned process_count;
  int gpu;
} instance_t;

typedef struct {
  int index;
  char uuid[96], name[96], pci[32];
  unsigned long long total, used, reserved, reasons, ecc;
  double energy_mj, energy_since, thermal_sw_ns, thermal_hw_ns, brake_ns;
  unsigned power_mw, utilization, sm_mhz, recovery, replays, remap_failure, remap_pending, mig;
  int temperature;
  process_t processes[PROCESSES];
  unsigned process_count;
  instance_t instances[INSTANCES];
  unsigned instance_count;
} gpu_t;

typedef struct {
  char kind, call[64], mode[16]; /* kind: r(efuse), h(ang), s(egfault), l(ose) */
  int code, index;
  double at;
} rule_t;

typedef struct {
  int serial, index, code;
} event_t;

static struct {
  gpu_t gpus[GPUS];
  rule_t rules[RULES];
  event_t events[EVENTS];
  int gpu_count, rule_count, event_count, init;
  char driver[80];
} now_;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stat read_as;
static int initialised;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static void set_value(gpu_t *g, const char *key, const char *value) {
  double number = atof(value);
  unsigned long long whole = strtoull(value, NULL, 0);
  if (!strcmp(key, "uuid")) snprintf(g->uuid, sizeof g->uuid, "%s", value);
  else if (!strcmp(key, "pci")) snprintf(g->pci, sizeof g->pci, "%s", value);
  else if (!strcmp(key, "memory_total")) g->total = whole;
  else if (!strcmp(key, "memory_used")) g->used = whole;
  else if (!strcmp(key, "memory_reserved")) g->reserved = whole;
  else if (!strcmp(key, "power_mw")) g->power_mw = whole;
  else if (!strcmp(key, "energy_mj")) g->energy_mj = number;       /* at energy_since, and growing with power_mw */
  else if (!strcmp(key, "energy_since")) g->energy_since = number; /* CLOCK_MONOTONIC; 0: it stands still */
  else if (!strcmp(key, "utilization")) g->utilization = whole;
  else if (!strcmp(key, "temperature")) g->temperature = (int)number;
  else if (!strcmp(key, "sm_mhz")) g->sm_mhz = whole;
  else if (!strcmp(key, "reasons")) g->reasons = whole;
  else if (!strcmp(key, "sw_thermal_ns")) g->thermal_sw_ns = number;
  else if (!strcmp(key, "hw_thermal_ns")) g->thermal_hw_ns = number;
  else if (!strcmp(key, "power_brake_ns")) g->brake_ns = number;
  else if (!strcmp(key, "ecc_uncorrectable")) g->ecc = whole;
  else if (!strcmp(key, "remap_failure")) g->remap_failure = whole;
  else if (!strcmp(key, "remap_pending")) g->remap_pending = whole;
  else if (!strcmp(key, "recovery_action")) g->recovery = whole;
  else if (!strcmp(key, "pcie_replays")) g->replays = whole;
  else if (!strcmp(key, "mig")) g->mig = whole;
}

static void read_line(char *line) {
  int index = 0, code = 0, other = 0, override = -1;
  unsigned pid;
  unsigned long long bytes, used;
  double at = 0;
  char word[64], text[96], mode[16];
  rule_t *rule = &now_.rules[now_.rule_count];
  int room = now_.rule_count < RULES;
  if (sscanf(line, "init %d", &code) == 1) now_.init = code;
  else if (sscanf(line, "driver %79s", text) == 1) snprintf(now_.driver, sizeof now_.driver, "%s", text);
  else if (sscanf(line, "count %d", &override) == 1) now_.gpu_count = override;
  else if (sscanf(line, "gpu %d %63s %95s", &index, word, text) == 3 && index >= 0 && index < GPUS) {
    if (index >= now_.gpu_count) now_.gpu_count = index + 1;
    set_value(&now_.gpus[index], word, text);
  } else if (sscanf(line, "name %d %95[^\n]", &index, text) == 2 && index >= 0 && index < GPUS)
    snprintf(now_.gpus[index].name, sizeof now_.gpus[index].name, "%s", text);
  else if (sscanf(line, "process %d %u %llu", &index, &pid, &bytes) == 3 && index >= 0 && index < GPUS) {
    gpu_t *g = &now_.gpus[index];
    if (g->process_count < PROCESSES)
      g->processes[g->process_count++] = (process_t){pid, bytes, 0xFFFFFFFF, 0xFFFFFFFF};
  } else if (sscanf(line, "migprocess %d %d %u %llu", &index, &other, &pid, &bytes) == 4 && index >= 0 && index < GPUS &&
             other >= 0 && other < INSTANCES) {
    instance_t *i = &now_.gpus[index].instances[other];
    gpu_t *g = &now_.gpus[index];
    if (i->process_count < PROCESSES) i->processes[i->process_count++] = (process_t){pid, bytes, other, 0};
    if (g->process_count < PROCESSES) g->processes[g->process_count++] = (process_t){pid, bytes, other, 0};
  } else if (sscanf(line, "mig %d %95s %llu %llu", &index, text, &bytes, &used) == 4 && index >= 0 && index < GPUS) {
    gpu_t *g = &now_.gpus[index];
    if (g->instance_count < INSTANCES) {
      instance_t *i = &g->instances[g->instance_count++];
      snprintf(i->uuid, sizeof i->uuid, "%s", text);
      i->total = bytes, i->used = used, i->gpu = index;
    }
  } else if (room && sscanf(line, "refuse %63s %d %d", word, &code, &index) == 3) {
    *rule = (rule_t){.kind = 'r', .code = code, .index = index};
    memcpy(rule->call, word, sizeof word), now_.rule_count++;
  } else if (room && sscanf(line, "lose %d %d %lf", &index, &code, &at) == 3) {
    *rule = (rule_t){.kind = 'l', .code = code, .index = index, .at = at};
    now_.rule_count++;
  } else if (room && sscanf(line, "hang %63s %15s %d", word, mode, &index) == 3) {
    *rule = (rule_t){.kind = 'h', .index = index};
    memcpy(rule->call, word, sizeof word), memcpy(rule->mode, mode, sizeof mode), now_.rule_count++;
  } else if (room && sscanf(line, "segfault %63s %d", word, &index) == 2) {
    *rule = (rule_t){.kind = 's', .index = index};
    memcpy(rule->call, word, sizeof word), now_.rule_count++;
  } else if (now_.event_count < EVENTS && sscanf(line, "xid %d %d %d", &other, &index, &code) == 3)
    now_.events[now_.event_count++] = (event_t){other, index, code};
}

/* Read the control file when it is another one than last time. With the lock held. */
static void refresh(void) {
  const char *path = getenv("FAKE_NVML_CONTROL");
  struct stat s;
  if (!path || stat(path, &s)) return;
  if (s.st_ino == read_as.st_ino && s.st_size == read_as.st_size && s.st_mtim.tv_sec == read_as.st_mtim.tv_sec &&
      s.st_mtim.tv_nsec == read_as.st_mtim.tv_nsec)
    return;
  FILE *file = fopen(path, "r");
  if (!file) return;
  read_as = s;
  memset(&now_, 0, sizeof now_);
  for (int i = 0; i < GPUS; i++) now_.gpus[i].index = i;
  char line[512];
  while (fgets(line, sizeof line, file)) read_line(line);
  fclose(file);
}

static const rule_t *rule_for(char kind, const char *call, int index) {
  for (int i = 0; i < now_.rule_count; i++) {
    const rule_t *r = &now_.rules[i];
    if (r->kind == kind && (r->index == -1 || index == -1 || r->index == index) && (!call || !strcmp(r->call, call)))
      return r;
  }
  return NULL;
}

/* Stay until the directive is gone. */
static void hang(const char *call, int index, const char *mode) {
  if (!strcmp(mode, "stop")) kill(getpid(), SIGSTOP);
  if (!strcmp(mode, "disk")) {
    pid_t self = getpid();
    if (vfork() == 0) { /* the caller is in D until this child ends */
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      kill(self, SIGSTOP);
      while (getppid() == self) usleep(50000);
      _exit(0);
    }
  }
  for (int on = 1; on;) {
    usleep(20000);
    pthread_mutex_lock(&lock);
    refresh();
    on = rule_for('h', call, index) != NULL;
    pthread_mutex_unlock(&lock);
  }
}

/* What a call is told before it may answer; index -1 for calls without a GPU. Returns with the lock held on SUCCESS. */
static int enter(const char *call, int index) {
  pthread_mutex_lock(&lock);
  refresh();
  const rule_t *rule = rule_for('h', call, index);
  if (rule) {
    char mode[16];
    memcpy(mode, rule->mode, sizeof mode);
    pthread_mutex_unlock(&lock);
    hang(call, index, mode);
    pthread_mutex_lock(&lock);
    refresh();
  }
  if (rule_for('s', call, index)) *(volatile int *)8 = 0;
  int code = SUCCESS;
  if (!initialised && strcmp(call, "nvmlInitWithFlags")) code = UNINITIALIZED;
  else if (index >= 0 && (rule = rule_for('l', NULL, index)) && seconds() >= rule->at) code = rule->code;
  else if ((rule = rule_for('r', call, index)) && (index >= 0 || rule->index == -1)) code = rule->code;
  if (code) pthread_mutex_unlock(&lock);
  return code;
}

static int leave(int code) {
  pthread_mutex_unlock(&lock);
  return code;
}

static instance_t *instance_of(void *device) {
  for (int i = 0; i < GPUS; i++)
    for (int k = 0; k < INSTANCES; k++)
      if (device == &now_.gpus[i].instances[k]) return device;
  return NULL;
}

static int index_of(void *device) {
  instance_t *instance = instance_of(device);
  return instance ? instance->gpu : (int)((gpu_t *)device - now_.gpus);
}

#define ENTER(device)                            \
  do {                                           \
    int code_ = enter(__func__, index_of(device)); \
    if (code_) return code_;                     \
  } while (0)
#define WHOLE(device)                                              \
  ENTER(device);                                                   \
  if (instance_of(device)) return leave(NOT_SUPPORTED);            \
  gpu_t *g = device
#define ENTER_SYSTEM()              \
  do {                              \
    int code_ = enter(__func__, -1); \
    if (code_) return code_;        \
  } while (0)

static int text_out(char *out, unsigned length, const char *text) {
  snprintf(out, length, "%s", text);
  return leave(SUCCESS);
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  ENTER_SYSTEM();
  if (!now_.init) initialised++;
  return leave(now_.init);
}
int nvmlShutdown(void) {
  ENTER_SYSTEM();
  initialised--;
  return leave(SUCCESS);
}
const char *nvmlErrorString(int code) {
  (void)code;
  return "an error";
}
int nvmlSystemGetDriverVersion(char *out, unsigned length) {
  ENTER_SYSTEM();
  return text_out(out, length, now_.driver);
}
int nvmlDeviceGetCount_v2(unsigned *count) {
  ENTER_SYSTEM();
  *count = now_.gpu_count;
  return leave(SUCCESS);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  int code = enter(__func__, (int)index);
  if (code) return code;
  if ((int)index >= now_.gpu_count) return leave(INVALID_ARGUMENT);
  *device = &now_.gpus[index];
  return leave(SUCCESS);
}
/* As the reference says: it fails when any GPU, not only this one, is lost. */
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  ENTER_SYSTEM();
  for (int i = 0; i < now_.rule_count; i++)
    if (now_.rules[i].kind == 'l' && seconds() >= now_.rules[i].at) return leave(GPU_IS_LOST);
  for (int i = 0; i < now_.gpu_count; i++)
    if (!strcmp(uuid, now_.gpus[i].uuid)) {
      *device = &now_.gpus[i];
      return leave(SUCCESS);
    }
  return leave(NOT_FOUND);
}
int nvmlDeviceGetUUID(void *device, char *out, unsigned length) {
  ENTER(device);
  instance_t *instance = instance_of(device);
  return text_out(out, length, instance ? instance->uuid : ((gpu_t *)device)->uuid);
}
int nvmlDeviceGetName(void *device, char *out, unsigned length) {
  ENTER(device);
  instance_t *instance = instance_of(device);
  return text_out(out, length, now_.gpus[instance ? instance->gpu : ((gpu_t *)device)->index].name);
}
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char text[32];
} pci_t;
int nvmlDeviceGetPciInfo_v3(void *device, pci_t *out) {
  WHOLE(device);
  memset(out, 0, sizeof *out);
  sscanf(g->pci, "%x:%x:%x", &out->domain, &out->bus, &out->device);
  snprintf(out->text, sizeof out->text, "%s", g->pci);
  return leave(SUCCESS);
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned *out) {
  WHOLE(device);
  out[0] = g->utilization, out[1] = 0;
  return leave(SUCCESS);
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *out) { /* total, free, used: with what is reserved */
  ENTER(device);
  instance_t *i = instance_of(device);
  gpu_t *g = device;
  out[0] = i ? i->total : g->total;
  out[2] = i ? i->used : g->used + g->reserved;
  out[1] = out[0] - out[2];
  return leave(SUCCESS);
}
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} memory_v2_t;
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *out) {
  ENTER(device);
  instance_t *i = instance_of(device);
  gpu_t *g = device;
  if (out->version != (sizeof *out | 2u << 24)) return leave(25); /* ARGUMENT_VERSION_MISMATCH */
  out->total = i ? i->total : g->total;
  out->reserved = i ? 0 : g->reserved;
  out->used = i ? i->used : g->used;
  out->free = out->total - out->used - out->reserved;
  return leave(SUCCESS);
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *out) {
  WHOLE(device);
  *out = g->power_mw;
  return leave(SUCCESS);
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *out) {
  WHOLE(device);
  double grown = g->energy_since > 0 ? (seconds() - g->energy_since) * g->power_mw : 0;
  *out = (unsigned long long)(g->energy_mj + grown);
  return leave(SUCCESS);
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *out) {
  (void)sensor;
  WHOLE(device);
  *out = (unsigned)g->temperature;
  return leave(SUCCESS);
}
typedef struct {
  unsigned version;
  int sensor, temperature;
} temperature_t;
int nvmlDeviceGetTemperatureV(void *device, temperature_t *out) {
  WHOLE(device);
  out->temperature = g->temperature;
  return leave(SUCCESS);
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *out) {
  (void)type;
  WHOLE(device);
  *out = g->sm_mhz;
  return leave(SUCCESS);
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *out) {
  WHOLE(device);
  *out = g->reasons;
  return leave(SUCCESS);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *out) {
  WHOLE(device);
  *out = g->reasons;
  return leave(SUCCESS);
}
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *out) {
  WHOLE(device);
  *out = type == 1 && counter == 0 ? g->ecc : 0; /* uncorrected, volatile */
  return leave(SUCCESS);
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failure) {
  WHOLE(device);
  if (g->mig) return leave(NOT_SUPPORTED);
  *corrected = *uncorrected = 0;
  *pending = g->remap_pending, *failure = g->remap_failure;
  return leave(SUCCESS);
}
int nvmlDeviceGetPcieReplayCounter(void *device, unsigned *out) {
  WHOLE(device);
  *out = g->replays;
  return leave(SUCCESS);
}
typedef struct {
  unsigned field, scope;
  long long timestamp, latency;
  int type, code;
  union {
    double real;
    unsigned small;
    unsigned long long large;
  } value;
} field_t;
static void answer(gpu_t *g, field_t *f) {
  char call[32];
  snprintf(call, sizeof call, "field:%u/%u", f->field, f->scope);
  const rule_t *rule = rule_for('r', call, g->index);
  snprintf(call, sizeof call, "field:%u", f->field);
  if (!rule) rule = rule_for('r', call, g->index);
  f->code = rule ? rule->code : SUCCESS;
  f->type = 1; /* unsigned int */
  f->value.large = 0;
  switch (f->field) {
    case 185: case 186: /* POWER_AVERAGE, POWER_INSTANT */
      f->value.small = g->power_mw;
      break;
    case 230: /* GET_GPU_RECOVERY_ACTION */
      f->value.small = g->recovery;
      break;
    case 269: case 270: case 271: /* software, hardware thermal slowdown and power brake, nanoseconds */
      f->type = 3; /* unsigned long long */
      f->value.large = f->field == 269 ? g->thermal_sw_ns : f->field == 270 ? g->thermal_hw_ns : g->brake_ns;
      break;
    default:
      f->code = NOT_SUPPORTED;
  }
}
int nvmlDeviceGetFieldValues(void *device, int count, field_t *fields) {
  WHOLE(device);
  for (int i = 0; i < count; i++) answer(g, &fields[i]);
  return leave(SUCCESS);
}
static int list(const process_t *from, unsigned have, unsigned *count, process_t *out) {
  unsigned room = *count;
  *count = have;
  if (have > room) return leave(INSUFFICIENT_SIZE);
  memcpy(out, from, have * sizeof *out);
  return leave(SUCCESS);
}
static int processes_of(void *device, unsigned *count, process_t *out) {
  instance_t *i = instance_of(device);
  gpu_t *g = device;
  return i ? list(i->processes, i->process_count, count, out) : list(g->processes, g->process_count, count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
  ENTER(device);
  return processes_of(device, count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, process_t *out) {
  ENTER(device);
  return processes_of(device, count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
  ENTER(device);
  return list(NULL, 0, count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
  ENTER(device);
  return list(NULL, 0, count, out);
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
  WHOLE(device);
  *current = *pending = g->mig;
  return leave(SUCCESS);
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
  WHOLE(device);
  *count = g->mig ? 7 : 0;
  return leave(SUCCESS);
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **out) {
  WHOLE(device);
  if (index >= g->instance_count) return leave(NOT_FOUND);
  *out = &g->instances[index];
  return leave(SUCCESS);
}

/* One event set; what was in the file when a GPU was registered is not delivered. */
typedef struct {
  int last[GPUS], registered[GPUS];
} set_t;
typedef struct {
  void *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
} event_data_t;
int nvmlEventSetCreate(set_t **set) {
  ENTER_SYSTEM();
  *set = calloc(1, sizeof **set);
  return leave(SUCCESS);
}
int nvmlEventSetFree(set_t *set) {
  ENTER_SYSTEM();
  free(set);
  return leave(SUCCESS);
}
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, set_t *set) {
  (void)types;
  WHOLE(device);
  set->registered[g->index] = 1;
  for (int i = 0; i < now_.event_count; i++)
    if (now_.events[i].index == g->index && now_.events[i].serial > set->last[g->index])
      set->last[g->index] = now_.events[i].serial;
  return leave(SUCCESS);
}
int nvmlEventSetWait_v2(set_t *set, event_data_t *out, unsigned milliseconds) {
  double until = seconds() + milliseconds / 1e3;
  do {
    ENTER_SYSTEM();
    for (int i = 0; i < now_.event_count; i++) {
      event_t *e = &now_.events[i];
      if (e->index < 0 || e->index >= GPUS || !set->registered[e->index] || e->serial <= set->last[e->index]) continue;
      set->last[e->index] = e->serial;
      *out = (event_data_t){&now_.gpus[e->index], 8, e->code, 0xFFFFFFFF, 0xFFFFFFFF};
      return leave(SUCCESS);
    }
    leave(SUCCESS);
    usleep(25000);
  } while (seconds() < until);
  return TIMEOUT;
}
