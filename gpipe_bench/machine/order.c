/* Which rows come before a row, apart from those before it in its strand.

       hand-over   an await comes after its signal; whoever waits for an event comes after its record
       backward    rows of a backward pass come after its begin, and its end comes after all of them
       node        a node of autograd comes after all nodes that give it gradients
       data        who reads a block comes after who wrote it last; who writes or frees it, after all who touched it

   A row that waits for another strand of its own thread holds its whole strand back: the thread could not go on. Only a
   free does not, nor do the rows of other threads that wait: memory is freed when nothing uses it any more. Sums of
   gradients wait for no data: in another order of arrival another thread would make them. */

#include "replay.h"

/* The last row of a strand that did something; a list. */
typedef struct {
    uint32_t row;
    int32_t next;
} Touch;

typedef PLACES(Touch) Touches;

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
} Finder;

/* --- versions ----------------------------------------------------------------------------------------------------- */

/* Whether a row makes a version. */
static bool makes_version(const TraceRow *row) {
    return row->kind == ROW_record || row->kind == ROW_signal || row->kind == ROW_backward || row->kind == ROW_nest;
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
            order->versions[order->version_count++] = (Version){input->rows[row].version, row, NO_ROW, NO_ROW, -1};
        }
    }
}

int64_t order_version(const HostOrder *order, int64_t version) {
    int64_t low = 0, high = order->version_count;
    /* Most traces have all versions from their first one on. */
    int64_t place = high ? version - order->versions[0].version : -1;
    if (place >= 0 && place < high && order->versions[place].version == version) {
        return place;
    }
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

/* --- strands ------------------------------------------------------------------------------------------------------ */

/* Whether a row begins a part of a nested pass. */
static bool is_nested(const TraceRow *row) {
    return row->kind == ROW_root || row->kind == ROW_return;
}

/* Whether a row begins a strand even if its thread has one. */
static bool begins_strand(const TraceRow *row) {
    return row->kind == ROW_node || is_nested(row) || (row->kind == ROW_backward_end && !row->pass);
}

/* A new strand that begins with a row. */
static uint32_t add_strand(HostOrder *order, const TraceRow *rows, uint32_t row, uint32_t thread) {
    bool node = rows[row].kind == ROW_node;
    Strand made = {thread, row, row, NO_ROW, node || is_nested(&rows[row]) ? 0 : UINT32_MAX, 0, rows[row].bytes};
    int64_t nest = is_nested(&rows[row]) ? order_version(order, rows[row].version) : -1;
    if (nest >= 0) {
        made.nest = order->versions[nest].row;
        *(rows[row].kind == ROW_root ? &order->versions[nest].root : &order->versions[nest].back) = order->strands;
    }
    int64_t pass = node && rows[row].pass ? order_version(order, rows[row].pass) : -1;
    while (pass >= 0) {
        pass = rows[order->versions[pass].row].pass ? order_version(order, rows[order->versions[pass].row].pass) : -1;
        made.depth++;
    }
    order->strand[order->strands] = made;
    return order->strands++;
}

/* Numbers threads and strands, and chains the rows of each strand. */
static void number_strands(HostOrder *order, const ReplayInput *input) {
    const TraceRow *rows = input->rows;
    int64_t count = input->count, strands = 0;
    int32_t most = 0;
    for (int64_t row = 0; row < count; row++) {
        most = rows[row].thread > most ? rows[row].thread : most;
        strands += begins_strand(&rows[row]);
    }
    order->strand = zeros(strands + most + 1, sizeof(Strand));
    order->strand_of = zeros(count, sizeof(uint32_t));
    order->next = zeros(count, sizeof(uint32_t));
    uint32_t *latest = zeros(most + 1, sizeof(uint32_t)); /* by thread: the number of its strand, from 1 */
    for (uint32_t row = 0; row < count; row++) {
        uint32_t *own = &latest[rows[row].thread];
        if (!*own || begins_strand(&rows[row])) {
            uint32_t thread = *own ? order->strand[*own - 1].thread : order->threads++;
            *own = add_strand(order, rows, row, thread) + 1;
        } else {
            order->next[order->strand[*own - 1].last] = row;
        }
        order->strand[*own - 1].last = row;
        order->strand_of[row] = *own - 1;
        order->next[row] = NO_ROW;
    }
    free(latest);
}

/* --- earlier rows ------------------------------------------------------------------------------------------------- */

/* Lets a row come after one of another strand. */
static void come_after(Finder *finder, uint32_t row, uint32_t earlier) {
    HostOrder *order = finder->order;
    const Strand *own = &order->strand[order->strand_of[row]], *other = &order->strand[order->strand_of[earlier]];
    if (own == other) {
        return;
    }
    if (own->thread == other->thread && finder->input->rows[row].kind != ROW_free) {
        row = own->first;
    }
    PUSH(order->later, (Later){row, order->first_later[earlier]});
    order->first_later[earlier] = order->later.count - 1;
    order->missing[row]++;
}

/* Notes the last row of a strand in a list of them. */
static void touch(Finder *finder, int32_t *list, uint32_t row) {
    const uint32_t *strand_of = finder->order->strand_of;
    int32_t place;
    for (place = *list; place >= 0; place = finder->touches.items[place].next) {
        if (strand_of[finder->touches.items[place].row] == strand_of[row]) {
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

/* A node comes after those that wait for it, whose last rows have said so. */
static void follow_nodes(Finder *finder, uint32_t number) {
    const TraceRow *row = &finder->input->rows[number];
    uint32_t last = finder->order->strand[finder->order->strand_of[number]].last;
    for (int64_t place = row->first_read; place < row->first_write; place++) {
        touch(finder, &finder->blocks[finder->input->accesses[place].block - finder->first_block].touches, last);
    }
    come_after_all(finder, number, &finder->blocks[finder->input->accesses[row->first_write].block - finder->first_block].touches);
}

static void touch_blocks(Finder *finder, uint32_t number) {
    const TraceRow *row = &finder->input->rows[number];
    for (int64_t place = row->first_read; place < row->first_write && !row->sums; place++) {
        read_block(finder, number, finder->input->accesses[place].block);
    }
    for (int64_t place = row->first_write; place < row->end_write && !row->sums; place++) {
        write_block(finder, number, finder->input->accesses[place].block);
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
        come_after(finder, number, versions[version].row);
        come_after_all(finder, number, &versions[version].rows);
    } else if (is_nested(row)) {
        /* Its thread comes to it by its frames. */
        finder->order->missing[number]++;
    } else if (version >= 0 && !makes_version(row)) {
        come_after(finder, number, versions[version].row);
    }
    if (pass < 0) {
        return;
    }
    const Strand *own = &finder->order->strand[finder->order->strand_of[number]];
    bool is_own_pass = own->depth != UINT32_MAX && finder->input->rows[own->first].pass == row->pass;
    if (!is_own_pass) {
        come_after(finder, number, versions[pass].row);
        touch(finder, &versions[pass].rows, number);
    } else if (own->first == number) {
        /* Once for all of a node's rows: no list has its strand yet. */
        come_after(finder, number, versions[pass].row);
        int32_t place;
        TAKE_PLACE(finder->touches, next, place);
        finder->touches.items[place] = (Touch){own->last, versions[pass].rows};
        versions[pass].rows = place;
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
            int64_t block = place < one->end_write ? input->accesses[place].block : one->block;
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
    list_versions(order, input);
    number_strands(order, input);
    order->missing = zeros(input->count, sizeof(uint32_t));
    order->first_later = zeros(input->count, sizeof(uint32_t));
    Finder finder = {.order = order, .input = input, .touches = {.unused = -1}};
    number_blocks(&finder);
    for (uint32_t row = 0; row < input->count; row++) {
        order->first_later[row] = NO_ROW;
    }
    for (uint32_t row = 0; row < input->count; row++) {
        follow_versions(&finder, row);
        if (input->rows[row].kind == ROW_node || input->rows[row].kind == ROW_return) {
            follow_nodes(&finder, row);
        } else {
            touch_blocks(&finder, row);
        }
    }
    free(finder.blocks);
    free(finder.touches.items);
}

void order_end(HostOrder *order) {
    free(order->strand);
    free(order->strand_of);
    free(order->next);
    free(order->missing);
    free(order->first_later);
    free(order->later.items);
    free(order->versions);
}
