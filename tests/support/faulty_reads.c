// A disk with faults, for the processes of one test (LD_PRELOAD): of the reads of GGUF files, some fail, some bring less than
// was asked for, and some take their time. The order of faults follows from a counter.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*Pread)(int, void*, size_t, off_t);

static atomic_ulong reads, failed, cut, delayed;
static atomic_int is_on;

void faulty_reads_switch(int on) { atomic_store(&is_on, on); }
unsigned long faulty_reads_failed(void) { return atomic_load(&failed); }
unsigned long faulty_reads_cut(void) { return atomic_load(&cut); }
unsigned long faulty_reads_delayed(void) { return atomic_load(&delayed); }

static int is_model(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  return size > 5 && memcmp(path + size - 5, ".gguf", 5) == 0;
}

static ssize_t faulty(Pread real, int fd, void* to, size_t count, off_t offset) {
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
