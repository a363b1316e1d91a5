/* Where partitions are: devices, workers and streams, handed out as the engine hands them out. */

#include "clock.h"

/* Streams per device and priority in PyTorch's pool; more requests share them (c10/cuda/CUDAStream.cpp). */
enum { POOL = 32 };

/* A stream of a device's pool; those that copy have a priority, and so a pool, of their own. */
static uint32_t new_stream(Clock *clock, uint32_t device, bool copies) {
    uint32_t pool = 2 * device + copies, turn = clock->pool_taken[pool]++ % POOL;
    uint32_t *found = &clock->pool[pool * POOL + turn];
    if (*found == NONE)
        *found = stream_add(clock, device);
    return *found;
}

/* Whether other rows of the schedule share the device of partition j. */
static bool shares_device(const Input *input, uint32_t j) {
    for (int64_t other = 0; other < input->partitions; other++)
        if (input->device_of[other] == input->device_of[j] && input->row_of[other] != input->row_of[j])
            return true;
    return false;
}

/* The compute stream of partition j: its device's default stream; through the host, rows that share a device have one
   each. */
static uint32_t compute_stream(Clock *clock, uint32_t j) {
    const Input *input = clock->input;
    if (!input->has_streams || !input->staged || !shares_device(input, j))
        return (uint32_t)input->device_of[j];
    for (uint32_t other = 0; other < j; other++)
        if (input->row_of[other] == input->row_of[j])
            return clock->computing[other];
    return new_stream(clock, (uint32_t)input->device_of[j], false);
}

/* Hands out compute streams, then the streams on which each partition copies: without copy streams its compute stream.
   The default streams of all devices come first. */
void places_start(Clock *clock) {
    const Input *input = clock->input;
    uint32_t n = (uint32_t)input->partitions, m = (uint32_t)input->microbatches, devices = (uint32_t)input->devices;
    bool aside = input->copy_streams && input->has_streams && n > 1;
    for (uint32_t device = 0; device < devices; device++)
        stream_add(clock, device);
    clock->pool_taken = zeros(2 * devices, sizeof(uint32_t));
    clock->pool = nones(2 * (int64_t)devices * POOL);
    clock->computing = zeros(n, sizeof(uint32_t));
    clock->workers = zeros(n, sizeof(uint32_t));
    clock->copy_streams = zeros((int64_t)m * n, sizeof(uint32_t));
    uint32_t *first = nones(devices);
    for (uint32_t j = 0; j < n; j++) {
        uint32_t device = (uint32_t)input->device_of[j];
        if (first[device] == NONE)
            first[device] = j;
        /* Tasks of one device are issued by one thread; each partition on the CPU is a device of its own. */
        clock->workers[j] = input->has_streams ? first[device] : j;
        clock->computing[j] = compute_stream(clock, j);
    }
    for (uint32_t j = 0; j < n; j++)
        for (uint32_t i = 0; i < m; i++)
            clock->copy_streams[j * m + i] =
                aside ? new_stream(clock, (uint32_t)input->device_of[j], true) : clock->computing[j];
    free(first);
}

void places_free(Clock *clock) {
    free(clock->pool_taken);
    free(clock->pool);
    free(clock->computing);
    free(clock->workers);
    free(clock->copy_streams);
}

/* The stream on which partition j copies micro-batch i. */
uint32_t copy_stream(const Clock *clock, uint32_t i, uint32_t j) {
    return clock->copy_streams[j * clock->input->microbatches + i];
}

bool moves(const Clock *clock, uint32_t source, uint32_t target) {
    const Input *input = clock->input;
    return input->device_of[source] != input->device_of[target] ||
           (input->staged && input->row_of[source] != input->row_of[target]);
}

/* The stream on which gradients of (i, j) arrive. */
uint32_t leaving(const Clock *clock, uint32_t i, uint32_t j) {
    return j < clock->input->partitions - 1 ? copy_stream(clock, i, j) : clock->computing[j];
}
