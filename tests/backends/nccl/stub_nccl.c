/* A libnccl that does nothing but write down how it was called, one line per call, to the file $NCCL_STUB_LOG.
 *
 * $NCCL_STUB_<function> is what that function returns, instead of 0 for success. More of these variables: VERSION,
 * ASYNC (the state that communicators are in), LAST_ERROR, MICROSECONDS (that a group would take), TAKES_ANY_ROOT (there
 * is no wrong root, so a group with one does not fail), and LATE: new communicators are handed over when ASYNC is 0.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNSET (-2147483647 - 1)
#define CHILD ((void *)0xc1)

typedef struct {
  char internal[128];
} ncclUniqueId;

typedef struct {
  size_t size;
  unsigned int magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare, trafficClass;
  const char *commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} Config;

typedef struct {
  size_t size;
  unsigned int magic, version;
  float time;
} SimInfo;

static int depth, wrong;
static void **late;

static const char *setting(const char *name) {
  char variable[64];
  snprintf(variable, sizeof variable, "NCCL_STUB_%s", name);
  return getenv(variable);
}

static int number(const char *name, int otherwise) {
  const char *text = setting(name);
  return text ? atoi(text) : otherwise;
}

static int called(const char *name, const char *format, ...) {
  FILE *log = fopen(getenv("NCCL_STUB_LOG"), "a");
  va_list arguments;
  va_start(arguments, format);
  fprintf(log, "%s ", name);
  vfprintf(log, format, arguments);
  fprintf(log, "\n");
  va_end(arguments);
  fclose(log);
  return number(name, 0);
}

static void hand_over(void **to) {
  if (setting("LATE")) {
    *to = NULL;
    late = to;
  } else {
    *to = CHILD;
  }
}

static const char *words(const Config *config) {
  static char text[512];
  char *end = text;
  if (!config) return "-";
  const int values[] = {config->blocking,   config->cgaClusterSize, config->minCTAs,   config->maxCTAs,
                        config->splitShare, config->trafficClass,   config->collnetEnable, config->CTAPolicy,
                        config->shrinkShare, config->nvlsCTAs};
  const char *names[] = {"blocking",       "cga",        "min",          "max",      "split_share", "traffic_class",
                         "collnet", "cta_policy", "shrink_share", "nvls"};
  for (int i = 0; i < 10; i++)
    if (values[i] != UNSET) end += sprintf(end, "%s=%d,", names[i], values[i]);
  if (config->netName) end += sprintf(end, "net=%s,", config->netName);
  if (config->commName) end += sprintf(end, "name=%s,", config->commName);
  return end == text ? "empty" : text;
}

int ncclGetVersion(int *version) { return *version = number("VERSION", 23203), 0; }

const char *ncclGetErrorString(int code) {
  static char text[32];
  sprintf(text, "error %d", code);
  return text;
}

const char *ncclGetLastError(void *comm) { return setting("LAST_ERROR") ? setting("LAST_ERROR") : ""; }

int ncclGetUniqueId(ncclUniqueId *id) {
  memset(id->internal, 'u', 128);
  return called("ncclGetUniqueId", "");
}

int ncclCommInitRankConfig(void **comm, int size, ncclUniqueId id, int rank, Config *config) {
  *comm = CHILD;
  late = setting("LATE") ? comm : NULL;
  return called("ncclCommInitRankConfig", "%d %.3s %d %s", size, id.internal, rank, words(config));
}

int ncclCommSplit(void *comm, int color, int key, void **child, Config *config) {
  hand_over(child);
  return called("ncclCommSplit", "%p %d %d %s", comm, color, key, words(config));
}

int ncclCommShrink(void *comm, int *excluded, int count, void **child, Config *config, int flags) {
  char ranks[64] = "", *end = ranks;
  for (int i = 0; i < count; i++) end += sprintf(end, "%d,", excluded[i]);
  hand_over(child);
  return called("ncclCommShrink", "%p %s %d %s %d", comm, ranks, count, words(config), flags);
}

int ncclCommGetAsyncError(void *comm, int *state) {
  *state = number("ASYNC", 0);
  if (late && !*state) {
    *late = CHILD;
    late = NULL;
  }
  return called("ncclCommGetAsyncError", "%p", comm);
}

int ncclCommFinalize(void *comm) { return called("ncclCommFinalize", "%p", comm); }
int ncclCommDestroy(void *comm) { return called("ncclCommDestroy", "%p", comm); }
int ncclCommAbort(void *comm) { return called("ncclCommAbort", "%p", comm); }
int ncclCommRevoke(void *comm, int flags) { return called("ncclCommRevoke", "%p %d", comm, flags); }

int ncclGroupStart(void) {
  depth++;
  return called("ncclGroupStart", "");
}

int ncclGroupEnd(void) {
  int code = called("ncclGroupEnd", ""), failed = wrong;
  wrong = 0;
  return depth-- > 0 ? (failed ? 4 : code) : (depth = 0, 5);
}

int ncclGroupSimulateEnd(SimInfo *info) {
  info->time = number("MICROSECONDS", 0);
  depth--;
  return called("ncclGroupSimulateEnd", "%x", info->magic);
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence, void *comm) {
  *op = 17;
  return called("ncclRedOpCreatePreMulSum", "%p %d %d %p", scalar, dtype, residence, comm);
}

int ncclRedOpDestroy(int op, void *comm) { return called("ncclRedOpDestroy", "%d %p", op, comm); }

int ncclAllReduce(void *from, void *to, size_t count, int dtype, int op, void *comm, void *stream) {
  return called("ncclAllReduce", "%p %p %zu %d %d %p %p", from, to, count, dtype, op, comm, stream);
}

int ncclReduceScatter(void *from, void *to, size_t count, int dtype, int op, void *comm, void *stream) {
  return called("ncclReduceScatter", "%p %p %zu %d %d %p %p", from, to, count, dtype, op, comm, stream);
}

int ncclReduce(void *from, void *to, size_t count, int dtype, int op, int root, void *comm, void *stream) {
  return called("ncclReduce", "%p %p %zu %d %d %d %p %p", from, to, count, dtype, op, root, comm, stream);
}

#define ROOTED(name)                                                                                            \
  int name(void *from, void *to, size_t count, int dtype, int root, void *comm, void *stream) {                  \
    wrong = wrong || (root < 0 && !setting("TAKES_ANY_ROOT"));                                                   \
    return called(#name, "%p %p %zu %d %d %p %p", from, to, count, dtype, root, comm, stream);                   \
  }
ROOTED(ncclBroadcast)
ROOTED(ncclGather)
ROOTED(ncclScatter)

#define EQUAL(name)                                                                                             \
  int name(void *from, void *to, size_t count, int dtype, void *comm, void *stream) {                            \
    return called(#name, "%p %p %zu %d %p %p", from, to, count, dtype, comm, stream);                            \
  }
EQUAL(ncclAllGather)
EQUAL(ncclAlltoAll)

#define MESSAGE(name)                                                                                           \
  int name(void *buffer, size_t count, int dtype, int peer, void *comm, void *stream) {                          \
    return called(#name, "%p %zu %d %d %p %p", buffer, count, dtype, peer, comm, stream);                        \
  }
MESSAGE(ncclSend)
MESSAGE(ncclRecv)

int ncclMemAlloc(void **address, size_t nbytes) {
  *address = (void *)0xa000;
  return called("ncclMemAlloc", "%zu", nbytes);
}

int ncclMemFree(void *address) { return called("ncclMemFree", "%p", address); }

int ncclCommRegister(void *comm, void *buffer, size_t nbytes, void **handle) {
  *handle = (void *)0x4a;
  return called("ncclCommRegister", "%p %p %zu", comm, buffer, nbytes);
}

int ncclCommDeregister(void *comm, void *handle) { return called("ncclCommDeregister", "%p %p", comm, handle); }

int ncclCommWindowRegister(void *comm, void *buffer, size_t nbytes, void **window, int flags) {
  hand_over(window);
  return called("ncclCommWindowRegister", "%p %p %zu %d", comm, buffer, nbytes, flags);
}

int ncclCommWindowDeregister(void *comm, void *window) {
  return called("ncclCommWindowDeregister", "%p %p", comm, window);
}

int ncclPutSignal(void *from, size_t count, int dtype, int peer, void *window, size_t offset, int signal, int context,
                  unsigned int flags, void *comm, void *stream) {
  return called("ncclPutSignal", "%p %zu %d %d %p %zu %d %d %u %p %p", from, count, dtype, peer, window, offset, signal,
                context, flags, comm, stream);
}

int ncclSignal(int peer, int signal, int context, unsigned int flags, void *comm, void *stream) {
  return called("ncclSignal", "%d %d %d %u %p %p", peer, signal, context, flags, comm, stream);
}

typedef struct {
  int count, peer, signal, context;
} Wait;

int ncclWaitSignal(int count, Wait *waits, void *comm, void *stream) {
  char text[256] = "", *end = text;
  for (int i = 0; i < count; i++)
    end += sprintf(end, "%d*%d/%d/%d,", waits[i].count, waits[i].peer, waits[i].signal, waits[i].context);
  return called("ncclWaitSignal", "%d %s %p %p", count, text, comm, stream);
}
