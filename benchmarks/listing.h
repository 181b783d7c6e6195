/* The generated tree that both floors answer from: names and sizes of a data set, no bytes.
 *
 * A listing is a text file, parents before children, one entry a line:
 *
 *     d 0 PATH          a directory
 *     f SIZE PATH       a regular file of SIZE bytes
 *
 * PATH is relative to the root, without a leading slash, and holds no newline. Node 1 is the root.
 * The tree is built once before the mount and never changes, so threads and forked processes share it
 * without a lock.
 */
#ifndef BENCHMARKS_LISTING_H
#define BENCHMARKS_LISTING_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* One READ asks for at most 256 pages (the limit of the kernel), so every answer is a prefix of this. */
#define CONTENT_BYTES (1u << 20)

/* "Always", in seconds: far past the life of a mount, small enough for any conversion to kernel ticks. */
#define TIMEOUT_SECONDS (1u << 24)

struct node {
    const char *name;
    uint32_t name_bytes;
    uint32_t parent;
    uint32_t first_child; /* index into tree.children */
    uint32_t child_count;
    uint32_t link_count;
    bool is_directory;
    uint64_t size;
};

struct tree {
    struct node *nodes; /* nodes[0] is unused: the index is the node number */
    uint32_t node_count;
    uint32_t *children; /* children of one directory stand together, in the order of the listing */
    uint32_t *slots;    /* open addressing over (parent, name); 0 is an empty slot */
    uint32_t slot_mask;
};

static struct tree tree;
static char content[CONTENT_BYTES];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void *allocate(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        fail("listing");
    return memory;
}

static uint32_t slot_of(uint32_t parent, const char *name, size_t name_bytes) {
    uint64_t hash = 14695981039346656037u ^ parent; /* FNV-1a */
    for (size_t i = 0; i < name_bytes; i++)
        hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
    return (uint32_t)(hash ^ (hash >> 32)) & tree.slot_mask;
}

/* The node of a name in a directory, or 0. */
static uint32_t tree_lookup(uint32_t parent, const char *name, size_t name_bytes) {
    for (uint32_t slot = slot_of(parent, name, name_bytes);; slot = (slot + 1) & tree.slot_mask) {
        uint32_t number = tree.slots[slot];
        if (!number)
            return 0;
        const struct node *node = &tree.nodes[number];
        if (node->parent == parent && node->name_bytes == name_bytes && !memcmp(node->name, name, name_bytes))
            return number;
    }
}

static uint32_t tree_resolve_parent(char *path, char **last_name) {
    uint32_t parent = 1;
    for (char *slash; (slash = strchr(path, '/')); path = slash + 1) {
        parent = tree_lookup(parent, path, (size_t)(slash - path));
        if (!parent) {
            fprintf(stderr, "listing: %s stands before its directory\n", path);
            exit(1);
        }
    }
    *last_name = path;
    return parent;
}

static void tree_add(uint32_t number, uint32_t parent, char *name, bool is_directory, uint64_t size) {
    struct node *node = &tree.nodes[number];
    node->name = name;
    node->name_bytes = (uint32_t)strlen(name);
    node->parent = parent;
    node->is_directory = is_directory;
    node->size = size;
    node->link_count = is_directory ? 2 : 1;
    tree.nodes[parent].child_count++;
    tree.nodes[parent].link_count += is_directory;
    uint32_t slot = slot_of(parent, name, node->name_bytes);
    while (tree.slots[slot])
        slot = (slot + 1) & tree.slot_mask;
    tree.slots[slot] = number;
}

static void tree_group_children(void) {
    uint32_t *filled = allocate(tree.node_count + 1u, sizeof *filled);
    uint32_t next = 0;
    for (uint32_t number = 1; number <= tree.node_count; number++) {
        tree.nodes[number].first_child = next;
        next += tree.nodes[number].child_count;
    }
    for (uint32_t number = 2; number <= tree.node_count; number++) {
        uint32_t parent = tree.nodes[number].parent;
        tree.children[tree.nodes[parent].first_child + filled[parent]++] = number;
    }
    free(filled);
}

static char *read_text(const char *path) {
    FILE *file = fopen(path, "r");
    struct stat status;
    if (!file || fstat(fileno(file), &status))
        fail(path);
    char *text = allocate((size_t)status.st_size + 1, 1);
    if (fread(text, 1, (size_t)status.st_size, file) != (size_t)status.st_size)
        fail(path);
    fclose(file);
    return text;
}

static void tree_load(const char *path) {
    char *text = read_text(path); /* kept: the names point into it */
    uint32_t lines = 0;
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        lines++;
    uint32_t slots = 16;
    while (slots < 2 * (lines + 1))
        slots *= 2;
    tree.nodes = allocate(lines + 2u, sizeof *tree.nodes);
    tree.children = allocate(lines + 1u, sizeof *tree.children);
    tree.slots = allocate(slots, sizeof *tree.slots);
    tree.slot_mask = slots - 1;
    tree.node_count = 1;
    tree.nodes[1] = (struct node){.name = "", .parent = 1, .link_count = 2, .is_directory = true};
    for (char *save, *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *name, *at = line + 2;
        uint64_t size = strtoull(at, &at, 10);
        uint32_t parent = tree_resolve_parent(at + 1, &name);
        tree_add(++tree.node_count, parent, name, line[0] == 'd', size);
    }
    tree_group_children();
    memset(content, 'x', sizeof content);
}

/* How many bytes a READ of `size` at `offset` answers; they are a prefix of `content`. */
static size_t tree_read_bytes(uint32_t number, uint64_t offset, size_t size) {
    uint64_t total = tree.nodes[number].size;
    uint64_t left = offset < total ? total - offset : 0;
    size_t bytes = left < size ? (size_t)left : size;
    return bytes < CONTENT_BYTES ? bytes : CONTENT_BYTES;
}

static mode_t tree_mode(uint32_t number) {
    return tree.nodes[number].is_directory ? S_IFDIR | 0755 : S_IFREG | 0444;
}

#endif
