// A disk with faults, for the processes of one test (LD_PRELOAD): of the reads of GGUF files, some fail, some bring less than
// was asked for, and some take their time. The order of faults follows from a counter. Or it has no faults and a rate. Or, for
// a server's processes, files in the folder $DISK_FAULTS say what happens, as long as they are there: "hangs", "is_slow", "fails".
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t (*Pread)(int, void*, size_t, off_t);

static atomic_ulong reads, failed, cut, delayed;
static atomic_int is_on;

void faulty_reads_switch(int on) { atomic_store(&is_on, on); }
unsigned long faulty_reads_failed(void) { return atomic_load(&failed); }
unsigned long faulty_reads_cut(void) { return atomic_load(&cut); }
unsigned long faulty_reads_delayed(void) { return atomic_load(&delayed); }

static atomic_ulong bytes_per_s;  // 0: as fast as the disk is
static atomic_ulong free_at;      // ns, when the throttled disk has read all that it was asked for so far

void faulty_reads_throttle(unsigned long rate) { atomic_store(&bytes_per_s, rate); }

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// One read after another, as a throttled device does them.
static void wait_for_turn(size_t count, unsigned long rate) {
  const uint64_t own = count * 1000000000u / rate, now = now_ns();
  unsigned long before = atomic_load(&free_at), end;
  do {
    end = (before > now ? before : now) + own;
  } while (!atomic_compare_exchange_weak(&free_at, &before, end));
  const struct timespec until = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

static int has_fault(const char* name) {
  char path[4096];
  const char* folder = getenv("DISK_FAULTS");
  if (folder == NULL) return 0;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return access(path, F_OK) == 0;
}

static int is_model(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  return size > 5 && memcmp(path + size - 5, ".gguf", 5) == 0;
}

static ssize_t faulty(Pread real, int fd, void* to, size_t count, off_t offset) {
  const unsigned long rate = atomic_load(&bytes_per_s);
  if (rate != 0 && is_model(fd)) wait_for_turn(count, rate);
  if (getenv("DISK_FAULTS") != NULL && is_model(fd)) {
    while (has_fault("hangs")) usleep(10000);
    if (has_fault("is_slow")) usleep(300000);
    if (has_fault("fails")) {
      errno = EIO;
      return -1;
    }
  }
  if (!atomic_load(&is_on) || !is_model(fd)) return real(fd, to, count, offset);
  const uint64_t n = atomic_fetch_add(&reads, 1);
  switch (n * 0x9E3779B97F4A7C15u >> 60) {
    case 0:
    case 1:
    case 2:
    case 3:
      atomic_fetch_add(&failed, 1);
      errno = EIO;
      return -1;
    case 4:
    case 5:
      atomic_fetch_add(&cut, 1);
      return real(fd, to, 1 + n * 977 % count, offset);
    case 6:
    case 7:
      atomic_fetch_add(&delayed, 1);
      usleep(2000);
      break;
    default:
      break;
  }
  return real(fd, to, count, offset);
}

ssize_t pread(int fd, void* to, size_t count, off_t offset) {
  static Pread real;
  if (real == NULL) real = (Pread)dlsym(RTLD_NEXT, "pread");
  return faulty(real, fd, to, count, offset);
}

ssize_t pread64(int fd, void* to, size_t count, off_t offset) {
  static Pread real;
  if (real == NULL) real = (Pread)dlsym(RTLD_NEXT, "pread64");
  return faulty(real, fd, to, count, offset);
}
