/* A disk that fails: preloaded into a party, it counts the changes that the party makes below FAULTY_FOLDER, and at the
   FAULTY_AFTER-th one the process dies (FAULTY_KIND=kill) or the call fails (enospc, eio), FAULTY_COUNT times in a row. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long seen = 0, after = -2, count = 1;
static int kind = 0; /* 0: kill, ENOSPC or EIO otherwise */
static char folder[4096];

static int begins(const char *path) {
  size_t length = strlen(folder);
  return length && strncmp(path, folder, length) == 0 && path[length] == '/';
}

static void read_settings(void) {
  const char *value = getenv("FAULTY_AFTER");
  after = value ? atol(value) : -1;
  value = getenv("FAULTY_COUNT");
  count = value ? atol(value) : 1;
  value = getenv("FAULTY_KIND");
  kind = value == NULL || !strcmp(value, "kill") ? 0 : !strcmp(value, "enospc") ? ENOSPC : EIO;
  value = getenv("FAULTY_FOLDER");
  snprintf(folder, sizeof folder, "%s", value ? value : "");
}

/* A forked process reads its own settings. */
void faulty_settings(void) {
  read_settings();
  seen = 0;
}

static int fails(void) {
  int result = 0;
  pthread_mutex_lock(&lock);
  if (after >= 0) {
    seen++;
    if (seen > after && seen <= after + count) {
      if (kind == 0) _exit(137);
      result = kind;
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static int path_fails(const char *path) {
  char real[4096];
  if (after == -2) read_settings();
  if (after < 0 || path == NULL) return 0;
  if (path[0] != '/') {
    char here[2048];
    if (getcwd(here, sizeof here) == NULL) return 0;
    snprintf(real, sizeof real, "%s/%s", here, path);
  } else {
    snprintf(real, sizeof real, "%s", path);
  }
  return begins(real) ? fails() : 0;
}

static int descriptor_fails(int fd) {
  char name[64], path[4096];
  if (after == -2) read_settings();
  if (after < 0) return 0;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  return begins(path) ? fails() : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(test) do { int error_ = (test); if (error_) { errno = error_; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t size) { FAIL_IF(descriptor_fails(fd)); return REAL(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { FAIL_IF(descriptor_fails(fd)); return REAL(pwrite)(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { FAIL_IF(descriptor_fails(fd)); return REAL(pwrite64)(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *data, int size) { FAIL_IF(descriptor_fails(fd)); return REAL(writev)(fd, data, size); }
int fsync(int fd) { FAIL_IF(descriptor_fails(fd)); return REAL(fsync)(fd); }
int fdatasync(int fd) { FAIL_IF(descriptor_fails(fd)); return REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { FAIL_IF(descriptor_fails(fd)); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { FAIL_IF(descriptor_fails(fd)); return REAL(ftruncate64)(fd, size); }
int rename(const char *from, const char *to) { FAIL_IF(path_fails(to)); return REAL(rename)(from, to); }
int unlink(const char *path) { FAIL_IF(path_fails(path)); return REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { FAIL_IF(path_fails(path)); return REAL(mkdir)(path, mode); }

static int opens(const char *path, int flags) { return (flags & (O_CREAT | O_TRUNC)) ? path_fails(path) : 0; }
#define OPENED(name) \
  int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    FAIL_IF(opens(path, flags)); \
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); \
  }
OPENED(open)
OPENED(open64)
int openat(int at, const char *path, int flags, ...) {
  va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);
  FAIL_IF(opens(path, flags));
  return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat"))(at, path, flags, mode);
}
