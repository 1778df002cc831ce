/* Ascend's runtime on host memory: memory, copies, streams, events, one chip's name. For tests.
 *
 * Functions that are not here are generated and return 0, except those that would compute (aclop*, aclnn*): they return
 * an error, so that an op without a reference fails instead of giving what is in its output. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define DEVICES 2
#define NO_MEMORY 207001

static const size_t total = (size_t)4 << 30;
static size_t used;
static __thread int device;
static int next_stream = 1;
static int capturing;

typedef struct { double at; } Event;
typedef struct { int32_t id; } Stream;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static int take(void **to, size_t bytes) {
    size_t *head = NULL;
    if (used + bytes > total || posix_memalign((void **)&head, 512, bytes + 512)) return NO_MEMORY;
    head[0] = bytes;
    used += bytes;
    *to = (char *)head + 512;
    /* Not a number in every float type, so that a reader of memory that nobody wrote is found. */
    memset(*to, 0xff, bytes);
    return 0;
}

int aclrtGetDeviceCount(uint32_t *count) { *count = DEVICES; return 0; }
int aclrtGetDevice(int32_t *to) { *to = device; return 0; }
int aclrtSetDevice(int32_t index) { device = index; return 0; }
const char *aclrtGetSocName(void) {
    const char *name = getenv("FAKE_ACL_CHIP");
    return name ? name : "Ascend910B2";
}
int aclrtMalloc(void **to, size_t bytes, int policy) { return take(to, bytes); }
int aclrtMallocAlign32(void **to, size_t bytes, int policy) { return take(to, bytes); }
int aclrtFree(void *memory) {
    if (memory) {
        size_t *head = (size_t *)((char *)memory - 512);
        used -= head[0];
        free(head);
    }
    return 0;
}
int aclrtMallocHost(void **to, size_t bytes) { return posix_memalign(to, 512, bytes); }
int aclrtMallocHostWithCfg(void **to, uint64_t bytes, void *config) { return posix_memalign(to, 512, bytes); }
int aclrtFreeHost(void *memory) { free(memory); return 0; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) { memmove(to, from, bytes); return 0; }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    memmove(to, from, bytes);
    return 0;
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) { memset(to, value, bytes); return 0; }
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) {
    memset(to, value, bytes);
    return 0;
}
int aclrtGetMemInfo(int kind, size_t *available, size_t *all) { *available = total - used; *all = total; return 0; }
static int make_stream(void **to) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->id = next_stream++;
    *to = stream;
    return 0;
}
int aclrtCreateStream(void **to) { return make_stream(to); }
int aclrtCreateStreamWithConfig(void **to, uint32_t priority, uint32_t flags) { return make_stream(to); }
int aclrtStreamGetId(void *stream, int32_t *to) { *to = stream ? ((Stream *)stream)->id : 0; return 0; }
int aclrtStreamQuery(void *stream, int *status) { *status = 0; return 0; }
int aclrtCreateEventExWithFlag(void **to, uint32_t flags) { *to = calloc(1, sizeof(Event)); return 0; }
int aclrtCreateEventWithFlag(void **to, uint32_t flags) { *to = calloc(1, sizeof(Event)); return 0; }
int aclrtRecordEvent(void *event, void *stream) { ((Event *)event)->at = now_ms(); return 0; }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return 0; }
int aclQueryEventRecordedStatus(void *event, int *status) { *status = 1; return 0; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 0; return 0; }
int aclrtEventElapsedTime(float *ms, void *begin, void *end) { *ms = ((Event *)end)->at - ((Event *)begin)->at; return 0; }
int aclrtDestroyEvent(void *event) { free(event); return 0; }
int aclrtGetCurrentContext(void **to) { *to = (void *)(uintptr_t)(0x1000 + device); return 0; }
int aclrtSetCurrentContext(void *context) { device = (int)((uintptr_t)context - 0x1000); return 0; }
int aclrtGetPrimaryCtxState(int32_t index, uint32_t *flags, int32_t *active) { *active = 1; return 0; }
int aclrtDeviceCanAccessPeer(int32_t *can, int a, int b) { *can = 1; return 0; }
const char *aclGetRecentErrMsg(void) { return "the fake ACL does not compute this op"; }
int aclGetCannAttribute(int name, int32_t *to) { *to = 0; return 0; }
int aclGetDeviceCapability(uint32_t index, int name, int64_t *to) { *to = 0; return 0; }
int aclrtGetDeviceInfo(uint32_t index, int name, int64_t *to) { *to = 24; return 0; }
int aclsysGetCANNVersion(int name, void *to) { return 1; }
int aclsysGetVersionStr(char *name, char *to) { strcpy(to, "8.5.0"); return 0; }
int aclGetCompileoptSize(int name) { return 16; }
int aclrtDeviceGetBareTgid(int32_t *to) { *to = 1; return 0; }
int aclrtPeekAtLastError(int level) { return 0; }
int aclrtGetLastError(int level) { return 0; }
static uintptr_t next_group = 1;
int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) { *group = (void *)next_group++; return 0; }
/* Each capture has a handle and a number of its own: torch_npu finds a capture by them. */
static uintptr_t model = 0x77;
int aclmdlRICaptureBegin(void *stream, int mode) { capturing = 1; model++; return 0; }
int aclmdlRICaptureEnd(void *stream, void **to) { capturing = 0; *to = (void *)model; return 0; }
int aclmdlRICaptureGetInfo(void *stream, int *status, void **to) { *status = capturing; *to = (void *)model; return 0; }
int aclmdlRIGetId(void *of, uint32_t *to) { *to = (uint32_t)(uintptr_t)of; return 0; }
