/* libnvidia-ml.so.1 that plays back a recording.
 *
 * The file that NVML_PLAYBACK names is read anew at every call, so a test changes the GPUs by replacing it. A line is
 *
 *     function device code value...
 *
 * where device is "-" (no device), "1" (a GPU) or "1/0" (a MIG device of it), and code an nvmlReturn_t, or "hang": the
 * call then returns once the file says something else. What is not in the file is NVML_ERROR_UNKNOWN, as real NVML
 * would rather say NVML_ERROR_NOT_SUPPORTED and a gap in a recording must be seen. Each call is one line in the file
 * that NVML_PLAYBACK_CALLS names, if any. Signatures and structures are those of NVIDIA's NVML API Reference.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st { char name[12]; } *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, UNKNOWN = 999 };
enum { GPUS = 64, MIGS = 16, TEXT = 256 };

static struct nvmlDevice_st gpus[GPUS], migs[GPUS][MIGS];
static int users; /* nvmlInit less nvmlShutdown */

static void tell_call(const char *function, const char *device) {
    const char *path = getenv("NVML_PLAYBACK_CALLS");
    char line[128];
    int file, length = snprintf(line, sizeof line, "%s %s\n", function, device);
    if (path == NULL || (file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) < 0) return;
    if (write(file, line, (size_t)length) != length) abort();
    close(file);
}

/* The recorded code of a call, or `missing`; its values go into text. */
static nvmlReturn_t look_up(const char *function, const char *device, char text[TEXT], nvmlReturn_t missing) {
    char line[512], f[64], d[12], code[12];
    int hangs;
    do {
        const char *path = getenv("NVML_PLAYBACK");
        FILE *file = path == NULL ? NULL : fopen(path, "re");
        if (file == NULL) return DRIVER_NOT_LOADED;
        hangs = 0;
        text[0] = '\0';
        nvmlReturn_t found = missing;
        while (fgets(line, sizeof line, file) != NULL) {
            int used = 0;
            if (sscanf(line, "%63s %11s %11s %n", f, d, code, &used) < 3 || strcmp(f, function) || strcmp(d, device))
                continue;
            line[strcspn(line, "\n")] = '\0';
            snprintf(text, TEXT, "%s", line + used);
            hangs = strcmp(code, "hang") == 0;
            found = atoi(code);
            break;
        }
        fclose(file);
        if (!hangs) return found;
        nanosleep(&(struct timespec){0, 10 * 1000 * 1000}, NULL);
    } while (1);
}

static nvmlReturn_t ask(const char *function, const char *device, char text[TEXT]) {
    tell_call(function, device);
    return __atomic_load_n(&users, __ATOMIC_SEQ_CST) > 0 ? look_up(function, device, text, UNKNOWN) : UNINITIALIZED;
}

static nvmlReturn_t ask_text(const char *function, const char *device, char *out, unsigned int size) {
    char text[TEXT];
    nvmlReturn_t code = ask(function, device, text);
    if (code != SUCCESS) return code;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static nvmlReturn_t ask_numbers(const char *function, const char *device, unsigned int *first, unsigned int *second) {
    char text[TEXT];
    nvmlReturn_t code = ask(function, device, text);
    if (code != SUCCESS) return code;
    return sscanf(text, second == NULL ? "%u" : "%u %u", first, second) == (second == NULL ? 1 : 2) ? SUCCESS : UNKNOWN;
}

static nvmlDevice_t handle_of(const char *device) {
    int gpu = -1, mig = -1;
    if (sscanf(device, "%d/%d", &gpu, &mig) < 1 || gpu < 0 || gpu >= GPUS || mig >= MIGS) return NULL;
    nvmlDevice_t handle = mig < 0 ? &gpus[gpu] : &migs[gpu][mig];
    snprintf(handle->name, sizeof handle->name, "%s", device);
    return handle;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    char text[TEXT];
    (void)flags;
    tell_call("nvmlInitWithFlags", "-");
    nvmlReturn_t code = look_up("nvmlInitWithFlags", "-", text, SUCCESS);
    if (code == SUCCESS) __atomic_add_fetch(&users, 1, __ATOMIC_SEQ_CST);
    return code;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    tell_call("nvmlShutdown", "-");
    if (__atomic_load_n(&users, __ATOMIC_SEQ_CST) == 0) return UNINITIALIZED;
    __atomic_sub_fetch(&users, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) { return code == SUCCESS ? "Success" : "an error of the playback"; }

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    return ask_text("nvmlSystemGetDriverVersion", "-", version, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    return ask_numbers("nvmlDeviceGetCount_v2", "-", count, NULL);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    unsigned int count;
    char name[12], text[TEXT];
    nvmlReturn_t code = ask_numbers("nvmlDeviceGetCount_v2", "-", &count, NULL);
    if (code != SUCCESS) return code;
    if (index >= count) return INVALID_ARGUMENT;
    snprintf(name, sizeof name, "%u", index);
    tell_call("nvmlDeviceGetHandleByIndex_v2", name);
    code = look_up("nvmlDeviceGetHandleByIndex_v2", name, text, SUCCESS);
    if (code == SUCCESS) *device = handle_of(name);
    return code;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    char line[512], name[12], recorded[96], text[TEXT];
    const char *path = getenv("NVML_PLAYBACK");
    tell_call("nvmlDeviceGetHandleByUUID", uuid);
    if (__atomic_load_n(&users, __ATOMIC_SEQ_CST) == 0) return UNINITIALIZED;
    FILE *file = path == NULL ? NULL : fopen(path, "re");
    if (file == NULL) return DRIVER_NOT_LOADED;
    nvmlReturn_t code = NOT_FOUND;
    while (code == NOT_FOUND && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "nvmlDeviceGetUUID %11s 0 %95s", name, recorded) == 2 && strcmp(recorded, uuid) == 0)
            code = SUCCESS;
    fclose(file);
    if (code == SUCCESS) code = look_up("nvmlDeviceGetHandleByIndex_v2", name, text, SUCCESS);
    if (code == SUCCESS) *device = handle_of(name);
    return code;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    return ask_text("nvmlDeviceGetUUID", device->name, uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    return ask_text("nvmlDeviceGetName", device->name, name, length);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    char text[TEXT];
    nvmlReturn_t code = ask("nvmlDeviceGetMemoryInfo", device->name, text);
    if (code != SUCCESS) return code;
    return sscanf(text, "%llu %llu %llu", &memory->total, &memory->free, &memory->used) == 3 ? SUCCESS : UNKNOWN;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    return ask_numbers("nvmlDeviceGetUtilizationRates", device->name, &utilization->gpu, &utilization->memory);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    return ask_numbers("nvmlDeviceGetPowerUsage", device->name, milliwatts, NULL);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    return ask_numbers("nvmlDeviceGetMigMode", device->name, current, pending);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    return ask_numbers("nvmlDeviceGetMaxMigDeviceCount", device->name, count, NULL);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig) {
    char name[12], text[TEXT];
    snprintf(name, sizeof name, "%.5s/%u", device->name, index % 1000);
    tell_call("nvmlDeviceGetMigDeviceHandleByIndex", name);
    nvmlReturn_t code = look_up("nvmlDeviceGetUUID", name, text, NOT_FOUND);
    if (code == SUCCESS) *mig = handle_of(name);
    return code;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    return ask_numbers("nvmlDeviceGetGpuInstanceId", device->name, id, NULL);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    return ask_numbers("nvmlDeviceGetComputeInstanceId", device->name, id, NULL);
}
