/* Which rows of other host threads come before a row.

       hand-over   an await comes after its signal; whoever waits for an event comes after its record
       backward    rows of a backward pass come after its begin, and its end comes after all of them
       data        who reads a block comes after who wrote it last; who writes or frees it, after all who touched it

   A thread that waits for a row of another one has waited for all rows before that. So a row is left out if an earlier
   row of its thread waits for the same thread as long. */

#include "replay.h"

/* The last row of a thread that did something; a list. */
typedef struct {
    uint32_t row;
    int32_t next;
} Touch;

typedef struct {
    Touch *items;
    int64_t count, room;
    int32_t unused;
} Touches;

/* Who touched a block: who wrote it last, and since. */
typedef struct {
    uint32_t written;
    int32_t touches;
} BlockRows;

typedef struct {
    HostOrder *order;
    const ReplayInput *input;
    Touches touches;
    BlockRows *blocks;
    int64_t first_block, block_count;
    uint32_t *latest; /* by thread and other thread: the row after the last one that it waits for, or 0 */
} Finder;

/* --- rows and versions -------------------------------------------------------------------------------------------- */

/* Numbers the threads, and chains the rows of each. */
static void number_threads(HostOrder *order, const ReplayInput *input) {
    uint32_t count = (uint32_t)input->count, known = 0;
    int32_t last = 0;
    for (uint32_t row = 0; row < count; row++) {
        last = input->rows[row].thread > last ? input->rows[row].thread : last;
    }
    uint32_t *number = zeros(last + 1, sizeof(uint32_t));
    order->thread_of = zeros(count, sizeof(uint32_t));
    order->next = zeros(count, sizeof(uint32_t));
    for (uint32_t row = 0; row < count; row++) {
        uint32_t *found = &number[input->rows[row].thread];
        *found = *found ? *found : ++known;
        order->thread_of[row] = *found - 1;
    }
    order->threads = known;
    order->first = zeros(known, sizeof(uint32_t));
    for (uint32_t thread = 0; thread < known; thread++) {
        order->first[thread] = count;
    }
    for (uint32_t row = count; row-- > 0;) {
        order->next[row] = order->first[order->thread_of[row]];
        order->first[order->thread_of[row]] = row;
    }
    free(number);
}

/* Whether a row makes a version. */
static bool makes_version(const TraceRow *row) {
    return row->kind == ROW_record || row->kind == ROW_signal || row->kind == ROW_backward;
}

/* Lists the versions, which ascend in a trace. */
static void list_versions(HostOrder *order, const ReplayInput *input) {
    int64_t count = 0;
    for (int64_t row = 0; row < input->count; row++) {
        count += makes_version(&input->rows[row]);
    }
    order->versions = zeros(count, sizeof(Version));
    for (uint32_t row = 0; row < input->count; row++) {
        if (makes_version(&input->rows[row])) {
            order->versions[order->version_count++] = (Version){input->rows[row].version, row, -1};
        }
    }
}

int64_t order_version(const HostOrder *order, int64_t version) {
    int64_t low = 0, high = order->version_count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (order->versions[middle].version < version) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < order->version_count && order->versions[low].version == version ? low : -1;
}

/* --- earlier rows ------------------------------------------------------------------------------------------------- */

/* Lets a row, the last one looked at, come after a row of another thread. */
static void come_after(Finder *finder, uint32_t row, uint32_t earlier) {
    HostOrder *order = finder->order;
    uint32_t own = order->thread_of[row], other = order->thread_of[earlier];
    uint32_t *latest = &finder->latest[(int64_t)own * order->threads + other];
    if (own == other || *latest > earlier) {
        return;
    }
    *latest = earlier + 1;
    GROW(order->earlier);
    order->earlier.items[order->earlier.count++] = (Earlier){other, earlier};
}

/* Notes the last row of a thread in a list of them. */
static void touch(Finder *finder, int32_t *list, uint32_t row) {
    const uint32_t *thread_of = finder->order->thread_of;
    int32_t place;
    for (place = *list; place >= 0; place = finder->touches.items[place].next) {
        if (thread_of[finder->touches.items[place].row] == thread_of[row]) {
            finder->touches.items[place].row = row;
            return;
        }
    }
    TAKE_PLACE(finder->touches, next, place);
    finder->touches.items[place] = (Touch){row, *list};
    *list = place;
}

/* Lets a row come after all rows of a list, which is empty then. */
static void come_after_all(Finder *finder, uint32_t row, int32_t *list) {
    while (*list >= 0) {
        int32_t place = *list;
        *list = finder->touches.items[place].next;
        come_after(finder, row, finder->touches.items[place].row);
        LEAVE_PLACE(finder->touches, next, place);
    }
}

static void read_block(Finder *finder, uint32_t row, int64_t number) {
    BlockRows *block = &finder->blocks[number - finder->first_block];
    if (block->written != NO_ROW) {
        come_after(finder, row, block->written);
    }
    touch(finder, &block->touches, row);
}

static void write_block(Finder *finder, uint32_t row, int64_t number) {
    BlockRows *block = &finder->blocks[number - finder->first_block];
    come_after_all(finder, row, &block->touches);
    touch(finder, &block->touches, row);
    block->written = row;
}

static void touch_blocks(Finder *finder, uint32_t number) {
    const TraceRow *row = &finder->input->rows[number];
    for (int64_t place = row->first_read; place < row->first_write; place++) {
        read_block(finder, number, finder->input->blocks[place]);
    }
    for (int64_t place = row->first_write; place < row->end_write; place++) {
        write_block(finder, number, finder->input->blocks[place]);
    }
    if (row->block && row->kind == ROW_record_stream) {
        read_block(finder, number, row->block);
    } else if (row->block) {
        write_block(finder, number, row->block);
    }
}

/* The rows that come before a row because of its version and its backward pass. */
static void follow_versions(Finder *finder, uint32_t number) {
    const TraceRow *row = &finder->input->rows[number];
    Version *versions = finder->order->versions;
    int64_t version = row->version ? order_version(finder->order, row->version) : -1;
    int64_t pass = row->pass ? order_version(finder->order, row->pass) : -1;
    if (version >= 0 && row->kind == ROW_backward_end) {
        come_after_all(finder, number, &versions[version].rows);
    } else if (version >= 0 && !makes_version(row)) {
        come_after(finder, number, versions[version].row);
    }
    if (pass >= 0) {
        come_after(finder, number, versions[pass].row);
        touch(finder, &versions[pass].rows, number);
    }
}

/* --- life --------------------------------------------------------------------------------------------------------- */

/* Which numbers blocks have. */
static void number_blocks(Finder *finder) {
    const ReplayInput *input = finder->input;
    int64_t first = INT64_MAX, last = 0;
    for (int64_t row = 0; row < input->count; row++) {
        const TraceRow *one = &input->rows[row];
        for (int64_t place = one->first_read; place <= one->end_write; place++) {
            int64_t block = place < one->end_write ? input->blocks[place] : one->block;
            first = block && block < first ? block : first;
            last = block > last ? block : last;
        }
    }
    finder->first_block = first;
    finder->block_count = last ? last + 1 - first : 0;
    finder->blocks = zeros(finder->block_count, sizeof(BlockRows));
    for (int64_t block = 0; block < finder->block_count; block++) {
        finder->blocks[block] = (BlockRows){NO_ROW, -1};
    }
}

void order_begin(HostOrder *order, const ReplayInput *input) {
    *order = (HostOrder){0};
    number_threads(order, input);
    list_versions(order, input);
    order->first_earlier = zeros(input->count + 1, sizeof(int64_t));
    Finder finder = {.order = order, .input = input, .touches = {.unused = -1}};
    finder.latest = zeros((int64_t)order->threads * order->threads, sizeof(uint32_t));
    number_blocks(&finder);
    for (uint32_t row = 0; row < input->count; row++) {
        order->first_earlier[row] = order->earlier.count;
        follow_versions(&finder, row);
        touch_blocks(&finder, row);
    }
    order->first_earlier[input->count] = order->earlier.count;
    free(finder.latest);
    free(finder.blocks);
    free(finder.touches.items);
}

void order_end(HostOrder *order) {
    free(order->thread_of);
    free(order->first);
    free(order->next);
    free(order->first_earlier);
    free(order->earlier.items);
    free(order->versions);
}
