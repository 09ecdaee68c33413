// A stand-in for libcuda or libamdhip64 (-DPREFIX=hip) on the host: addresses of mmap, memory that is counted. It
// refuses what the real ones refuse and can be told to fail: vmm_fail("Map", 2) fails the second MemMap from now on.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#ifndef PREFIX
#define PREFIX cu
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define API(name) JOIN(PREFIX, name)

enum { GRANULARITY = 1 << 16, MOST = 4096, INVALID = 1, OUT_OF_MEMORY = 2 };

typedef struct {
  int type, id;
} Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *win32;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
} Properties;
typedef struct {
  Location location;
  int flags;
} Access;

static struct {
  uint64_t start, size, handle;
} reserved_[MOST], mapped_[MOST];
static uint64_t handles_[MOST];
static char log_[1 << 16], failing_[32];
static int countdown_;

uint64_t vmm_limit = 1 << 24, vmm_used, vmm_device = 3, vmm_sticky;

const char *vmm_log(void) { return log_; }
void vmm_clear(void) { log_[0] = 0; }
void vmm_fail(const char *name, int countdown) {
  snprintf(failing_, sizeof failing_, "%s", name);
  countdown_ = countdown;
}
uint64_t vmm_count(const char *what) {
  uint64_t count = 0;
  for (int i = 0; i < MOST; i++)
    count += !strcmp(what, "reserved") ? reserved_[i].size > 0 : !strcmp(what, "mapped") ? mapped_[i].size > 0 : handles_[i] > 0;
  return count;
}

static int begin(const char *name) {
  size_t length = strlen(log_);
  snprintf(log_ + length, sizeof log_ - length, "%s ", name);
  return countdown_ && !strcmp(name, failing_) && !--countdown_ ? 999 : 0;
}

#define BEGIN(name) \
  int code = begin(name); \
  if (code) return code

int API(Init)(unsigned flags) { return flags; }

#ifdef HIP
const char *hipGetErrorString(int code) { return code == OUT_OF_MEMORY ? "out of memory" : "told to fail"; }
#else
int cuGetErrorString(int code, const char **text) {
  *text = code == OUT_OF_MEMORY ? "out of memory" : "told to fail";
  return 0;
}
#endif

static int refused(const Properties *p) {
  return p->type != 1 || p->handle_types || p->location.type != 1 || (uint64_t)p->location.id != vmm_device || p->win32 ||
         p->flags.compression || p->flags.rdma || p->flags.usage;
}

int API(MemGetAllocationGranularity)(size_t *size, const Properties *p, int option) {
  BEGIN("Granularity");
  if (refused(p) || option) return INVALID;
  *size = GRANULARITY;
  return 0;
}

int API(MemAddressReserve)(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
  BEGIN("Reserve");
  if (!size || size % GRANULARITY || alignment != GRANULARITY || flags) return INVALID;
  int flags_ = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  uint64_t room = size;
  char *start = MAP_FAILED;  // what is wanted is a hint
  if (wanted) start = mmap((void *)wanted, room, PROT_NONE, flags_ | MAP_FIXED_NOREPLACE, -1, 0);
  if (start == MAP_FAILED) start = mmap(NULL, room = size + GRANULARITY, PROT_NONE, flags_, -1, 0);
  if (start == MAP_FAILED) return OUT_OF_MEMORY;
  uint64_t aligned = ((uint64_t)start + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (aligned > (uint64_t)start) munmap(start, aligned - (uint64_t)start);
  uint64_t end = (uint64_t)start + room;
  if (end > aligned + size) munmap((void *)(aligned + size), end - aligned - size);
  for (int i = 0; i < MOST; i++)
    if (!reserved_[i].size) {
      reserved_[i].start = *address = aligned;
      reserved_[i].size = size;
      return 0;
    }
  return INVALID;
}

int API(MemAddressFree)(uint64_t address, size_t size) {
  BEGIN("Free");
  for (int i = 0; i < MOST; i++)  // nothing may be mapped there
    if (mapped_[i].size && mapped_[i].start >= address && mapped_[i].start < address + size) return INVALID;
  for (int i = 0; i < MOST; i++)
    if (reserved_[i].start == address && reserved_[i].size == size) {
      reserved_[i].size = 0;
      munmap((void *)address, size);
      vmm_used -= vmm_sticky;
      vmm_sticky = 0;
      return 0;
    }
  return INVALID;
}

int API(MemCreate)(uint64_t *handle, size_t size, const Properties *p, unsigned long long flags) {
  BEGIN("Create");
  if (refused(p) || flags || !size || size % GRANULARITY) return INVALID;
  if (vmm_used + size > vmm_limit) return OUT_OF_MEMORY;
  for (int i = 0; i < MOST; i++)
    if (!handles_[i]) {
      handles_[i] = size;
      vmm_used += size;
      *handle = i + 1000;
      return 0;
    }
  return INVALID;
}

int API(MemMap)(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
  BEGIN("Map");
  if (address % GRANULARITY || offset || flags || handle < 1000 || handles_[handle - 1000] != size) return INVALID;
  int inside = 0;
  for (int i = 0; i < MOST; i++) {
    if (mapped_[i].size && mapped_[i].start < address + size && address < mapped_[i].start + mapped_[i].size) return INVALID;
    inside |= reserved_[i].size && reserved_[i].start <= address && address + size <= reserved_[i].start + reserved_[i].size;
  }
  if (!inside) return INVALID;
  for (int i = 0; i < MOST; i++)
    if (!mapped_[i].size) {
      mapped_[i].start = address, mapped_[i].size = size, mapped_[i].handle = handle;
      return 0;
    }
  return INVALID;
}

int API(MemSetAccess)(uint64_t address, size_t size, const Access *access, size_t count) {
  BEGIN("SetAccess");
  if (count != 1 || access->flags != 3 || access->location.type != 1 || (uint64_t)access->location.id != vmm_device)
    return INVALID;
  for (int i = 0; i < MOST; i++)
    if (mapped_[i].start == address && mapped_[i].size == size) {
      if (mprotect((void *)address, size, PROT_READ | PROT_WRITE)) return INVALID;
      memset((void *)address, 0xA5, size);  // memory that was another's
      return 0;
    }
  return INVALID;
}

int API(MemUnmap)(uint64_t address, size_t size) {
  BEGIN("Unmap");
  for (int i = 0; i < MOST; i++)
    if (mapped_[i].start == address && mapped_[i].size == size) {
      mapped_[i].size = 0;
      mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      return 0;
    }
  return INVALID;
}

int API(MemRelease)(uint64_t handle) {
  BEGIN("Release");
  if (handle < 1000 || !handles_[handle - 1000]) return INVALID;
  for (int i = 0; i < MOST; i++)
    if (mapped_[i].size && mapped_[i].handle == handle) return INVALID;
#ifdef HIP
  vmm_sticky += handles_[handle - 1000];  // HIP: until the addresses go, too
#else
  vmm_used -= handles_[handle - 1000];
#endif
  handles_[handle - 1000] = 0;
  return 0;
}
