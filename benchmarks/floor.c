/* The libfuse floor: the fastest answers a libfuse 3 low-level daemon can give, because it does nothing.
 *
 *     floor [--no-open] [--threads N] LISTING MOUNTPOINT
 *
 * Names and sizes come from a listing, bytes from one constant buffer. Every lever a real server has is
 * pulled: cloned devices, several threads, READDIRPLUS, timeouts for ever, kept page caches and listings,
 * no FLUSH, no xattrs, a long background queue. With --no-open OPEN and OPENDIR are refused once with
 * ENOSYS, after which the kernel opens files by itself ("zero-message open"). Runs in the foreground
 * until it is unmounted or signalled.
 */
#define FUSE_USE_VERSION 312
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <stdlib.h>
#include <string.h>

#include "listing.h"

/* libfuse leaves the kernel's default of 12 otherwise, and then the queue is measured, not the server. */
#define BACKGROUND_REQUESTS_MAX 4096

static bool no_open;

static void fill_attributes(uint32_t number, struct stat *attributes) {
    const struct node *node = &tree.nodes[number];
    memset(attributes, 0, sizeof *attributes);
    attributes->st_ino = number;
    attributes->st_mode = tree_mode(number);
    attributes->st_nlink = node->link_count;
    attributes->st_size = (off_t)node->size;
    attributes->st_blocks = (blkcnt_t)((node->size + 511) / 512);
    attributes->st_blksize = 4096;
}

static void fill_entry(uint32_t number, struct fuse_entry_param *entry) {
    memset(entry, 0, sizeof *entry);
    entry->ino = number;
    entry->attr_timeout = TIMEOUT_SECONDS;
    entry->entry_timeout = TIMEOUT_SECONDS;
    fill_attributes(number, &entry->attr);
}

static void floor_init(void *data, struct fuse_conn_info *connection) {
    (void)data;
    connection->max_background = BACKGROUND_REQUESTS_MAX;
    connection->congestion_threshold = BACKGROUND_REQUESTS_MAX;
    /* Nothing changes: caches need no revalidation, and every listing may bring its attributes along. */
    connection->want &= ~(unsigned)(FUSE_CAP_AUTO_INVAL_DATA | FUSE_CAP_READDIRPLUS_AUTO);
    connection->want |= connection->capable & (FUSE_CAP_READDIRPLUS | FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ);
}

static void floor_lookup(fuse_req_t request, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    uint32_t number = tree_lookup((uint32_t)parent, name, strlen(name));
    if (number) {
        fill_entry(number, &entry);
    } else { /* node 0 with a timeout is a negative entry the kernel may keep */
        memset(&entry, 0, sizeof entry);
        entry.entry_timeout = TIMEOUT_SECONDS;
    }
    fuse_reply_entry(request, &entry);
}

static void floor_getattr(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info) {
    struct stat attributes;
    (void)info;
    fill_attributes((uint32_t)number, &attributes);
    fuse_reply_attr(request, &attributes, TIMEOUT_SECONDS);
}

static void floor_open(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info) {
    (void)number;
    if (no_open) {
        fuse_reply_err(request, ENOSYS);
        return;
    }
    info->keep_cache = 1;
    fuse_reply_open(request, info);
}

static void floor_opendir(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *info) {
    (void)number;
    if (no_open) {
        fuse_reply_err(request, ENOSYS);
        return;
    }
    info->keep_cache = 1;
    info->cache_readdir = 1;
    fuse_reply_open(request, info);
}

static void floor_read(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)info;
    fuse_reply_buf(request, content, tree_read_bytes((uint32_t)number, (uint64_t)offset, size));
}

/* "." and ".." are left out, as POSIX allows: the offset of an entry is then simply the index of the next child. */
static void floor_readdirplus(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset,
                              struct fuse_file_info *info) {
    (void)info;
    const struct node *directory = &tree.nodes[number];
    char *buffer = malloc(size);
    size_t used = 0;
    if (!buffer) {
        fuse_reply_err(request, ENOMEM);
        return;
    }
    for (uint32_t index = (uint32_t)offset; index < directory->child_count; index++) {
        struct fuse_entry_param entry;
        uint32_t child = tree.children[directory->first_child + index];
        fill_entry(child, &entry);
        size_t bytes = fuse_add_direntry_plus(request, buffer + used, size - used, tree.nodes[child].name, &entry,
                                              (off_t)index + 1);
        if (bytes > size - used)
            break;
        used += bytes;
    }
    fuse_reply_buf(request, buffer, used);
    free(buffer);
}

/* What is absent here (flush, the xattr calls, access) libfuse refuses with ENOSYS, which the kernel remembers. */
static const struct fuse_lowlevel_ops operations = {
    .init = floor_init,
    .lookup = floor_lookup,
    .getattr = floor_getattr,
    .open = floor_open,
    .opendir = floor_opendir,
    .read = floor_read,
    .readdirplus = floor_readdirplus,
};

static int serve(struct fuse_session *session, unsigned threads) {
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    fuse_loop_cfg_set_clone_fd(loop, 1);
    fuse_loop_cfg_set_max_threads(loop, threads);
    fuse_loop_cfg_set_idle_threads(loop, threads); /* a thread that was started stays */
    int status = fuse_session_loop_mt(session, loop);
    fuse_loop_cfg_destroy(loop);
    return status;
}

int main(int count, char **words) {
    unsigned threads = 10; /* the default of libfuse */
    int at = 1;
    for (; at < count && words[at][0] == '-'; at++) {
        if (!strcmp(words[at], "--no-open"))
            no_open = true;
        else if (!strcmp(words[at], "--threads") && at + 1 < count)
            threads = (unsigned)strtoul(words[++at], NULL, 10);
    }
    if (count - at != 2 || !threads) {
        fprintf(stderr, "usage: floor [--no-open] [--threads N] LISTING MOUNTPOINT\n");
        return 2;
    }
    tree_load(words[at]);
    char *options[] = {words[0], "-o", "ro,default_permissions,fsname=floor"};
    struct fuse_args arguments = FUSE_ARGS_INIT(3, options);
    struct fuse_session *session = fuse_session_new(&arguments, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) || fuse_session_mount(session, words[at + 1]))
        return 1;
    int status = serve(session, threads);
    fuse_session_unmount(session);
    fuse_remove_signal_handlers(session);
    fuse_session_destroy(session);
    fuse_opt_free_args(&arguments);
    return status ? 1 : 0;
}
