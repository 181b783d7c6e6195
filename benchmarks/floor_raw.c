/* The raw floor: the FUSE protocol answered by bare read(2) and writev(2), without libfuse.
 *
 *     floor_raw [--processes N] LISTING MOUNTPOINT
 *
 * N forked processes each own a clone of the device and serve the same generated tree as `floor`, with
 * zero-message open. What is left is the cost of the kernel's FUSE and of two system calls per request, so
 * no daemon of any language can be faster on one connection. Needs root: it calls mount(2) itself. Runs in
 * the foreground until it is unmounted.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "listing.h"

#define BACKGROUND_REQUESTS_MAX 4096
#define WRITE_BYTES_MAX (128u << 10)
/* The kernel refuses a read(2) of the device whose buffer could not hold the largest request. */
#define REQUEST_BYTES_MAX (WRITE_BYTES_MAX + 4096)

static _Alignas(8) char request_bytes[REQUEST_BYTES_MAX];
static _Alignas(8) char reply_bytes[CONTENT_BYTES];

static void reply(int device, uint64_t unique, int error, const void *data, size_t size) {
    struct fuse_out_header header = {.len = (uint32_t)(sizeof header + size), .error = -error, .unique = unique};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)data, size}};
    /* ENOENT (the caller was killed meanwhile) and ENODEV (unmounted) need no answer; anything else would
     * leave the caller waiting for ever, so the process ends and the mount with it. */
    if (writev(device, parts, size ? 2 : 1) < 0 && errno != ENOENT && errno != ENODEV)
        fail("floor_raw: reply");
}

static void fill_attributes(uint32_t number, struct fuse_attr *attributes) {
    const struct node *node = &tree.nodes[number];
    memset(attributes, 0, sizeof *attributes);
    attributes->ino = number;
    attributes->mode = tree_mode(number);
    attributes->nlink = node->link_count;
    attributes->size = node->size;
    attributes->blocks = (node->size + 511) / 512;
    attributes->blksize = 4096;
}

static void fill_entry(uint32_t number, struct fuse_entry_out *entry) {
    memset(entry, 0, sizeof *entry);
    entry->nodeid = number;
    entry->entry_valid = TIMEOUT_SECONDS;
    entry->attr_valid = TIMEOUT_SECONDS;
    if (number) /* 0: a negative entry, kept as long */
        fill_attributes(number, &entry->attr);
}

static size_t fill_listing(uint32_t number, const struct fuse_read_in *request) {
    const struct node *directory = &tree.nodes[number];
    size_t limit = request->size < sizeof reply_bytes ? request->size : sizeof reply_bytes;
    size_t used = 0;
    for (uint64_t index = request->offset; index < directory->child_count; index++) {
        uint32_t child = tree.children[directory->first_child + index];
        const struct node *node = &tree.nodes[child];
        struct fuse_direntplus *entry = (void *)(reply_bytes + used);
        size_t bytes = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET_DIRENTPLUS + node->name_bytes);
        if (bytes > limit - used)
            break;
        fill_entry(child, &entry->entry_out);
        entry->dirent.ino = child;
        entry->dirent.off = index + 1;
        entry->dirent.namelen = node->name_bytes;
        entry->dirent.type = tree_mode(child) >> 12;
        memcpy(entry->dirent.name, node->name, node->name_bytes);
        used += bytes;
    }
    return used;
}

static void answer(int device, const struct fuse_in_header *header) {
    const void *body = header + 1;
    uint32_t number = (uint32_t)header->nodeid;
    switch (header->opcode) {
    case FUSE_LOOKUP: {
        struct fuse_entry_out entry;
        fill_entry(tree_lookup(number, body, strlen(body)), &entry);
        reply(device, header->unique, 0, &entry, sizeof entry);
        break;
    }
    case FUSE_GETATTR: {
        struct fuse_attr_out attributes = {.attr_valid = TIMEOUT_SECONDS};
        fill_attributes(number, &attributes.attr);
        reply(device, header->unique, 0, &attributes, sizeof attributes);
        break;
    }
    case FUSE_READ: {
        const struct fuse_read_in *request = body;
        reply(device, header->unique, 0, content, tree_read_bytes(number, request->offset, request->size));
        break;
    }
    case FUSE_READDIRPLUS:
        reply(device, header->unique, 0, reply_bytes, fill_listing(number, body));
        break;
    case FUSE_STATFS: {
        struct fuse_statfs_out status = {.st = {.bsize = 4096, .frsize = 4096, .namelen = 255}};
        reply(device, header->unique, 0, &status, sizeof status);
        break;
    }
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        break; /* no reply by protocol; nothing here waits, so nothing is interrupted */
    default:
        reply(device, header->unique, ENOSYS, NULL, 0); /* OPEN and OPENDIR too: this is zero-message open */
    }
}

static void handshake(int device) {
    ssize_t size = read(device, request_bytes, sizeof request_bytes);
    const struct fuse_in_header *header = (const void *)request_bytes;
    if (size < (ssize_t)sizeof *header || header->opcode != FUSE_INIT)
        fail("floor_raw: INIT");
    const struct fuse_init_in *offer = (const void *)(header + 1);
    struct fuse_init_out choice = {
        .major = FUSE_KERNEL_VERSION,
        .minor = FUSE_KERNEL_MINOR_VERSION,
        .max_readahead = offer->max_readahead,
        .flags = offer->flags & (FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_DO_READDIRPLUS |
                                 FUSE_NO_OPEN_SUPPORT | FUSE_NO_OPENDIR_SUPPORT),
        .max_background = BACKGROUND_REQUESTS_MAX,
        .congestion_threshold = BACKGROUND_REQUESTS_MAX,
        .max_write = WRITE_BYTES_MAX,
        .time_gran = 1,
        .max_pages = CONTENT_BYTES / 4096,
    };
    reply(device, header->unique, 0, &choice, sizeof choice);
}

static void serve_clone(int device) {
    uint32_t source = (uint32_t)device;
    int clone = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (clone < 0 || ioctl(clone, FUSE_DEV_IOC_CLONE, &source))
        fail("floor_raw: clone of /dev/fuse");
    close(device);
    for (;;) {
        ssize_t size = read(clone, request_bytes, sizeof request_bytes);
        if (size >= (ssize_t)sizeof(struct fuse_in_header))
            answer(clone, (const void *)request_bytes);
        else if (size < 0 && errno == ENODEV)
            exit(0); /* unmounted */
        else if (size < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT)
            fail("floor_raw: request");
    }
}

int main(int count, char **words) {
    long processes = sysconf(_SC_NPROCESSORS_ONLN);
    int at = 1;
    if (count > 2 && !strcmp(words[1], "--processes")) {
        processes = strtol(words[2], NULL, 10);
        at = 3;
    }
    if (count - at != 2 || processes < 1) {
        fprintf(stderr, "usage: floor_raw [--processes N] LISTING MOUNTPOINT\n");
        return 2;
    }
    tree_load(words[at]);
    int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0)
        fail("/dev/fuse");
    char options[128];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,default_permissions", device);
    if (mount("floor_raw", words[at + 1], "fuse", MS_RDONLY | MS_NOSUID | MS_NODEV, options))
        fail("floor_raw: mount");
    handshake(device);
    for (long index = 0; index < processes; index++) {
        pid_t child = fork();
        if (child < 0)
            fail("floor_raw: fork");
        if (!child) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* a killed parent leaves no server behind */
            serve_clone(device);
        }
    }
    close(device); /* the connection then lives as long as its servers */
    while (wait(NULL) > 0) {
    }
    return 0;
}
