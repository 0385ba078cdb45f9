// A file system that hangs, for the processes of one test (LD_PRELOAD): a look at a path that contains $HANGING_FILES waits as
// long as the file "$HANGING_FILES.hangs" is there.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void wait_for(const char* path) {
  const char* hanging = getenv("HANGING_FILES");
  char switched_on[4096];
  if (hanging == NULL || path == NULL || strstr(path, hanging) == NULL) return;
  snprintf(switched_on, sizeof switched_on, "%s.hangs", hanging);
  const struct timespec pause = {0, 20000000};
  while (faccessat(AT_FDCWD, switched_on, F_OK, 0) == 0) nanosleep(&pause, NULL);
}

#define HANGS(name, parameters, path, arguments)                         \
  int name parameters {                                                  \
    static int(*next) parameters;                                        \
    if (next == NULL) next = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
    wait_for(path);                                                      \
    return next arguments;                                               \
  }

HANGS(stat, (const char* path, struct stat* found), path, (path, found))
HANGS(stat64, (const char* path, struct stat64* found), path, (path, found))
HANGS(fstatat, (int folder, const char* path, struct stat* found, int flags), path,
      (folder, path, found, flags))
HANGS(fstatat64, (int folder, const char* path, struct stat64* found, int flags), path,
      (folder, path, found, flags))
