/* Growable vectors. */

#ifndef GPIPE_BENCH_GROW_H
#define GPIPE_BENCH_GROW_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* End the process: the host has no memory left, or a number has outgrown its field. */
static inline void give_up(const char *what) {
    fprintf(stderr, "gpipe_bench: the simulation cannot go on: %s\n", what);
    abort();
}

/* What malloc has given, unless it has failed. */
static inline void *given(void *made) {
    if (made == NULL)
        give_up("no memory left on the host");
    return made;
}

/* Memory that is all zero; like malloc, but it never fails. */
static inline void *zeros(int64_t count, size_t size) {
    return given(calloc((size_t)(count ? count : 1), size));
}

/* `items` with more room: half as much again. */
static inline void *grown(void *items, uint32_t *room, size_t size) {
    *room += *room / 2 + 8;
    if (*room > INT32_MAX)
        give_up("more than 2^31 items of one sort");
    return given(realloc(items, *room * size));
}

#define VECTOR(type) \
    struct { \
        type *items; \
        uint32_t count, room; \
    }

/* The same with places that are used again: a field of the items chains those that are unused. */
#define PLACES(type) \
    struct { \
        type *items; \
        uint32_t count, room; \
        int32_t unused; /* -1: none */ \
    }

/* Make room for one more item; places of items have 31 bits. */
#define GROW(vector) \
    do { \
        if ((vector).count == (vector).room) \
            (vector).items = grown((vector).items, &(vector).room, sizeof *(vector).items); \
    } while (0)

/* Append an item. */
#define PUSH(vector, ...) \
    do { \
        GROW(vector); \
        (vector).items[(vector).count++] = (__VA_ARGS__); \
    } while (0)

/* A place for one more item: an unused one, or one at the end. */
#define TAKE_PLACE(vector, link, place) \
    do { \
        (place) = (vector).unused; \
        if ((place) < 0) { \
            GROW(vector); \
            (place) = (int32_t)(vector).count++; \
        } else { \
            (vector).unused = (vector).items[place].link; \
        } \
    } while (0)

/* A place is unused from now on. */
#define LEAVE_PLACE(vector, link, place) \
    do { \
        (vector).items[place].link = (vector).unused; \
        (vector).unused = (place); \
    } while (0)

#endif
