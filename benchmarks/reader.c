/* The reader: opens, reads and closes every file of a listing once, in a seeded random order.
 *
 *     reader [--threads N] [--seed S] [--cpu C] LISTING ROOT
 *         prints {"seconds": …, "files": …, "bytes": …} for one whole pass
 *     reader --probe ROOT FILE
 *         stat of ROOT, a listing of ROOT and a whole read of ROOT/FILE; prints nothing
 *
 * In C, so that the client costs little beside the server. A file is read until a read comes back short,
 * which spares the extra read that only finds the end. The clock starts when all threads stand ready. --cpu
 * pins all threads to one processor.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BUFFER_BYTES (1u << 20)
#define THREADS_MAX 1024

static char **paths;
static size_t path_count;
static size_t next_path; /* taken by atomic addition: threads that meet slow files take fewer */
static int root;
static pthread_barrier_t start;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t read_file(int directory, const char *path, char *buffer) {
    int file = openat(directory, path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        fail(path);
    uint64_t bytes = 0;
    ssize_t got;
    do {
        got = read(file, buffer, BUFFER_BYTES);
        if (got < 0)
            fail(path);
        bytes += (uint64_t)got;
    } while (got == BUFFER_BYTES);
    close(file);
    return bytes;
}

static void *read_share(void *result) {
    char *buffer = malloc(BUFFER_BYTES);
    if (!buffer)
        fail("buffer");
    uint64_t bytes = 0;
    pthread_barrier_wait(&start);
    for (;;) {
        size_t index = __atomic_fetch_add(&next_path, 1, __ATOMIC_RELAXED);
        if (index >= path_count)
            break;
        bytes += read_file(root, paths[index], buffer);
    }
    free(buffer);
    *(uint64_t *)result = bytes;
    return NULL;
}

static void load_listing(const char *path) {
    FILE *file = fopen(path, "r");
    struct stat status;
    if (!file || fstat(fileno(file), &status))
        fail(path);
    char *text = malloc((size_t)status.st_size + 1);
    if (!text || fread(text, 1, (size_t)status.st_size, file) != (size_t)status.st_size)
        fail(path);
    text[status.st_size] = 0;
    fclose(file);
    size_t lines = 0;
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        lines++;
    paths = calloc(lines + 1, sizeof *paths);
    if (!paths)
        fail("paths");
    for (char *save, *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        if (line[0] == 'f')
            paths[path_count++] = strchr(line + 2, ' ') + 1;
}

static uint64_t random_next(uint64_t *state) { /* splitmix64 */
    uint64_t value = *state += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

static void shuffle(uint64_t seed) {
    for (size_t left = path_count; left > 1; left--) {
        size_t other = random_next(&seed) % left;
        char *path = paths[left - 1];
        paths[left - 1] = paths[other];
        paths[other] = path;
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void open_root(const char *path) {
    root = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        fail(path);
}

static int probe(const char *path, const char *file) {
    struct stat status;
    if (stat(path, &status))
        fail(path);
    DIR *listing = opendir(path);
    if (!listing)
        fail(path);
    errno = 0;
    while (readdir(listing)) {
    }
    if (errno)
        fail(path);
    closedir(listing);
    char *buffer = malloc(BUFFER_BYTES);
    if (!buffer)
        fail("buffer");
    open_root(path);
    return read_file(root, file, buffer) ? 0 : 1;
}

static int read_all(int threads) {
    pthread_t handles[THREADS_MAX];
    uint64_t shares[THREADS_MAX], bytes = 0;
    pthread_barrier_init(&start, NULL, (unsigned)threads + 1);
    for (int index = 0; index < threads; index++)
        if (pthread_create(&handles[index], NULL, read_share, &shares[index]))
            fail("thread");
    /* Taken before the barrier: threads may run before the main thread comes back from it. */
    double begin = now();
    pthread_barrier_wait(&start);
    for (int index = 0; index < threads; index++) {
        pthread_join(handles[index], NULL);
        bytes += shares[index];
    }
    printf("{\"seconds\": %.6f, \"files\": %zu, \"bytes\": %llu}\n", now() - begin, path_count,
           (unsigned long long)bytes);
    return 0;
}

int main(int count, char **words) {
    if (count == 4 && !strcmp(words[1], "--probe"))
        return probe(words[2], words[3]);
    int threads = 1, at = 1;
    uint64_t seed = 1;
    for (; at + 1 < count && words[at][0] == '-'; at += 2) {
        if (!strcmp(words[at], "--threads")) {
            threads = atoi(words[at + 1]);
        } else if (!strcmp(words[at], "--seed")) {
            seed = strtoull(words[at + 1], NULL, 10);
        } else if (!strcmp(words[at], "--cpu")) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(strtoul(words[at + 1], NULL, 10), &set);
            if (sched_setaffinity(0, sizeof set, &set))
                fail("--cpu");
        } else {
            break;
        }
    }
    if (count - at != 2 || threads < 1 || threads > THREADS_MAX) {
        fprintf(stderr, "usage: reader [--threads N] [--seed S] [--cpu C] LISTING ROOT | reader --probe ROOT FILE\n");
        return 2;
    }
    load_listing(words[at]);
    shuffle(seed);
    open_root(words[at + 1]);
    return read_all(threads);
}
