/* Give every aligned block, which is what torch keeps tensors in, pages of its own, with a page
 * that may not be touched behind it or, after guard_layout(1, …), before it. What is freed may not
 * be touched any more either. New blocks are filled with the byte that guard_layout was given.
 *
 * AddressSanitizer sees what was compiled with it, and torch's wheel was not; this sees any access
 * of any code beyond 63 bytes after a block's end (before its start), since blocks end on 64.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096 };
static const size_t ARENA = (size_t)256 << 30;
static const size_t FILLED = (size_t)16 << 20; /* larger blocks stay as the kernel gives them: 0 */

static char *arena;
static uint32_t *counts; /* pages of the block that begins on this page */
static _Atomic size_t next_page;
static int is_before;
static int fill;
static void (*real_free)(void *);
static void *(*real_realloc)(void *, size_t);
static size_t (*real_usable)(void *);

static void *reserve(size_t size, int protection) {
    void *found = mmap(0, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? 0 : found;
}

__attribute__((constructor)) static void start(void) {
    real_free = dlsym(RTLD_NEXT, "free");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_usable = dlsym(RTLD_NEXT, "malloc_usable_size");
    counts = reserve(ARENA / PAGE * sizeof *counts, PROT_READ | PROT_WRITE);
    arena = reserve(ARENA, PROT_NONE);
}

void guard_layout(int before, int byte) {
    is_before = before;
    fill = byte;
}

static int is_ours(const void *block) {
    return arena && (const char *)block >= arena && (const char *)block < arena + ARENA;
}

static size_t page_of(const void *block) { return ((const char *)block - arena) / PAGE; }

static size_t usable(const void *block) {
    size_t page = page_of(block);
    return arena + (page + counts[page]) * PAGE - (const char *)block;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    size_t rounded = (size + 63) & ~(size_t)63, count = (rounded + PAGE - 1) / PAGE;
    if (!arena || alignment > PAGE || size > ARENA / 2) return ENOMEM;
    size_t page = atomic_fetch_add(&next_page, count + 2) + 1; /* a free page on each side */
    if (page + count + 1 > ARENA / PAGE) return ENOMEM;
    char *low = arena + page * PAGE;
    if (count && mprotect(low, count * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    counts[page] = count;
    *out = is_before ? low : low + ((count * PAGE - rounded) & ~(alignment - 1));
    if (fill && size <= FILLED) memset(low, fill, count * PAGE);
    return 0;
}

void free(void *block) {
    if (is_ours(block)) {
        char *low = arena + page_of(block) * PAGE;
        size_t length = counts[page_of(block)] * (size_t)PAGE;
        madvise(low, length, MADV_DONTNEED);
        mprotect(low, length, PROT_NONE);
    } else if (real_free) {
        real_free(block);
    }
}

void *realloc(void *block, size_t size) {
    if (!is_ours(block)) return real_realloc(block, size);
    void *moved = real_realloc(0, size);
    if (moved) memcpy(moved, block, usable(block) < size ? usable(block) : size);
    if (moved) free(block);
    return moved;
}

size_t malloc_usable_size(void *block) {
    return is_ours(block) ? usable(block) : real_usable(block);
}
